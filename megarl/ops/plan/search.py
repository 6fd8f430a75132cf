"""Layout search: all layouts that model and cluster allow, pruned by memory and ranked by the cost of a step.

The cost of a role's passes does not depend on the layouts of other roles, and neither does that of generation. So every
layout of each role is evaluated once. Combinations are then planned in full, in the order of their summed costs, until
enough of them fit, including the KV cache. The checks and the plan are those of a user's configuration.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from megarl.base.errors import MegarlError
from megarl.config import SupervisedConfig, TrainConfig
from megarl.config.derived import ACTOR_MEGATRON, followers
from megarl.config.keys import value_at
from megarl.config.schema.jobs import ROLLOUT, own_pools
from megarl.models import ModelConfig
from megarl.ops.plan.estimate import Estimate, changed, estimate, overrides_of, usable_bytes
from megarl.ops.plan.flops import Lengths, optimized_elements, rank_elements
from megarl.ops.plan.generation import generation_cost
from megarl.ops.plan.hardware import Hardware
from megarl.ops.plan.job import PlannedJob, PlannedRole, planned_job
from megarl.ops.plan.pass_activations import pass_activations
from megarl.ops.plan.states import FLOAT32, MOMENTS
from megarl.ops.plan.step_costs import pass_costs, sync_cost

Config = TrainConfig | SupervisedConfig
Changes = Mapping[str, Any]

MAX_CHUNKS = 4
MIN_CONTEXT = 1024  # minimum tokens of the longest sequence per context-parallel rank
PLANNED_PER_RESULT = 2  # number of combinations planned in full, as a multiple of the requested number
MAX_PLANNED = 400
TP, PP, CP = (f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context"))
EP, _RECOMPUTE = "expert_model_parallel_size", "recompute_granularity"
STAGES = {
    "virtual_pipeline_model_parallel_size": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
"""Keys that divide the layers into stages, with the values of an even split."""
_WITHOUT_OTHER_SPLITS = {
    CP: 1,
    EP: 1,
    "expert_tensor_parallel_size": None,
    "data_parallel_size": None,
    **STAGES,
}


class LayoutChoice(NamedTuple):
    """A layout of one role or of the rollout."""

    changes: Mapping[str, Any]  # values by key
    cost: float  # cost of its phases


class Candidate(NamedTuple):
    """A layout of the whole job that fits."""

    changes: Mapping[str, Any]  # values by key that differ from the configuration
    estimate: Estimate  # the plan with these values

    def overrides(self) -> list[str]:
        """Return the changes as command-line overrides."""
        return overrides_of(self.changes)


class SearchResult(NamedTuple):
    """Result of a layout search."""

    best: list[Candidate]  # layouts that fit, the cheapest first
    evaluated: int  # number of layouts of single roles whose cost was computed
    planned: int  # number of combinations planned in full


def search(config: Config, hardware: Hardware, lengths: Lengths, top: int = 10) -> SearchResult:
    """Return the layouts that fit with the lowest cost of a step.

    Args:
        config: complete; the layouts of actor, critic or supervised model, and of the rollout, are replaced, so they
            may be invalid.

    Raises:
        ConfigError, ModelError: the configuration is invalid with every layout; the error is that of its own layout.
    """
    initial, start = config, initial_changes(config, hardware)
    config = changed(initial, start)
    job = planned_job(config, device=hardware.device)
    choices = [role_layouts(config, role, hardware, lengths) for role in job.roles if role.trains]
    if isinstance(config, TrainConfig) and job.rollout is not None and not job.rollout.is_external:
        choices.append(rollout_layouts(config, hardware, lengths))
    planned: dict[tuple[Any, ...], Candidate] = {}
    planned_count = 0
    for changes in _best_first(choices):
        if len(planned) >= PLANNED_PER_RESULT * top or planned_count >= MAX_PLANNED:
            break
        sizes = tuple(item for item in changes.items() if not item[0].endswith(_RECOMPUTE))
        if sizes in planned:
            continue  # a variant with less recomputation is cheaper and fits
        planned_count += 1
        candidate = _fitting(config, changes, hardware, lengths)
        if candidate is not None:
            planned[sizes] = candidate
    best = sorted(planned.values(), key=lambda candidate: candidate.estimate.step.total)[:top]
    best = [candidate._replace(changes=_differing(initial, {**start, **candidate.changes})) for candidate in best]
    return SearchResult(best, sum(map(len, choices)), planned_count)


def initial_changes(
    config: Config, hardware: Hardware, fixed: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return changes that make an invalid layout valid, the same sizes for each trained role; empty if it is valid.

    Each role is evaluated with the initial layouts of the others, which therefore have to be valid.

    Args:
        fixed: values that stay, by key.

    Raises:
        ConfigError, ModelError: no such sizes exist; the error is that of the unchanged configuration.
    """
    own_error: MegarlError | None = None
    for sizes in ({}, *_uniform_layouts(config)):
        changes = {**sizes, **fixed}
        try:
            planned_job(changed(config, changes), device=hardware.device)
            return changes
        except MegarlError as error:
            own_error = own_error or error
    assert own_error is not None
    raise own_error


