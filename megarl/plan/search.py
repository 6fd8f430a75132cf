"""Which layouts are best: all that the model and the cluster allow, pruned by memory, ranked by predicted speed.

The passes of a role take the same time whatever the others' layouts are, and so does generation. So every layout of
each role is timed once, and their combinations are looked at in the order of their sum, best first, until enough of
them fit when planned as a whole, weight sync and room for the cache included. What fits and what does not is decided by
the same checks and the same plan as for a configuration of one's own.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megarl.config import MegatronConfig, SupervisedConfig, TrainConfig
from megarl.config.problems import show, value_at
from megarl.errors import MegarlError
from megarl.models import ModelConfig
from megarl.plan.estimate import Estimate, changed, estimate, shortfalls, usable_bytes
from megarl.plan.flops import optimized_elements, rank_elements
from megarl.plan.hardware import Hardware
from megarl.plan.job import PlannedJob, PlannedRole, planned_job
from megarl.plan.lengths import Lengths
from megarl.plan.memory import plan_memory
from megarl.plan.pass_times import PassModel
from megarl.plan.passes import pass_activations
from megarl.plan.states import FLOAT32, MOMENTS
from megarl.plan.sync import rough_sync_s
from megarl.plan.times import generation_s, micro_batches_of

Config = TrainConfig | SupervisedConfig

MOST_CHUNKS = 4
LEAST_CONTEXT = 1024
"""Tokens that a context-parallel rank has at least of the longest sequence."""
EXACT = 2
"""So many times as many combinations as are asked for are planned as a whole."""
MOST_LOOKED_AT = 400
_TP, _PP, _CP = (f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context"))
_RECOMPUTE = "recompute_granularity"
ROLLOUT = "actor_rollout_ref.rollout"


class Choice(NamedTuple):
    """A layout of one part of the job.

    Attributes:
        changes: values by key.
        seconds: that its phases take.
    """

    changes: Mapping[str, Any]
    seconds: float


class Candidate(NamedTuple):
    """A whole layout that fits.

    Attributes:
        changes: values by key, as far as they differ from the configuration's.
        estimate: the plan with them.
    """

    changes: Mapping[str, Any]
    estimate: Estimate

    def overrides(self) -> list[str]:
        """As one writes them on the command line."""
        return [f"{path}={show(value)}" for path, value in self.changes.items()]


class Found(NamedTuple):
    """What a search found.

    Attributes:
        best: the layouts that fit, the fastest first.
        timed: layouts of single roles that were timed.
        planned: combinations that were planned as a whole.
    """

    best: list[Candidate]
    timed: int
    planned: int


def search(config: Config, hardware: Hardware, lengths: Lengths, top: int = 10) -> Found:
    """The fastest layouts that fit.

    Args:
        config: complete; layouts of actor, critic or supervised model, and of the rollout, are replaced, the rest kept.
        hardware: what it runs on.
        lengths: of prompts and answers.
        top: how many to find.
    """
    job = planned_job(config, device=hardware.device)
    choices = [role_choices(config, role, hardware, lengths) for role in job.roles if role.trains]
    if isinstance(config, TrainConfig) and job.rollout is not None and not job.rollout.is_elsewhere:
        choices.append(rollout_choices(config, hardware, lengths))
    planned: dict[tuple[Any, ...], Candidate] = {}
    looked_at = 0
    for changes in _best_first(choices):
        if len(planned) >= EXACT * top or looked_at >= MOST_LOOKED_AT:
            break
        sizes = tuple(item for item in changes.items() if not item[0].endswith(_RECOMPUTE))
        if sizes in planned:
            continue  # computing less again is faster, and it fits
        looked_at += 1
        candidate = _fitting(config, changes, hardware, lengths)
        if candidate is not None:
            planned[sizes] = candidate
    best = sorted(planned.values(), key=lambda one: one.estimate.step.seconds)[:top]
    best = [one._replace(changes=_differing(config, one.changes)) for one in best]
    return Found(best, sum(map(len, choices)), looked_at)


def role_choices(config: Config, role: PlannedRole, hardware: Hardware, lengths: Lengths) -> list[Choice]:
    """Every layout of a role that the checks allow and whose own states fit, the fastest first."""
    found = []
    for changes in layouts(role, config.trainer.num_devices, config.trainer.n_gpus_per_node, _longest(config)):
        for recompute in _recompute_modes(value_at(config, role.path)):
            both = {**changes, **{f"{role.path}.{key}": value for key, value in recompute.items()}}
            timed = _timed(config, both, role.name, hardware, lengths)
            if timed is not None:
                found.append(timed)
    return sorted(found, key=lambda choice: choice.seconds)


def layouts(role: PlannedRole, devices: int, per_node: int, longest: int) -> Iterator[dict[str, Any]]:
    """Parallel sizes of a role that divide the model and the devices; tensor parallelism stays inside a node."""
    model = role.model
    for tp in _powers(min(per_node, devices)):
        if model.num_key_value_heads % tp:
            continue  # refused by the checks, whatever the rest is
        for pp in range(1, min(devices // tp, model.num_layers) + 1):
            if devices % (tp * pp):
                continue
            for cp in _powers(min(devices // (tp * pp), max(1, longest // LEAST_CONTEXT))):
                if devices % (tp * pp * cp):
                    continue
                sizes = {_TP: tp, _PP: pp, _CP: cp}
                for stages in _stages(model.num_layers, pp):
                    for experts in _experts(model, devices // pp):
                        all_sizes = {**sizes, **stages, **experts}
                        yield {f"{role.path}.{key}": value for key, value in all_sizes.items()}


def rollout_choices(config: TrainConfig, hardware: Hardware, lengths: Lengths) -> list[Choice]:
    """Every size of a replica that the checks allow, the fastest first."""
    found = []
    for tp in _powers(config.trainer.n_gpus_per_node):
        changes = {f"{ROLLOUT}.tensor_model_parallel_size": tp}
        try:
            job = planned_job(changed(config, changes), device=hardware.device)
        except MegarlError:
            continue
        found.append(Choice(changes, generation_s(job, hardware, lengths) + rough_sync_s(job, hardware)))
    return sorted(found, key=lambda choice: choice.seconds)


def _timed(
    config: Config, changes: Mapping[str, Any], name: str, hardware: Hardware, lengths: Lengths
) -> Choice | None:
    """Seconds of the role's passes; None where the layout is refused or too large by itself."""
    try:
        job = planned_job(changed(config, changes), device=hardware.device)
    except MegarlError:
        return None
    role = job.role(name)
    if least_bytes(job, role) > usable_bytes(job, hardware):
        return None
    model = PassModel(role, hardware, lengths, job.devices_per_node)
    seconds = sum(model.time(one, micro_batches_of(job, role, one)).cost.seconds for one in role.passes)
    return Choice(changes, seconds)


