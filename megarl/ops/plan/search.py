"""Layout search: all layouts that model and cluster allow, pruned by memory and ranked by the cost of a step.

The cost of a role's passes does not depend on other roles' layouts, and neither does that of generation. So every
layout of each role is evaluated once. Combinations are then planned in full, in the order of their summed costs, until
enough of them fit, including the KV cache. The checks and the plan are those of a user's configuration.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from megarl.base.errors import ConfigError, MegarlError
from megarl.base.formatting import rough
from megarl.config import TrainConfig
from megarl.config.derived import ACTOR_MEGATRON, followers
from megarl.config.keys import value_at
from megarl.config.schema.algorithm import SYNC
from megarl.config.schema.jobs import ROLLOUT
from megarl.ops.plan.estimate import Estimate, changed, estimate, overrides_of, usable_bytes
from megarl.ops.plan.flops import Lengths
from megarl.ops.plan.generation import generation_cost
from megarl.ops.plan.hardware import Hardware
from megarl.ops.plan.job import PlannedJob, PlannedRole, planned_job
from megarl.ops.plan.layouts import (
    PP,
    TP,
    Changes,
    Config,
    devices_of,
    initial_changes,
    layouts,
    least_bytes,
    longest_sequence,
    powers,
)
from megarl.ops.plan.report import ReportSection, speeds
from megarl.ops.plan.step_costs import pass_costs, sync_cost

MAX_CHUNKS = 4
PLANNED_PER_RESULT = 2  # number of combinations planned in full, as a multiple of the requested number
MAX_PLANNED = 400
_RECOMPUTE, _CHUNKS = "recompute_granularity", "virtual_pipeline_model_parallel_size"


class LayoutChoice(NamedTuple):
    """A layout of one role or of the rollout."""

    changes: Changes  # values by key
    cost: float  # cost of its phases


class Candidate(NamedTuple):
    """A layout of the whole job that fits."""

    changes: Changes  # values by key that differ from the configuration
    estimate: Estimate  # the plan with these values


class SearchResult(NamedTuple):
    """Result of a layout search."""

    changes: Changes  # values by key that make the configuration valid: the first layout's, if one fits
    best: list[Candidate]  # layouts that fit, the cheapest first
    evaluated: int  # number of layouts of single roles whose cost was computed
    planned: int  # number of combinations planned in full
    hardware: Hardware


def search(config: Config, hardware: Hardware, lengths: Lengths, top: int) -> SearchResult:
    """Return the layouts that fit with the lowest cost of a step.

    Args:
        config: complete; the layouts of actor, critic or supervised model, and of the rollout, are replaced, so they
            may be invalid.

    Raises:
        ConfigError, ModelError: the configuration is asynchronous, or invalid with every layout; then the error is that
            of its own layout.
    """
    if isinstance(config, TrainConfig) and (mode := config.async_training.mode) != SYNC:
        raise ConfigError(
            f"async_training.mode={mode}: --search covers shared devices only; leave --search out, or set sync",
            code="plan.search-async",
        )
    initial, start = config, initial_changes(config, hardware)
    config = changed(initial, start)
    job = planned_job(config, device=hardware.device)
    choices = [role_layouts(config, role, hardware, lengths) for role in job.roles if role.trains]
    if job.rollout is not None and not job.rollout.is_external:
        choices.append(_rollout_layouts(config, hardware, lengths))
    fitting: dict[tuple[Any, ...], Candidate] = {}
    planned = 0
    for changes in best_first(choices):
        if len(fitting) >= PLANNED_PER_RESULT * top or planned >= MAX_PLANNED:
            break
        sizes = tuple(item for item in changes.items() if not item[0].endswith(_RECOMPUTE))
        if sizes in fitting:
            continue  # a variant with less recomputation is cheaper and fits
        planned += 1
        with suppress(MegarlError):
            plan = estimate(changed(config, changes), hardware, lengths)
            if plan.fits:
                fitting[sizes] = Candidate(_differing(initial, {**start, **changes}), plan)
    best = sorted(fitting.values(), key=lambda candidate: candidate.estimate.step.total)[:top]
    return SearchResult(best[0].changes if best else start, best, sum(map(len, choices)), planned, hardware)


def role_layouts(config: Config, role: PlannedRole, hardware: Hardware, lengths: Lengths) -> list[LayoutChoice]:
    """Return every layout of a role that passes the checks and whose states fit, the cheapest first."""

    def cost(job: PlannedJob) -> float | None:
        new = job.role(role.name)
        if least_bytes(job, new) > usable_bytes(job, hardware):
            return None
        return sum(phase.cost.total for phase in pass_costs(job, new, hardware, lengths))

    recompute = f"{role.path}.{_RECOMPUTE}"
    modes: list[Changes] = [{}] if value_at(config, recompute) == "full" else [{}, {recompute: "full"}]
    sizes = layouts(role, *devices_of(config, role), longest_sequence(config))
    options = ({**chunked, **mode} for changes in sizes for chunked in _interleaved(role, changes) for mode in modes)
    return _evaluated(config, hardware, options, cost)


def _interleaved(role: PlannedRole, changes: Changes) -> Iterator[Changes]:
    """Yield sizes of a role without interleaved pipeline stages, and with each number of chunks that divides."""
    yield changes
    stages = changes[f"{role.path}.{PP}"]
    for chunks in range(2, MAX_CHUNKS + 1) if stages > 1 else ():
        if role.model.num_layers % (stages * chunks) == 0:
            yield {**changes, f"{role.path}.{_CHUNKS}": chunks}


def _rollout_layouts(config: Config, hardware: Hardware, lengths: Lengths) -> list[LayoutChoice]:
    """Return every size of a replica that passes the checks, the cheapest first."""

    def cost(job: PlannedJob) -> float:
        phases = (generation_cost(job, hardware, lengths), sync_cost(job, hardware))
        return sum(phase.cost.total for phase in phases if phase is not None)

    options = ({f"{ROLLOUT}.{TP}": size} for size in powers(config.trainer.n_gpus_per_node))
    return _evaluated(config, hardware, options, cost)


def _evaluated(
    config: Config, hardware: Hardware, options: Iterable[Changes], cost: Callable[[PlannedJob], float | None]
) -> list[LayoutChoice]:
    """Return the options that pass the checks and have a cost, the cheapest first."""
    choices = []
    for changes in options:
        try:
            job = planned_job(changed(config, changes), device=hardware.device)
        except MegarlError:
            continue
        if (total := cost(job)) is not None:
            choices.append(LayoutChoice(changes, total))
    return sorted(choices, key=lambda choice: choice.cost)


def best_first(choices: Sequence[Sequence[LayoutChoice]]) -> Iterator[dict[str, Any]]:
    """Yield combinations of one choice per list, in the order of their summed costs; each list is sorted."""

    def entry(at: tuple[int, ...]) -> tuple[float, tuple[int, ...], list[LayoutChoice]]:
        chosen = [options[i] for options, i in zip(choices, at, strict=True)]
        return sum(choice.cost for choice in chosen), at, chosen

    heap = [entry((0,) * len(choices))] if all(choices) else []
    while heap:
        _, at, chosen = heapq.heappop(heap)
        yield {key: value for choice in chosen for key, value in choice.changes.items()}
        for k, options in enumerate(choices):
            # each combination follows from one other only, in which its last index above 0 is one less
            if at[k] + 1 < len(options) and not any(at[k + 1 :]):
                heapq.heappush(heap, entry((*at[:k], at[k] + 1, *at[k + 1 :])))


def _differing(config: Config, changes: Changes) -> dict[str, Any]:
    """Return the values to set: those that differ from the configuration, where roles inherit the actor's layout."""
    actors = {path: value for path, value in changes.items() if path.startswith(ACTOR_MEGATRON)}
    inherited = followers(config, actors)
    return {path: value for path, value in changes.items() if inherited.get(path, value_at(config, path)) != value}


