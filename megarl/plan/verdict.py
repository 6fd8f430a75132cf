"""What a run that does not fit would need: the smallest change that makes it fit, found by planning with it.

Changes are tried from the cheapest to the dearest: states to host memory while their role rests, states sharded,
activations computed again, smaller micro-batches, more of the device for the cache, more devices per replica, more
tensor and pipeline parallelism. Where none alone is enough, those that help are put together; more nodes come last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megarl.config import MegatronConfig, SupervisedConfig, TrainConfig
from megarl.config.problems import show, value_at
from megarl.errors import MegarlError
from megarl.plan.estimate import Estimate, changed, estimate, shortfalls, usable_bytes
from megarl.plan.hardware import hardware_of
from megarl.plan.job import PlannedJob, PlannedRole, planned_job
from megarl.plan.lengths import lengths_of
from megarl.plan.memory import plan_memory

Config = TrainConfig | SupervisedConfig
Changes = Mapping[str, Any]
_ROLLOUT = "actor_rollout_ref.rollout"
_BY_DEARNESS: tuple[tuple[str, ...], ...] = (
    ("",),
    ("_offload", "free_cache_engine", "use_distributed_optimizer"),
    ("recompute_granularity",),
    ("per_gpu",),
    ("mem_fraction_static", "max_num_seqs"),
    ("rollout.tensor_model_parallel_size",),
    ("megatron.expert_model_parallel_size", "megatron.tensor_model_parallel_size"),
    ("megatron.pipeline_model_parallel_size",),
)
"""How keys end, from what costs least speed to what costs most."""
_FRACTION = f"{_ROLLOUT}.engine_kwargs.sglang.server_args.mem_fraction_static"


class Remedy(NamedTuple):
    """Changes with which a run fits.

    Attributes:
        changes: values by key.
    """

    changes: Changes

    def overrides(self) -> list[str]:
        """As one writes them on the command line."""
        return [f"{_prefix(path)}{path}={show(value)}" for path, value in self.changes.items()]


def _prefix(path: str) -> str:
    return "+" if ".server_args." in path else ""


def plan_run(config: Config) -> tuple[Estimate, Remedy | None]:
    """Plans a run at its longest, on the hardware that its configuration names, but for the weight sync.

    Returns:
        The plan, and if it does not fit the smallest change that would make it fit, where one is known.

    Raises:
        InvalidConfigError, ConfigError, ModelError: the configuration cannot run, whatever the memory.
    """
    hardware, lengths = hardware_of(config), lengths_of(config)

    def plan(one: Config) -> Estimate:
        return estimate(one, hardware, lengths, with_sync=False)

    found = plan(config)
    if found.fits:
        return found, None
    return found, find_remedy(config, found, lambda remedy: plan(changed(config, remedy.changes)))


def find_remedy(config: Config, found: Estimate, confirm: Callable[[Remedy], Estimate]) -> Remedy | None:
    """The smallest change with which what does not fit does; None where nothing is known that would help.

    Args:
        config: what was planned.
        found: its plan, which does not fit.
        confirm: plans the configuration anew with a remedy's overrides; a remedy is one only if that fits.
    """
    attempts = _Attempts(config, found)
    phases = [one.phase for one in found.shortfalls]
    singles = _distinct(change for phase in phases for change in single_changes(found.job, phase))
    singles.sort(key=_dearness)
    for remedy in attempts.alone(singles):
        if _confirmed(remedy, confirm):
            return remedy
    together = attempts.together(singles)
    if together is not None and _confirmed(together, confirm):
        return together
    nodes = found.job.nodes
    for remedy in attempts.alone([{"trainer.nnodes": factor * nodes} for factor in (2, 4, 8, 16)]):
        if _confirmed(remedy, confirm):
            return remedy
    return None


def _confirmed(remedy: Remedy, confirm: Callable[[Remedy], Estimate]) -> bool:
    try:
        return confirm(remedy).fits
    except MegarlError:
        return False


def _distinct(changes: Iterable[Changes]) -> list[Changes]:
    return list({tuple(one.items()): one for one in changes}.values())


def _dearness(changes: Changes) -> int:
    """How much a change costs in speed, as a rank."""
    return max(rank for path in changes for rank, words in enumerate(_BY_DEARNESS) if path.endswith(words))


class _Attempts:
    """What is missing with changes, by memory alone."""

    def __init__(self, config: Config, found: Estimate) -> None:
        self.config, self.hardware = config, found.hardware
        self._known: dict[tuple[tuple[str, Any], ...], float | None] = {(): sum(s.missing for s in found.shortfalls)}

    def missing(self, changes: Changes) -> float | None:
        """Bytes that are missing in all phases together; None where the values do not go together."""
        key = tuple(changes.items())
        if key not in self._known:
            try:
                job = planned_job(changed(self.config, changes), device=self.hardware.device)
                memory = plan_memory(job, int(usable_bytes(job, self.hardware)))
                self._known[key] = sum(one.missing for one in shortfalls(job, memory, self.hardware))
            except MegarlError:
                self._known[key] = None
        return self._known[key]

    def alone(self, singles: Iterable[Changes]) -> Iterator[Remedy]:
        """Those that are enough by themselves, in their order."""
        return (Remedy(changes) for changes in singles if self.missing(changes) == 0)

    def together(self, singles: Sequence[Changes]) -> Remedy | None:
        """Adds changes that help, in their order, until nothing is missing; then leaves out those not needed."""
        combined: dict[str, Any] = {}
        for changes in singles:
            if self._helps(combined, changes):
                combined |= changes
            if self.missing(combined) == 0:
                break
        if self.missing(combined) != 0:
            return None
        for path in reversed(list(combined)):
            fewer = {other: value for other, value in combined.items() if other != path}
            if self.missing(fewer) == 0:
                combined = fewer
        return Remedy(combined)

    def _helps(self, combined: Changes, changes: Changes) -> bool:
        before, after = self.missing(combined), self.missing({**combined, **changes})
        return before is not None and after is not None and after < before


def single_changes(job: PlannedJob, phase: str) -> Iterator[Changes]:
    """Changes that may make a phase fit, from the cheapest to the dearest."""
    if phase == "host":
        yield from _of_host(job)
        return
    passes = {role.name: role.pass_of(phase) for role in job.roles}
    working = [role for role in job.roles if passes[role.name] is not None]
    updating = [role for role in working if any(one.updates and one.phase == phase for one in role.passes)]
    for role in (role for role in job.roles if role not in updating):
        yield from _offloading(role, rests=role not in working)
    if job.rollout is not None and phase != "gen" and not job.rollout.config.free_cache_engine:
        yield {f"{_ROLLOUT}.free_cache_engine": True}
    for role in updating:
        yield from _sparing(role)
    for role in working:
        yield from _smaller_budgets(job, role.path, phase)
    if job.rollout is not None and phase in ("gen", "update_weights"):
        yield from _of_rollout(job)
    for role in working or [role for role in job.roles if role.name == "actor"]:
        yield from _larger_layouts(role.megatron, role.path, job)


def _sparing(role: PlannedRole) -> Iterator[Changes]:
    """What an update can do without on the device."""
    if not role.megatron.use_distributed_optimizer:
        yield {f"{role.path}.use_distributed_optimizer": True}
    if role.megatron.recompute_granularity is None:
        yield {f"{role.path}.recompute_granularity": "selective"}
    if role.megatron.recompute_granularity != "full":
        yield {f"{role.path}.recompute_granularity": "full"}


def _offloading(role: PlannedRole, *, rests: bool) -> Iterator[Changes]:
    names = ["optimizer_offload", "grad_offload"] if role.trains else []
    names += ["param_offload"] if rests else []
    yield from ({f"{role.path}.{name}": True} for name in names if not getattr(role.megatron, name))


def _of_host(job: PlannedJob) -> Iterator[Changes]:
    """A node's memory has less to hold where less is offloaded, or where the same is spread over more nodes."""
    for role in job.roles:
        megatron: MegatronConfig = value_at(job.config, role.path)
        for name in ("param_offload", "optimizer_offload"):
            if getattr(megatron, name):
                yield {f"{role.path}.{name}": False}
    for role in job.roles:
        yield from _larger_layouts(value_at(job.config, role.path), role.path, job)


