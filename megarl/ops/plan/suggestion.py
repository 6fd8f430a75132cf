"""Suggestion for a run that does not fit: the smallest configuration change that makes it fit, confirmed by planning.

Changes are tried from the cheapest to the most expensive: offloading of idle states, sharded states, recomputation,
smaller micro-batches, a larger KV cache, more devices per replica, more tensor and pipeline parallelism. At each cost,
if no single change is enough, changes that help and cost no more are combined; more nodes come last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from megarl.base.errors import MegarlError
from megarl.config import MegatronConfig, SupervisedConfig, TrainConfig
from megarl.config.keys import value_at
from megarl.config.schema.jobs import ROLLOUT
from megarl.ops.plan.estimate import Estimate, changed, estimate, shortfalls, usable_bytes
from megarl.ops.plan.hardware import hardware_of
from megarl.ops.plan.job import PlannedJob, PlannedRole
from megarl.ops.plan.job_from_config import planned_job
from megarl.ops.plan.lengths import lengths_of
from megarl.ops.plan.memory import plan_memory

Config = TrainConfig | SupervisedConfig
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


def plan_run(config: Config) -> tuple[Estimate, Changes | None]:
    """Plan a run with the longest sequences, without sync; also returns the smallest change that makes it fit.

    Raises:
        InvalidConfigError, ConfigError, ModelError: the configuration cannot run, independent of memory.
    """
    hardware, lengths = hardware_of(config), lengths_of(config)

    def plan(candidate: Config) -> Estimate:
        return estimate(candidate, hardware, lengths)

    planned = plan(config)
    if planned.fits:
        return planned, None
    return planned, find_suggestion(config, planned, lambda changes: plan(changed(config, changes)))


def find_suggestion(config: Config, planned: Estimate, confirm: Callable[[Changes], Estimate]) -> Changes | None:
    """Return the smallest change that makes a run fit, or None if no known change does.

    Args:
        planned: its plan, which does not fit.
        confirm: plans the configuration with changes, which are returned only if that plan fits.
    """
    attempts = _Attempts(config, planned)
    phases = [shortfall.phase for shortfall in planned.shortfalls]
    found = (change for phase in phases for change in single_changes(planned.job, phase))
    singles = sorted({tuple(change.items()): change for change in found}.values(), key=_speed_cost)
    for cost in sorted({_speed_cost(change) for change in singles}):
        for changes in attempts.alone(change for change in singles if _speed_cost(change) == cost):
            if _confirmed(changes, confirm):
                return changes
        combined = attempts.combination([change for change in singles if _speed_cost(change) <= cost])
        if combined is not None and _confirmed(combined, confirm):
            return combined
    pools = planned.job.pools
    more = [{f"{pool.section}.nnodes": factor * pool.nodes} for pool in pools for factor in (2, 4, 8, 16)]
    return next((changes for changes in attempts.alone(more) if _confirmed(changes, confirm)), None)


def _confirmed(changes: Changes, confirm: Callable[[Changes], Estimate]) -> bool:
    try:
        return confirm(changes).fits
    except MegarlError:
        return False


def _speed_cost(changes: Changes) -> int:
    """Return the rank of a change by its cost in speed."""
    return max(rank for path in changes for rank, words in enumerate(_BY_COST) if path.endswith(words))


class _Attempts:
    """Missing memory with changes, cached by change."""

    def __init__(self, config: Config, planned: Estimate) -> None:
        self.config, self.hardware = config, planned.hardware
        missing = sum(shortfall.missing for shortfall in planned.shortfalls)
        self._missing_bytes: dict[tuple[tuple[str, Any], ...], float | None] = {(): missing}

    def missing(self, changes: Changes) -> float | None:
        """Return the missing bytes over all phases; None if the values are inconsistent."""
        key = tuple(changes.items())
        if key not in self._missing_bytes:
            try:
                job = planned_job(changed(self.config, changes), device=self.hardware.device)
                memory = plan_memory(job, int(usable_bytes(job, self.hardware)), self.hardware.devices_per_node)
                lacking = shortfalls(job, memory, self.hardware)
                self._missing_bytes[key] = sum(shortfall.missing for shortfall in lacking)
            except MegarlError:
                self._missing_bytes[key] = None
        return self._missing_bytes[key]

    def alone(self, singles: Iterable[Changes]) -> Iterator[Changes]:
        """Yield the changes that are enough by themselves, in order."""
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
        shares = job.pool_of(role.section) == job.pools[0]
        yield from _offload_changes(role, is_idle=shares and role not in working)
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


def _offload_changes(role: PlannedRole, *, is_idle: bool) -> Iterator[Changes]:
    names = ["optimizer_offload", "grad_offload"] if role.trains else []
    names += ["param_offload"] if is_idle else []
    yield from ({f"{role.path}.{name}": True} for name in names if not getattr(role.megatron, name))


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
