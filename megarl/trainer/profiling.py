"""Profilers of a run: which processes have one, and which steps they record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.cluster.processes import RunProcesses
from megarl.config.schema import TrainConfig
from megarl.config.tracing import ProfilerConfig, RoleProfilerConfig, ToolConfig
from megarl.config.tracing_checks import needs_cuda, profiled_roles
from megarl.errors import ConfigError
from megarl.tracing import ProfileOptions, RoleProfile

PROFILES = "profile"
ROLES = {"actor_rollout_ref.actor": "actor", "actor_rollout_ref.ref": "reference", "critic": "critic"}
"""Roles of processes by the paths of their sections."""
NSIGHT = {
    "trace": "cuda,nvtx,cublas,ucx",
    "cuda-memory-usage": "true",
    "capture-range": "cudaProfilerApi",
    "capture-range-end": "repeat",
    "kill": "none",
}
"""Options of ``nsys profile``: it captures where :class:`~megarl.tracing.profilers.NsysRanges` says."""


def role_profiles(config: TrainConfig, folder: Path) -> dict[str, RoleProfile]:
    """What each role profiles; empty where no step is.

    Args:
        config: complete; its device is known.
        folder: of the run's files.

    Raises:
        ConfigError: the tool needs CUDA, and the run is on CPU.
    """
    keys = config.global_profiler
    if keys.tool is None or not keys.steps:
        return {}
    if keys.tool != "torch" and config.trainer.device == "cpu":
        raise ConfigError(f"global_profiler.tool={keys.tool}: {needs_cuda(keys.tool)}")
    options = profile_options(keys, Path(keys.save_path or folder / PROFILES).absolute())
    chosen = {ROLES[path]: _ranks(profiler) for path, profiler in profiled_roles(config).items()}
    return {role: RoleProfile(options, ranks) for role, ranks in chosen.items() if ranks is not None}


def _ranks(profiler: RoleProfilerConfig) -> tuple[int, ...] | None:
    """The ranks of a role that are profiled, () for all; None where the role is not."""
    if not profiler.enable:
        return None
    return () if profiler.all_ranks else tuple(profiler.ranks)


def profile_options(keys: ProfilerConfig, folder: Path) -> ProfileOptions:
    """What a process is told of its profiler."""
    tools: ToolConfig = keys.global_tool_config
    return ProfileOptions(
        tool=str(keys.tool),
        folder=str(folder),
        discrete=(tools.torch.discrete and keys.tool == "torch") or (tools.nsys.discrete and keys.tool == "nsys"),
        contents=tuple(tools.torch.contents),
        max_entries=tools.torch_memory.trace_alloc_max_entries,
        nsight=NSIGHT | {name: str(value) for name, value in tools.nsys.worker_nsight_options.items()},
    )


class ProfiledSteps:
    """Has the processes' profilers record the chosen steps.

    Args:
        keys: of the configuration.
        processes: of the run; those with a profiler know it.
        message: tells the user a line.
    """

    def __init__(self, keys: ProfilerConfig, processes: RunProcesses, message: Callable[[str], None]) -> None:
        self._steps = set(keys.steps or ())
        self._together = keys.profile_continuous_steps
        self._processes, self._message = processes, message
        self._label = ""
        self._asked: list[Any] = []

    def begin_step(self, step: int) -> None:
        """A step begins.

        Raises:
            WorkerError: a profiler failed.
        """
        if step == 0:
            self._tell_missing()
        label = self.label(step)
        if label != self._label:
            self._wait()
            self._label = label
            self._asked = self._processes.profile(label)

    def label(self, step: int) -> str:
        """What a step's file is called; the same for steps that share one, empty for a step that is not recorded."""
        if step not in self._steps:
            return ""
        first = step
        while self._together and first - 1 in self._steps:
            first -= 1
        return f"step{first}"

    def close(self) -> None:
        """Stop, and wait until everything is written."""
        self.begin_step(-1)
        self._wait()

    def _wait(self) -> None:
        asked, self._asked = self._asked, []
        self._processes.wait(asked)

    def _tell_missing(self) -> None:
        """A rank that there is not would be passed over in silence."""
        there = {(member.role, member.rank) for member in self._processes.members()}
        for role, profile in self._processes.options.profiles.items():
            missing = [rank for rank in profile.ranks if (role, rank) not in there]
            if missing:
                self._message(
                    f"global_profiler: {role} has no rank {', '.join(map(str, missing))}, which is not profiled"
                )