def _smaller_budgets(job: PlannedJob, role_path: str, phase: str) -> Iterator[Changes]:
    """Half of the tokens, and half of that, down to the longest sequence; or half of the samples."""
    section, config = role_path.removesuffix(".megatron"), job.config
    prefix, path = "ppo_", section
    if isinstance(config, SupervisedConfig):
        prefix, path = "", "data"
    elif phase == "old_log_prob":
        prefix, path = "log_prob_", _ROLLOUT
    elif phase == "ref":
        prefix, path = "log_prob_", "actor_rollout_ref.ref"
    elif phase == "reward":
        return
    tokens, samples = f"{path}.{prefix}max_token_len_per_gpu", f"{path}.{prefix}micro_batch_size_per_gpu"
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


def _of_rollout(job: PlannedJob) -> Iterator[Changes]:
    assert job.rollout is not None
    config = job.rollout.config
    if config.name == "embedded":
        slots = config.max_num_seqs
        while slots > 1:
            slots //= 2
            yield {f"{_ROLLOUT}.max_num_seqs": slots}
        return
    given = config.engine_kwargs.sglang.server_args.get("mem_fraction_static")
    if given is not None:
        yield from ({_FRACTION: share} for share in (0.6, 0.7, 0.8, 0.85, 0.9) if share != given)
    for factor in (2, 4, 8):
        yield {f"{_ROLLOUT}.tensor_model_parallel_size": factor * job.rollout.tp}


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
