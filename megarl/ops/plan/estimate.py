"""Estimate of a configuration: memory, step cost, weight sync, shortfalls, and the smallest change that makes it fit.

Changes are tried from the cheapest to the most expensive: offloading of idle states, sharded states, recomputation,
smaller micro-batches, a larger KV cache, more devices per replica, more tensor and pipeline parallelism. At each cost,
if no single change is enough, changes that help and cost no more are combined; more nodes come last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from megarl.base.errors import MegarlError
from megarl.base.formatting import GIB
from megarl.config import MegatronConfig, SupervisedConfig, TrainConfig
from megarl.config.checks import check
from megarl.config.derived import followers, with_derived
from megarl.config.keys import value_at, with_values
from megarl.config.problems import InvalidConfigError, format_value
from megarl.config.schema.jobs import ROLLOUT, TEACHERS, own_pools
from megarl.config.schema.model import LogProbBatchConfig
from megarl.ops.plan.flops import Lengths
from megarl.ops.plan.hardware import Hardware
from megarl.ops.plan.job import PlannedJob, PlannedRole, planned_job
from megarl.ops.plan.memory import Component, MemoryPlan, plan_memory
from megarl.ops.plan.step_costs import StepCost, SyncTraffic, plan_sync, step_cost

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


def lacking(job: PlannedJob, hardware: Hardware) -> list[Shortfall]:
    """Return the shortfalls of a job that has no plan yet."""
    memory = plan_memory(job, int(usable_bytes(job, hardware)), hardware.devices_per_node)
    return shortfalls(job, memory, hardware)


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


Changes = Mapping[str, Any]
_BY_COST: tuple[tuple[str, ...], ...] = (
    ("",),
    ("_offload", "free_cache_engine", "use_distributed_optimizer"),
    ("recompute_granularity",),
    ("per_gpu",),
    ("mem_fraction_static", "max_num_seqs"),
    ("rollout.tensor_model_parallel_size",),
    ("megatron.expert_model_parallel_size", "megatron.tensor_model_parallel_size"),
    ("megatron.pipeline_model_parallel_size",),
)
"""Suffixes of keys, from the lowest to the highest cost in speed."""
_FRACTION = f"{ROLLOUT}.engine_kwargs.sglang.server_args.mem_fraction_static"


def find_suggestion(planned: Estimate) -> Changes | None:
    """Return the smallest change that makes a run fit whose plan does not; None if no known change does."""
    attempts = _Attempts(planned)
    phases = [shortfall.phase for shortfall in planned.shortfalls]
    found = (change for phase in phases for change in single_changes(planned.job, phase))
    singles = sorted({tuple(change.items()): change for change in found}.values(), key=_speed_cost)
    for cost in sorted({_speed_cost(change) for change in singles}):
        enough = next(attempts.alone(change for change in singles if _speed_cost(change) == cost), None)
        enough = enough or attempts.combination([change for change in singles if _speed_cost(change) <= cost])
        if enough is not None:
            return enough
    pools = planned.job.pools
    more = [{f"{pool.section}.nnodes": factor * pool.nodes} for pool in pools for factor in (2, 4, 8, 16)]
    return next(attempts.alone(more), None)


def _speed_cost(changes: Changes) -> int:
    return max(rank for path in changes for rank, words in enumerate(_BY_COST) if path.endswith(words))


class _Attempts:
    """Missing memory with changes, cached by change."""

    def __init__(self, planned: Estimate) -> None:
        self.config, self.hardware = planned.job.config, planned.hardware
        missing = sum(shortfall.missing for shortfall in planned.shortfalls)
        self._missing_bytes: dict[tuple[tuple[str, Any], ...], float | None] = {(): missing}

    def missing(self, changes: Changes) -> float | None:
        """Return the missing bytes over all phases; None if the values are inconsistent."""
        key = tuple(changes.items())
        if key not in self._missing_bytes:
            try:
                job = planned_job(changed(self.config, changes), device=self.hardware.device)
                self._missing_bytes[key] = sum(shortfall.missing for shortfall in lacking(job, self.hardware))
            except MegarlError:
                self._missing_bytes[key] = None
        return self._missing_bytes[key]

    def alone(self, singles: Iterable[Changes]) -> Iterator[Changes]:
        return (changes for changes in singles if self.missing(changes) == 0)

    def combination(self, singles: Sequence[Changes]) -> Changes | None:
        """Combine changes that help, in order, until nothing is missing; then drop unnecessary ones."""
        combined: dict[str, Any] = {}
        for changes in singles:
            before, after = self.missing(combined), self.missing({**combined, **changes})
            if before is not None and after is not None and after < before:
                combined |= changes
            if self.missing(combined) == 0:
                break
        if self.missing(combined) != 0:
            return None
        for path in reversed(list(combined)):
            fewer = {key: value for key, value in combined.items() if key != path}
            if self.missing(fewer) == 0:
                combined = fewer
        return combined


def single_changes(job: PlannedJob, phase: str) -> Iterator[Changes]:
    """Yield changes that may make a phase fit, from the cheapest to the most expensive."""
    if phase == "host":
        yield from _host_changes(job)
        return
    passes = {role.name: role.pass_of(phase) for role in job.roles}
    working = [role for role in job.roles if passes[role.name] is not None]
    updating = [role for role in working if any(planned.updates and planned.phase == phase for planned in role.passes)]
    for role in (role for role in job.roles if role not in updating):
        is_idle = role not in working and job.pool_of(role.section) == job.pools[0]
        names = ["optimizer_offload", "grad_offload"] if role.trains else []
        names += ["param_offload"] if is_idle else []
        yield from ({f"{role.path}.{name}": True} for name in names if not getattr(role.megatron, name))
    if job.rollout is not None and phase != "gen" and not job.rollout.config.free_cache_engine:
        yield {f"{ROLLOUT}.free_cache_engine": True}
    for role in updating:
        yield from _update_changes(role)
    for role in working:
        yield from _smaller_budgets(job, role.path, phase)
    if job.rollout is not None and phase in ("gen", "update_weights"):
        yield from _rollout_changes(job)
    for role in working or [role for role in job.roles if role.name == "actor"]:
        yield from _larger_layouts(role.megatron, role.path, job)


def _update_changes(role: PlannedRole) -> Iterator[Changes]:
    """Yield changes that reduce the memory of an update."""
    if not role.megatron.use_distributed_optimizer:
        yield {f"{role.path}.use_distributed_optimizer": True}
    if role.megatron.recompute_granularity is None:
        yield {f"{role.path}.recompute_granularity": "selective"}
    if role.megatron.recompute_granularity != "full":
        yield {f"{role.path}.recompute_granularity": "full"}


def _host_changes(job: PlannedJob) -> Iterator[Changes]:
    """Yield changes that reduce host memory: less offloading, or states spread over more nodes."""
    for role in job.roles:
        megatron: MegatronConfig = value_at(job.config, role.path)
        for name in ("param_offload", "optimizer_offload"):
            if getattr(megatron, name):
                yield {f"{role.path}.{name}": False}
    for role in job.roles:
        yield from _larger_layouts(value_at(job.config, role.path), role.path, job)


def _smaller_budgets(job: PlannedJob, role_path: str, phase: str) -> Iterator[Changes]:
    """Yield smaller micro-batches: half the tokens, repeatedly, down to the longest sequence; or half the samples."""
    section, config = role_path.removesuffix(".megatron"), job.config
    prefix = f"{section}."
    if isinstance(config, SupervisedConfig):
        prefix = "data."
    elif phase == "old_log_prob":
        prefix = f"{ROLLOUT}.log_prob_"
    elif phase == "ref":
        prefix = "actor_rollout_ref.ref."
    elif phase == "reward":
        return
    tokens, samples = f"{prefix}max_token_len_per_gpu", f"{prefix}micro_batch_size_per_gpu"
    count = value_at(config, samples)
    if count is not None:
        while count > 1:
            count = -(-count // 2)
            yield {samples: count}
        return
    budget = value_at(config, tokens)
    while budget > job.longest:
        budget = max(job.longest, budget // 2)
        yield {tokens: budget}


def _rollout_changes(job: PlannedJob) -> Iterator[Changes]:
    assert job.rollout is not None
    config = job.rollout.config
    if config.name == "embedded":
        slots = config.max_num_seqs
        while slots > 1:
            slots //= 2
            yield {f"{ROLLOUT}.max_num_seqs": slots}
        return
    fraction = config.engine_kwargs.sglang.server_args.get("mem_fraction_static")
    if fraction is not None:
        yield from ({_FRACTION: share} for share in (0.6, 0.7, 0.8, 0.85, 0.9) if share != fraction)
    for factor in (2, 4, 8):
        yield {f"{ROLLOUT}.tensor_model_parallel_size": factor * job.rollout.tp}


def _larger_layouts(megatron: MegatronConfig, path: str, job: PlannedJob) -> Iterator[Changes]:
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    for factor in (2, 4, 8):
        if factor * tp <= job.devices_per_node:
            yield {f"{path}.tensor_model_parallel_size": factor * tp}
    for factor in (2, 4, 8):
        yield {f"{path}.pipeline_model_parallel_size": factor * pp}
    if not megatron.expert_model_parallel_size > 1:
        return
    yield {f"{path}.expert_model_parallel_size": 2 * megatron.expert_model_parallel_size}