def least_bytes(job: PlannedJob, role: PlannedRole) -> float:
    """Bytes that a rank of a role needs at least in its update, nothing of the other roles counted."""
    most = 0.0
    for stage in {0, role.layout.pp - 1}:
        elements = rank_elements(role, stage)
        main = 0 if role.megatron.dtype == "float32" else FLOAT32
        own = optimized_elements(role, elements) * (main + MOMENTS * FLOAT32)
        states = elements.total * (role.dtype_bytes + FLOAT32) + own
        kept = [pass_activations(job, role, one, stage) for one in role.passes if one.updates]
        most = max(most, states + max((one.layers + one.ends for one in kept), default=0))
    return most


def _recompute_modes(megatron: MegatronConfig) -> list[dict[str, Any]]:
    """As configured, and everything computed again."""
    if megatron.recompute_granularity == "full":
        return [{}]
    return [{}, {_RECOMPUTE: "full"}]


def _stages(layers: int, pp: int) -> Iterator[dict[str, Any]]:
    """How the layers are cut; where they do not divide, the last stage has fewer."""
    vpp, last = "virtual_pipeline_model_parallel_size", "num_layers_in_last_pipeline_stage"
    first = {"num_layers_in_first_pipeline_stage": None}
    if layers % pp:
        rest = layers - -(-layers // pp) * (pp - 1)
        if rest > 0:
            yield {**first, vpp: None, last: rest}
        return
    yield {**first, vpp: None, last: None}
    if pp > 1:
        yield from (
            {**first, vpp: chunks, last: None} for chunks in range(2, MOST_CHUNKS + 1) if layers % (pp * chunks) == 0
        )


def _experts(model: ModelConfig, ranks: int) -> Iterator[dict[str, Any]]:
    """How experts are divided over the ranks of a stage: each whole on its ranks."""
    if model.experts is None:
        yield {}
        return
    for ep in _powers(min(model.experts.count, ranks)):
        if model.experts.count % ep == 0 and ranks % ep == 0:
            yield {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": 1}


def _powers(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2


def _longest(config: Config) -> int:
    if isinstance(config, SupervisedConfig):
        return config.data.max_length
    return config.data.max_prompt_length + config.data.max_response_length


def _best_first(choices: Sequence[Sequence[Choice]]) -> Iterator[dict[str, Any]]:
    """Combinations of one choice of each, in the order of their seconds; each list is sorted by them."""
    if not all(choices):
        return

    def seconds(at: tuple[int, ...]) -> float:
        return sum(some[i].seconds for some, i in zip(choices, at, strict=True))

    start = (0,) * len(choices)
    heap, seen = [(seconds(start), start)], {start}
    while heap:
        _, at = heapq.heappop(heap)
        merged: dict[str, Any] = {}
        for some, i in zip(choices, at, strict=True):
            merged |= some[i].changes
        yield merged
        for k, some in enumerate(choices):
            following = (*at[:k], at[k] + 1, *at[k + 1 :])
            if at[k] + 1 < len(some) and following not in seen:
                seen.add(following)
                heapq.heappush(heap, (seconds(following), following))


def _fitting(config: Config, changes: Mapping[str, Any], hardware: Hardware, lengths: Lengths) -> Candidate | None:
    try:
        other = changed(config, changes)
        job = planned_job(other, device=hardware.device)
        if shortfalls(job, plan_memory(job, int(usable_bytes(job, hardware))), hardware):
            return None
        return Candidate(changes, estimate(other, hardware, lengths))
    except MegarlError:
        return None


def _differing(config: Config, changes: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be written to have them: values that are the configuration's own need not be."""
    return {path: value for path, value in changes.items() if value_at(config, path) != value}
