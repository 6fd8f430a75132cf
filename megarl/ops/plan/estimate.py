"""Estimate of a configuration: memory, cost of a step, weight sync, and shortfalls of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from megarl.base.formatting import GIB
from megarl.config import MegatronConfig, SupervisedConfig, TrainConfig
from megarl.config.checks import check
from megarl.config.derived import with_derived
from megarl.config.inherited import followers
from megarl.config.keys import with_values
from megarl.config.problems import InvalidConfigError, format_value
from megarl.config.schema.jobs import ROLLOUT, TEACHERS, own_pools
from megarl.config.schema.model import LogProbBatchConfig
from megarl.ops.plan.hardware import Hardware
from megarl.ops.plan.job import PlannedJob
from megarl.ops.plan.job_from_config import planned_job
from megarl.ops.plan.lengths import Lengths
from megarl.ops.plan.memory import Component, MemoryPlan, plan_memory
from megarl.ops.plan.step_costs import StepCost, step_cost
from megarl.ops.plan.sync_traffic import SyncTraffic, plan_sync

Config = TypeVar("Config", bound=TrainConfig | SupervisedConfig)

HOST_SHARE = 0.9  # usable fraction of a node's host memory
LARGEST_FIRST = 3  # number of components listed in a shortfall


class Shortfall(NamedTuple):
    """Memory that a run lacks."""

    phase: str  # name of the phase; host for host memory
    needed: float  # bytes
    available: float  # bytes
    largest: tuple[Component, ...]  # the largest components, the largest first
    text: str

    @property
    def missing(self) -> float:
        """Missing bytes."""
        return self.needed - self.available


@dataclass(frozen=True)
class Estimate:
    """Plan of a configuration."""

    job: PlannedJob
    hardware: Hardware
    lengths: Lengths
    memory: MemoryPlan
    sync: SyncTraffic | None  # the weight sync; None without a sync, or if it was not planned
    step: StepCost

    @cached_property
    def shortfalls(self) -> tuple[Shortfall, ...]:
        """All shortfalls, the largest first; empty if the run fits."""
        return tuple(sorted(shortfalls(self.job, self.memory, self.hardware), key=lambda shortfall: -shortfall.missing))

    @property
    def fits(self) -> bool:
        """Whether the run has enough memory."""
        return not self.shortfalls

    @property
    def usable_bytes(self) -> float:
        """Bytes of a device that are usable for tensors."""
        return usable_bytes(self.job, self.hardware)


def estimate(
    config: TrainConfig | SupervisedConfig, hardware: Hardware, lengths: Lengths, *, with_sync: bool = False
) -> Estimate:
    """Plan a configuration.

    Raises:
        InvalidConfigError, ConfigError, ModelError: the configuration cannot run, independent of memory.
    """
    job = planned_job(config, device=hardware.device)
    memory = plan_memory(job, int(usable_bytes(job, hardware)), hardware.devices_per_node)
    sync = plan_sync(job, hardware) if with_sync else None
    # If not even one response fits, generation costs as much as with an unlimited KV cache.
    kv_tokens = memory.kv.tokens if memory.kv and job.rollout and memory.kv.tokens >= job.rollout.longest else None
    step = step_cost(job, hardware, lengths, kv_tokens)
    return Estimate(job, hardware, lengths, memory, sync, step)


def usable_bytes(job: PlannedJob, hardware: Hardware) -> float:
    """Return the bytes of a device that are usable for its processes' tensors, on the pool with the most roles."""
    sections = [role.section for role in job.roles]
    sections += [ROLLOUT] if job.rollout is not None and not job.rollout.is_external else []
    processes = max(Counter(job.pool_of(section).section for section in sections).values())
    return max(0.0, hardware.memory_bytes - processes * hardware.reserved_gib * GIB)