def search_sections(result: SearchResult) -> list[ReportSection]:
    """Return the report of a layout search."""
    counts = f"{result.evaluated:,} layouts of single roles compared, {result.planned:,} combinations planned"
    lines = [f"{counts} on {result.hardware.name}"]
    if not result.best:
        return [ReportSection("Search", [*lines, "none fits: offload more, recompute, or use more nodes"])]
    rows = [_candidate_row(number, result) for number in range(len(result.best))]
    costs = ["tok/s/device", "step s", "MFU"]
    if not result.best[0].estimate.step.is_calibrated:
        costs = ["cost"]
        lines.append("cost of a step, relative to the first layout; no run has calibrated this hardware (--calibrate)")
    head = ["", *costs, "fullest", "layouts"]
    overrides = [
        f"{number}: {' '.join(overrides_of(candidate.changes)) or '(as configured)'}"
        for number, candidate in enumerate(result.best, 1)
    ]
    return [ReportSection("Search", lines, head, rows), ReportSection("Overrides", overrides)]


def _candidate_row(number: int, result: SearchResult) -> list[str]:
    plan, first = result.best[number].estimate, result.best[0].estimate.step
    step, trained = plan.step, [role for role in plan.job.roles if role.trains]
    parts = [f"{role.name} {role.layout.describe()}" for role in trained]
    parts += [f"rollout TP{plan.job.rollout.tp}"] if plan.job.rollout else []
    full = [role.name for role in trained if role.megatron.recompute_granularity == "full"]
    parts += [f"recompute {' and '.join(full)}"] if full else []
    costs = [f"{step.total / first.total:.2f}"]
    if step.is_calibrated:
        costs = [rough(step.throughput), rough(step.total), f"{step.mfu:.0%}"]
    fullest = max(phase.nbytes for phase in plan.memory.phases)
    return [str(number + 1), *costs, f"{fullest / plan.usable_bytes:.0%}", ", ".join(parts)]


def search_json(result: SearchResult) -> str:
    """Return the result of a layout search as JSON."""
    best = [
        {
            "overrides": overrides_of(candidate.changes),
            "relative_cost": candidate.estimate.step.total / result.best[0].estimate.step.total,
            "peak_bytes": max(phase.nbytes for phase in candidate.estimate.memory.phases),
            **speeds(candidate.estimate.step),
        }
        for candidate in result.best
    ]
    return json.dumps({"evaluated": result.evaluated, "planned": result.planned, "best": best}, indent=2)
