"""All that is told of a configuration before it runs: memory, times, the weight sync, and what does not fit."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from megarl.amounts import GIB
from megarl.config import SupervisedConfig, TrainConfig
from megarl.config.checks import check
from megarl.config.derived import fill_derived
from megarl.config.problems import InvalidConfigError, value_at
from megarl.plan.hardware import Hardware
from megarl.plan.job import PlannedJob, planned_job
from megarl.plan.lengths import Lengths
from megarl.plan.memory import Component, MemoryPlan, plan_memory
from megarl.plan.sync import SyncTraffic, plan_sync, rough_sync_s
from megarl.plan.times import StepTime, time_step

Config = TypeVar("Config", bound=TrainConfig | SupervisedConfig)

HOST_SHARE = 0.9
"""Of a node's memory, the rest being for everything else on it."""
LARGEST_FIRST = 3
"""How many of the largest components are named."""


class Shortfall(NamedTuple):
    """Memory that is not there.

    Attributes:
        phase: in which phase; ``host`` for the memory of nodes.
        needed: bytes.
        available: bytes.
        largest: what takes most of it, the largest first.
        text: what does not fit, in words.
    """

    phase: str
    needed: float
    available: float
    largest: tuple[Component, ...]
    text: str

    @property
    def missing(self) -> float:
        """Bytes."""
        return self.needed - self.available


@dataclass(frozen=True)
class Estimate:
    """A configuration's plan.

    Attributes:
        job: roles, layouts, batches.
        hardware: what it runs on.
        lengths: of prompts and answers.
        memory: bytes.
        sync: the weight sync; None where there is none, or where it was not planned.
        step: seconds.
    """

    job: PlannedJob
    hardware: Hardware
    lengths: Lengths
    memory: MemoryPlan
    sync: SyncTraffic | None
    step: StepTime

    @cached_property
    def shortfalls(self) -> tuple[Shortfall, ...]:
        """Everything that does not fit, the worst first; empty where all fits."""
        return tuple(sorted(shortfalls(self.job, self.memory, self.hardware), key=lambda one: -one.missing))

    @property
    def fits(self) -> bool:
        """Whether the run has the memory it needs."""
        return not self.shortfalls

    @property
    def usable_bytes(self) -> float:
        """Bytes of a device that tensors may take."""
        return usable_bytes(self.job, self.hardware)


def estimate(
    config: TrainConfig | SupervisedConfig, hardware: Hardware, lengths: Lengths, *, with_sync: bool = True
) -> Estimate:
    """Plans a configuration.

    Args:
        config: complete and checked.
        hardware: what it runs on.
        lengths: of prompts and answers.
        with_sync: plan the weight sync in full; otherwise its time is that of sending every rank all it holds.

    Raises:
        InvalidConfigError, ConfigError, ModelError: the configuration cannot run, whatever the memory.
    """
    job = planned_job(config, device=hardware.device)
    memory = plan_memory(job, int(usable_bytes(job, hardware)))
    sync = plan_sync(job, hardware) if with_sync else None
    seconds = sync.seconds if sync else rough_sync_s(job, hardware)
    # Where not even one answer has room there is nothing to time; then what it would take with room enough.
    room = memory.kv.tokens if memory.kv and job.rollout and memory.kv.tokens >= job.rollout.longest else None
    step = time_step(job, hardware, lengths, seconds, room)
    return Estimate(job, hardware, lengths, memory, sync, step)


def usable_bytes(job: PlannedJob, hardware: Hardware) -> float:
    """Bytes of a device that its processes' tensors may take."""
    processes = len(job.roles) + (job.rollout is not None and not job.rollout.is_elsewhere)
    return max(0.0, hardware.memory_bytes - processes * hardware.reserved_bytes)


def shortfalls(job: PlannedJob, memory: MemoryPlan, hardware: Hardware) -> list[Shortfall]:
    """Everything that does not fit."""
    found, usable = [], usable_bytes(job, hardware)
    for phase in memory.phases:
        if phase.nbytes > usable:
            text = f"{phase.phase} needs {phase.nbytes / GIB:.1f} GiB of a device's {usable / GIB:.1f} usable"
            found.append(Shortfall(phase.phase, phase.nbytes, usable, phase.components[:LARGEST_FIRST], text))
    rollout, kv = job.rollout, memory.kv
    if rollout is not None and kv is not None and kv.tokens < rollout.longest:
        text = (
            f"gen has room for {kv.tokens:,} tokens of keys and values on a replica ({kv.how}), "
            f"and one answer may need {rollout.longest:,}"
        )
        missing = (rollout.longest - kv.tokens) * kv.bytes_per_token
        gen = next(phase for phase in memory.phases if phase.phase == "gen")
        found.append(Shortfall("gen", usable + missing, usable, gen.components[:LARGEST_FIRST], text))
    host = HOST_SHARE * hardware.host_bytes
    if memory.host_bytes > host:
        text = f"a node's memory must hold {memory.host_bytes / GIB:,.0f} GiB, of {host / GIB:,.0f} usable"
        found.append(Shortfall("host", memory.host_bytes, host, memory.host[:LARGEST_FIRST], text))
    return found


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """A copy of a configuration with other values; what follows from those that are changed is worked out anew.

    Args:
        config: complete.
        changes: by dotted path.

    Raises:
        InvalidConfigError: the values do not go together.
    """
    result = copy.deepcopy(config)
    _forget_derived(result)
    for path, value in changes.items():
        *parents, last = path.split(".")
        section = value_at(result, ".".join(parents))
        if isinstance(section, dict):
            section[last] = value
        else:
            setattr(section, last, value)
    fill_derived(result)
    problems = check(result)
    if problems:
        raise InvalidConfigError(problems)
    return result


def _forget_derived(config: TrainConfig | SupervisedConfig) -> None:
    """Sizes that are what the others leave of the devices, and budgets that are the actor's, are null again."""
    devices = config.trainer.num_devices
    if isinstance(config, SupervisedConfig):
        sections = [config.megatron]
    else:
        policy = config.actor_rollout_ref
        sections = [m for m in (policy.actor.megatron, policy.ref.megatron, config.critic.megatron) if m is not None]
        sections.append(config.reward_model.megatron)
        rollout = policy.rollout
        if rollout.replicas is not None and rollout.replicas * rollout.devices_per_replica == devices:
            rollout.replicas = None
        for keys in (rollout, policy.ref):
            if keys.log_prob_max_token_len_per_gpu == policy.actor.ppo_max_token_len_per_gpu:
                keys.log_prob_max_token_len_per_gpu = None
    for section in sections:
        held = section.tensor_model_parallel_size * section.pipeline_model_parallel_size
        if (section.data_parallel_size or 0) * held * section.context_parallel_size == devices:
            section.data_parallel_size = None