def shortfalls(job: PlannedJob, memory: MemoryPlan, hardware: Hardware) -> list[Shortfall]:
    """Return all shortfalls of memory."""
    result, usable = [], usable_bytes(job, hardware)
    for phase in memory.phases:
        if phase.nbytes > usable:
            text = f"{phase.phase} needs {phase.nbytes / GIB:.1f} GiB of a device's {usable / GIB:.1f} usable"
            result.append(Shortfall(phase.phase, phase.nbytes, usable, phase.components[:LARGEST_FIRST], text))
    rollout, kv = job.rollout, memory.kv
    if rollout is not None and kv is not None and kv.tokens < rollout.longest:
        text = (
            f"gen has room for {kv.tokens:,} tokens of keys and values on a replica ({kv.how}), "
            f"and one response may need {rollout.longest:,}"
        )
        missing = (rollout.longest - kv.tokens) * kv.bytes_per_token
        gen = next(phase for phase in memory.phases if phase.phase == "gen")
        result.append(Shortfall("gen", usable + missing, usable, gen.components[:LARGEST_FIRST], text))
    host = HOST_SHARE * hardware.host_bytes
    if memory.host_bytes > host:
        text = f"a node's memory must hold {memory.host_bytes / GIB:,.0f} GiB, of {host / GIB:,.0f} usable"
        result.append(Shortfall("host", memory.host_bytes, host, memory.host[:LARGEST_FIRST], text))
    return result


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return a copy with values changed by dotted path; derived and inherited values follow.

    Raises:
        InvalidConfigError: the values are inconsistent.
    """
    result = with_derived(with_values(config, {**_derived_values(config), **followers(config, changes), **changes}))
    problems = check(result)
    if problems:
        raise InvalidConfigError(problems)
    return result


def overrides_of(changes: Mapping[str, Any]) -> list[str]:
    """Return changes as command-line overrides; a key of SGLang's arguments is added."""
    keys = {path: f"+{path}" if ".server_args." in path else path for path in changes}
    return [f"{keys[path]}={format_value(value)}" for path, value in changes.items()]


def _derived_values(config: TrainConfig | SupervisedConfig) -> dict[str, None]:
    """Keys to derive again: sizes that fill the remaining devices, and token budgets equal to the actor's."""
    own = {section: keys.own_devices for section, keys in own_pools(config).items()}
    devices = config.trainer.num_devices
    derived: list[str] = []
    if isinstance(config, SupervisedConfig):
        layouts: dict[str, MegatronConfig | None] = {"megatron": config.megatron}
    else:
        policy, path = config.actor_rollout_ref, "actor_rollout_ref"
        layouts = {
            f"{path}.actor.megatron": policy.actor.megatron,
            f"{path}.ref.megatron": policy.ref.megatron,
            "critic.megatron": config.critic.megatron,
            "reward.model.megatron": config.reward.model.megatron,
        }
        teachers = {f"distillation.teacher_models.{n}": t for n, t in config.distillation.local_teachers.items()}
        layouts |= {f"{section}.megatron": teacher.megatron for section, teacher in teachers.items()}
        rollout = policy.rollout
        if rollout.replicas and rollout.replicas * rollout.devices_per_replica == (rollout.own_devices or devices):
            derived.append(f"{path}.rollout.replicas")
        passes: dict[str, LogProbBatchConfig] = {
            f"{path}.rollout.log_prob_": rollout.log_prob_batch,
            f"{path}.ref.": policy.ref,
            **{f"{section}.": teacher for section, teacher in teachers.items()},
        }
        for prefix, keys in passes.items():
            if keys.max_token_len_per_gpu == policy.actor.max_token_len_per_gpu:
                derived.append(f"{prefix}max_token_len_per_gpu")
    for section, megatron in layouts.items():
        pool = TEACHERS if section.startswith(TEACHERS) else section.removesuffix(".megatron")
        if megatron and (megatron.data_parallel_size or 0) * megatron.devices_per_replica == own.get(pool, devices):
            derived.append(f"{section}.data_parallel_size")
    return dict.fromkeys(derived)