def _uniform_layouts(config: Config) -> Iterator[dict[str, Any]]:
    """Yield sizes for all trained roles alike, and for the rollout, that divide the devices; the smallest first."""
    trainer, rollout = config.trainer, isinstance(config, TrainConfig)
    sections = ["actor_rollout_ref.actor.megatron", "critic.megatron"] if rollout else ["megatron"]
    devices = trainer.num_devices
    for replica in _powers(trainer.n_gpus_per_node if rollout else 1):
        engine = {f"{ROLLOUT}.tensor_model_parallel_size": replica, f"{ROLLOUT}.replicas": None} if rollout else {}
        for pp in (pp for pp in range(1, devices + 1) if devices % pp == 0):
            for tp in (tp for tp in _powers(trainer.n_gpus_per_node) if devices // pp % tp == 0):
                sizes = {TP: tp, PP: pp, **_WITHOUT_OTHER_SPLITS}
                yield engine | {f"{section}.{key}": value for section in sections for key, value in sizes.items()}


def role_layouts(config: Config, role: PlannedRole, hardware: Hardware, lengths: Lengths) -> list[LayoutChoice]:
    """Return every layout of a role that passes the checks and whose states fit, the cheapest first."""
    choices = []
    devices, per_node = devices_of(config, role)
    configured = value_at(config, role.path).recompute_granularity
    modes: list[Changes] = [{}] if configured == "full" else [{}, {f"{role.path}.{_RECOMPUTE}": "full"}]
    for changes in layouts(role, devices, per_node, longest_sequence(config)):
        for recompute in modes:
            combined = {**changes, **recompute}
            try:
                job = planned_job(changed(config, combined), device=hardware.device)
            except MegarlError:
                continue
            new = job.role(role.name)
            if least_bytes(job, new) <= usable_bytes(job, hardware):
                cost = sum(phase.cost.total for phase in pass_costs(job, new, hardware, lengths))
                choices.append(LayoutChoice(combined, cost))
    return sorted(choices, key=lambda choice: choice.cost)


def devices_of(config: Config, role: PlannedRole) -> tuple[int, int]:
    """Return the number of devices of a role's pool, in total and per node."""
    own = own_pools(config).get(role.section)
    per_node = (own.n_gpus_per_node if own else None) or config.trainer.n_gpus_per_node
    return own.own_devices if own else config.trainer.num_devices, per_node


def layouts(
    role: PlannedRole,
    devices: int,
    per_node: int,
    longest: int,
    fixed: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[dict[str, Any]]:
    """Yield parallel sizes of a role that divide model and devices; tensor parallelism stays inside a node.

    Args:
        devices: devices of its pool.
        per_node: devices of its pool per node.
        longest: tokens of the longest sequence.
        fixed: sizes that stay, by key of the role's layout.
    """
    model = role.model
    for tp in _sizes(fixed, TP, _powers(min(per_node, devices))):
        if model.num_key_value_heads % tp:
            continue  # rejected by the checks, independent of the other sizes
        for pp in _sizes(fixed, PP, range(1, min(devices // tp, model.num_layers) + 1)):
            if devices % (tp * pp):
                continue
            for cp in _sizes(fixed, CP, _powers(min(devices // (tp * pp), max(1, longest // MIN_CONTEXT)))):
                if devices % (tp * pp * cp):
                    continue
                sizes = {TP: tp, PP: pp, CP: cp}
                for stages in [{}] if fixed.keys() & STAGES.keys() else _stages(model.num_layers, pp):
                    for experts in _experts(model, devices // pp, fixed):
                        all_sizes = {**sizes, **stages, **experts, **fixed}
                        yield {f"{role.path}.{key}": value for key, value in all_sizes.items()}


def _sizes(fixed: Mapping[str, Any], key: str, sizes: Iterable[int]) -> Iterable[int]:
    return [fixed[key]] if key in fixed else sizes


def rollout_layouts(config: TrainConfig, hardware: Hardware, lengths: Lengths) -> list[LayoutChoice]:
    """Return every size of a replica that passes the checks, the cheapest first."""
    choices = []
    for tp in _powers(config.trainer.n_gpus_per_node):
        changes = {f"{ROLLOUT}.tensor_model_parallel_size": tp}
        try:
            job = planned_job(changed(config, changes), device=hardware.device)
        except MegarlError:
            continue
        phases = (generation_cost(job, hardware, lengths), sync_cost(job, hardware))
        choices.append(LayoutChoice(changes, sum(phase.cost.total for phase in phases if phase is not None)))
    return sorted(choices, key=lambda choice: choice.cost)


def least_bytes(job: PlannedJob, role: PlannedRole) -> float:
    """Return the minimum bytes of a rank in the role's update, without other roles.

    An offloaded optimizer may return to the device after the activations are freed. Gradients and optimizer of adapters
    are small, and not counted.
    """
    largest = 0.0
    for stage in {0, role.layout.pp - 1}:
        elements = rank_elements(role, stage)
        main = 0 if role.megatron.dtype == "float32" else FLOAT32
        optimizer = optimized_elements(role, elements) * (main + MOMENTS * FLOAT32)
        updates = [pass_activations(job, role, planned, stage) for planned in role.passes if planned.updates]
        saved = max((activations.layers + activations.ends for activations in updates), default=0)
        peak = max(optimizer, saved) if role.megatron.optimizer_offload else optimizer + saved
        if role.lora is None:
            largest = max(largest, elements.total * (role.dtype_bytes + FLOAT32) + peak)
        else:
            largest = max(largest, elements.total * role.dtype_bytes + saved)
    return largest


def _stages(layers: int, pp: int) -> Iterator[dict[str, Any]]:
    """Yield the divisions of the layers into stages; the last stage is shorter if they do not divide evenly."""
    vpp, last = "virtual_pipeline_model_parallel_size", "num_layers_in_last_pipeline_stage"
    first = {"num_layers_in_first_pipeline_stage": None}
    if layers % pp:
        remaining = layers - -(-layers // pp) * (pp - 1)
        if remaining > 0:
            yield {**first, vpp: None, last: remaining}
        return
    yield {**first, vpp: None, last: None}
    if pp > 1:
        yield from (
            {**first, vpp: chunks, last: None} for chunks in range(2, MAX_CHUNKS + 1) if layers % (pp * chunks) == 0
        )


def _experts(model: ModelConfig, ranks: int, fixed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the expert-parallel sizes; each expert stays whole on its rank."""
    if model.experts is None:
        yield {}
        return
    for ep in _sizes(fixed, EP, _powers(min(model.experts.count, ranks))):
        if model.experts.count % ep == 0 and ranks % ep == 0:
            yield {EP: ep, "expert_tensor_parallel_size": 1}


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2


def longest_sequence(config: Config) -> int:
    """Return the maximum tokens of a sequence."""
    if isinstance(config, SupervisedConfig):
        return config.data.max_length
    return config.data.max_prompt_length + config.data.max_response_length


def _best_first(choices: Sequence[Sequence[LayoutChoice]]) -> Iterator[dict[str, Any]]:
    """Yield combinations of one choice per list, in the order of their summed costs; each list is sorted."""
    if not all(choices):
        return

    def cost(at: tuple[int, ...]) -> float:
        return sum(options[i].cost for options, i in zip(choices, at, strict=True))

    start = (0,) * len(choices)
    heap, seen = [(cost(start), start)], {start}
    while heap:
        _, at = heapq.heappop(heap)
        merged: dict[str, Any] = {}
        for options, i in zip(choices, at, strict=True):
            merged |= options[i].changes
        yield merged
        for k, options in enumerate(choices):
            following = (*at[:k], at[k] + 1, *at[k + 1 :])
            if at[k] + 1 < len(options) and following not in seen:
                seen.add(following)
                heapq.heappush(heap, (cost(following), following))


def _fitting(config: Config, changes: Mapping[str, Any], hardware: Hardware, lengths: Lengths) -> Candidate | None:
    try:
        planned = estimate(changed(config, changes), hardware, lengths)
    except MegarlError:
        return None
    return Candidate(changes, planned) if planned.fits else None


def _differing(config: Config, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values to set: those that differ from the configuration, where roles inherit the actor's layout."""
    actors = {path: value for path, value in changes.items() if path.startswith(ACTOR_MEGATRON)}
    inherited = followers(config, actors)
    return {path: value for path, value in changes.items() if inherited.get(path, value_at(config, path)) != value}
