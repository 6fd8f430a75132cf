"""What the sections of the timeline, the watchdog and the profilers must agree on."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megarl.config.jobs import JobConfig
from megarl.config.problems import Problem
from megarl.config.schema import TrainConfig
from megarl.config.tracing import PHASES, RoleProfilerConfig

ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"


def tracing_problems(config: JobConfig) -> Iterator[Problem]:
    """Problems of ``trainer.timeline`` and ``trainer.watchdog``."""
    if any(step < 0 for step in config.trainer.timeline.steps):
        yield Problem.at(config, "trainer.timeline.steps", "steps are counted from 0, the time before the first")
    for phase, seconds in config.trainer.watchdog.phases.items():
        if phase not in PHASES:
            text = f"there is no phase {phase!r}; there are {', '.join(PHASES)}"
            yield Problem.at(config, "trainer.watchdog.phases", text)
        elif seconds is not None and not (_is_number(seconds) and seconds > 0):
            text = f"{phase}: {seconds!r} must be seconds > 0, or null for no limit"
            yield Problem.at(config, "trainer.watchdog.phases", text)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def profiler_problems(config: TrainConfig) -> Iterator[Problem]:
    """Problems of ``global_profiler`` and the roles' ``profiler``."""
    keys, on = config.global_profiler, []
    for role, profiler in profiled_roles(config).items():
        if not profiler.enable:
            continue
        on.append(role)
        if keys.tool is None:
            text = "there is no profiler: set global_profiler.tool and global_profiler.steps"
            yield Problem.at(config, f"{role}.profiler.enable", text)
        if not profiler.all_ranks and not profiler.ranks:
            text = f"no rank is profiled: name some, or set {role}.profiler.all_ranks=true"
            yield Problem.at(config, f"{role}.profiler.ranks", text)
    if REF in on and config.actor_rollout_ref.ref.megatron is None:
        text = "the reference lives in the actor's processes: set actor_rollout_ref.actor.profiler.enable"
        yield Problem.at(config, f"{REF}.profiler.enable", text)
    if keys.tool is not None and keys.steps:
        if not on:
            roles = ", ".join(f"{role}.profiler.enable" for role in profiled_roles(config))
            yield Problem.at(config, "global_profiler.tool", f"no role is profiled: set one of {roles}")
        if keys.tool != "torch" and config.trainer.device == "cpu":
            yield Problem.at(config, "global_profiler.tool", needs_cuda(keys.tool))
    elif on and keys.tool is not None:
        yield Problem.at(config, "global_profiler.steps", "no step is profiled: name some, as [2]")


def profiled_roles(config: TrainConfig) -> dict[str, RoleProfilerConfig]:
    """The ``profiler`` sections by the path of their role."""
    policy = config.actor_rollout_ref
    return {ACTOR: policy.actor.profiler, REF: policy.ref.profiler, "critic": config.critic.profiler}


def needs_cuda(tool: str) -> str:
    """Why a tool does not work on a CPU, and what does."""
    sees = {"torch_memory": "CUDA's memory", "nsys": "what CUDA does"}[tool]
    return (
        f"{tool} records {sees}, and this run is on CPU: use tool=torch, with memory among "
        "global_profiler.global_tool_config.torch.contents to see allocations"
    )
