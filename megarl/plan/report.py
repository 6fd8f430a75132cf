"""A plan as text: rich tables on a terminal, plain ones elsewhere; and as JSON for programs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megarl.amounts import GIB, gib, some
from megarl.config.batch import render_plan
from megarl.plan.estimate import HOST_SHARE, Estimate
from megarl.plan.memory import PhaseMemory
from megarl.plan.pass_times import Cost
from megarl.plan.search import Candidate, Found
from megarl.plan.sync import SyncTraffic
from megarl.plan.times import largest_cause
from megarl.plan.verdict import Remedy

CAUSES = {
    "compute": "matrix products",
    "memory": "memory bandwidth",
    "tensor": "tensor-parallel collectives",
    "context": "context-parallel collectives",
    "expert": "expert-parallel exchange",
    "stages": "sends between stages",
    "bubble": "pipeline bubble",
    "data": "gradient sums and weight gathers",
    "host": "copies to and from host memory",
    "latency": "launching and scheduling",
    "network": "weight sync's links",
}
"""What :class:`Cost`'s fields are called."""
SHOWN_CAUSES, LEAST_SHARE = 3, 0.03
WIDTH = 120
"""Columns of a table that is no terminal's, where it can be broken at all."""


@dataclass(frozen=True)
class Block:
    """A part of a report: a title, then lines, then a table."""

    title: str
    lines: Sequence[str] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = field(default_factory=list)


def plan_blocks(found: Estimate, remedy: Remedy | None) -> list[Block]:
    """The report of one configuration."""
    blocks = [_overview(found), _roles(found), _memory(found)]
    blocks += [Block("Batches", render_plan(found.job.batches).splitlines()), _times(found)]
    if found.sync is not None:
        blocks.append(_sync(found.sync))
    return [*blocks, _verdict(found, remedy)]


def _overview(found: Estimate) -> Block:
    job, hardware = found.job, found.hardware
    model = job.roles[0].model
    lines = [
        f"{job.nodes} x {job.devices_per_node} {hardware.name}, {hardware.memory_gib:g} GiB each, of which "
        f"{found.usable_bytes / GIB:.1f} GiB for tensors",
        f"{model.architecture}, {model.num_layers} layers of width {model.hidden_size}",
        found.lengths.describe(),
    ]
    if job.device == "cpu" and job.devices_per_node > hardware.devices_per_node:
        lines.append(
            f"{job.devices_per_node} processes share {hardware.devices_per_node} cores: times are of processes with a "
            "core each"
        )
    return Block("Plan", lines)


def _roles(found: Estimate) -> Block:
    rows = []
    for name, memory in found.memory.roles.items():
        states = memory.largest.states
        rows.append(
            [
                name,
                memory.role.layout.describe(),
                _count(states.parameters),
                *(gib(n) for n in (states.weights, states.gradients, states.optimizer)),
            ]
        )
    rollout, kv = found.job.rollout, found.memory.kv
    lines = []
    if rollout is not None and not rollout.is_elsewhere:
        lines.append(f"rollout: {some(rollout.replicas, 'replica')} of {rollout.config.name}, TP{rollout.tp}")
        if kv is not None:
            lines.append(
                f"each has room for {kv.tokens:,} tokens ({kv.sequences:,} of the longest conversations): {kv.how}"
            )
    head = ["on the fullest rank, GiB", "layout", "parameters", "weights", "gradients", "optimizer"]
    return Block("Models", lines, head, rows)


def _memory(found: Estimate) -> Block:
    rows = [_phase_row(phase, found.usable_bytes) for phase in found.memory.phases]
    lines, host = [], found.memory.host_bytes
    if host:
        parts = ", ".join(f"{c.owner} {c.name} {c.nbytes / GIB:,.0f}" for c in found.memory.host)
        lines.append(f"host memory of a node: {host / GIB:,.0f} of {found.hardware.host_memory_gib:,g} GiB")
        lines += textwrap.wrap(f"of which {parts}", WIDTH - 2)
    return Block("Memory of the fullest device", lines, ["phase", "GiB", "of usable", "what takes it, GiB"], rows)


def _phase_row(phase: PhaseMemory, usable: float) -> list[str]:
    parts = ", ".join(f"{c.owner} {c.name} {gib(c.nbytes)}" for c in phase.components if c.nbytes > 0.005 * usable)
    return [phase.phase, gib(phase.nbytes), f"{phase.nbytes / max(1.0, usable):.0%}", parts]


def _times(found: Estimate) -> Block:
    step = found.step
    rows = [
        [
            phase.phase,
            _seconds(phase.cost.seconds),
            f"{phase.cost.seconds / step.seconds:.0%}",
            f"{step.mfu_of(phase):.0%}" if phase.work.total else "-",
            causes(phase.cost),
        ]
        for phase in step.phases
    ]
    whole = Cost()
    for phase in step.phases:
        whole = whole.plus(phase.cost)
    rows.append(["step", _seconds(step.seconds), "100%", f"{step.mfu:.0%}", causes(whole)])
    lines = [f"{step.throughput:,.1f} tokens per second and device; rewards, data and the driver are not counted"]
    if found.job.rollout is not None and found.job.rollout.is_elsewhere:
        lines.append("answers and the sync's way to them are those of servers elsewhere: neither is timed")
    if step.generated is not None:
        made = step.generated
        lines.append(
            f"a replica computes prompts for {_seconds(made.prefill_s)} s and takes {made.steps:,} steps of "
            f"{1000 * made.decode_s / max(1, made.steps):.1f} ms with {made.mean_running:.0f} sequences on average"
        )
    return Block("Seconds of a step", lines, ["phase", "s", "share", "MFU", "where they go"], rows)


def causes(cost: Cost) -> str:
    """What most of the seconds go to, with shares."""
    parts = sorted(zip(Cost._fields, cost, strict=True), key=lambda pair: -pair[1])
    total = cost.seconds or 1.0
    shown = [(name, s / total) for name, s in parts[:SHOWN_CAUSES] if s / total >= LEAST_SHARE]
    return ", ".join(f"{CAUSES[name]} {share:.0%}" for name, share in shown)


def _sync(sync: SyncTraffic) -> Block:
    lines = [
        f"{_gb(sync.total)} in {some(sync.buckets, 'bucket')}: {_gb(sync.on_device)} on the same device, "
        f"{_gb(sync.within_nodes)} inside nodes, {_gb(sync.between_nodes)} between nodes",
        f"at most {_gb(sync.most_received)} received and {_gb(sync.most_sent)} sent by a rank; "
        f"{_seconds(sync.seconds)} s, paced by {sync.limit}",
    ]
    return Block("Weight sync", lines)


def _verdict(found: Estimate, remedy: Remedy | None) -> Block:
    phase, cause = found.step.limit
    fullest = max(found.memory.phases, key=lambda one: one.nbytes)
    lines = [
        f"memory: {fullest.phase} is the fullest, {fullest.nbytes / max(1.0, found.usable_bytes):.0%} of what is "
        f"usable, most of it {fullest.dominant.owner} {fullest.dominant.name}",
        f"time: {phase} takes most, and most of it is {CAUSES[cause]}",
    ]
    if found.fits:
        return Block("It fits", lines)
    return Block("It does not fit", shortfall_lines(found, remedy))


def shortfall_lines(found: Estimate, remedy: Remedy | None) -> list[str]:
    """Of a plan that does not fit: what is short, and what would help."""
    lines = [one.text + _largest(one.largest) for one in found.shortfalls]
    if remedy is None:
        lines.append("no change that is known to the plan makes it fit; try --search, other --hardware, or more nodes")
        rollout = found.job.rollout
        if rollout is not None and found.job.device == "cuda" and rollout.tp == found.job.devices_per_node:
            lines.append(
                "the run starts replicas within one node; larger ones are servers of your own: "
                "actor_rollout_ref.rollout.engine_kwargs.sglang.urls"
            )
    else:
        many = "this change" if len(remedy.changes) == 1 else "these changes, and no one of them alone"
        lines.append(f"it would fit with {many}: {' '.join(remedy.overrides())}")
    return lines


def _largest(parts: Sequence[Any]) -> str:
    return ": " + ", ".join(f"{c.owner} {c.name} {gib(c.nbytes)}" for c in parts) if parts else ""


def search_blocks(found: Found, hardware_name: str) -> list[Block]:
    """The report of a search."""
    lines = [
        f"{found.timed:,} layouts of single roles timed, {found.planned:,} combinations planned on {hardware_name}"
    ]
    if not found.best:
        return [Block("Search", [*lines, "none fits: offload more, recompute, or take more nodes"])]
    rows = [_candidate_row(number, one) for number, one in enumerate(found.best, 1)]
    head = ["", "tok/s/device", "step s", "MFU", "fullest", "layouts"]
    chosen = [f"{number}: {' '.join(one.overrides()) or '(as configured)'}" for number, one in enumerate(found.best, 1)]
    return [Block("Search", lines, head, rows), Block("Overrides", chosen)]


def _candidate_row(number: int, one: Candidate) -> list[str]:
    found = one.estimate
    layouts = [f"{role.name} {role.layout.describe()}" for role in found.job.roles if role.trains]
    layouts += [f"rollout TP{found.job.rollout.tp}"] if found.job.rollout else []
    full = [role.name for role in found.job.roles if role.trains and role.megatron.recompute_granularity == "full"]
    layouts += [f"recompute {' and '.join(full)}"] if full else []
    return [
        str(number),
        f"{found.step.throughput:,.1f}",
        _seconds(found.step.seconds),
        f"{found.step.mfu:.0%}",
        f"{found.memory.peak.nbytes / found.usable_bytes:.0%}",
        ", ".join(layouts),
    ]


def show(blocks: Sequence[Block], console: Console) -> None:
    """Prints a report: with rich's tables on a terminal, else as plain aligned text."""
    for block in blocks:
        if console.is_terminal:
            _show_rich(block, console)
        else:
            console.file.write(plain(block) + "\n")


def _show_rich(block: Block, console: Console) -> None:
    console.print(Text(block.title, style="bold"))
    for line in block.lines:
        console.print(Text(f"  {line}"), soft_wrap=True)
    if block.rows:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for number, name in enumerate(block.head):
            table.add_column(name, justify="left" if number in (0, len(block.head) - 1) else "right")
        for row in block.rows:
            table.add_row(*row)
        console.print(table)
    else:
        console.print()


def plain(block: Block) -> str:
    """A part of a report as text: lines as they are, so that they can be pasted; tables within ``WIDTH`` columns."""
    lines = [block.title, *(f"  {line}" for line in block.lines)]
    if block.rows:
        cells = [list(block.head), *map(list, block.rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(block.head) - 1)]
        for row in cells:
            start = "  " + "".join(f"{cell:<{width}}  " for cell, width in zip(row[:-1], widths, strict=True))
            indent = " " * len(start)
            lines.append(textwrap.fill(row[-1], WIDTH, initial_indent=start, subsequent_indent=indent) or start)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def as_json(found: Estimate, remedy: Remedy | None) -> str:
    """The same for programs; sizes in bytes, times in seconds."""
    step = found.step
    values = {
        "fits": found.fits,
        "hardware": found.hardware.name,
        "lengths": found.lengths.describe(),
        "usable_bytes": found.usable_bytes,
        "usable_host_bytes": HOST_SHARE * found.hardware.host_bytes,
        "roles": {name: _role_values(memory) for name, memory in found.memory.roles.items()},
        "memory": {
            phase.phase: {"bytes": phase.nbytes, "components": _components(phase.components)}
            for phase in found.memory.phases
        },
        "host_memory": {"bytes": found.memory.host_bytes, "components": _components(found.memory.host)},
        "kv_cache": found.memory.kv._asdict() if found.memory.kv else None,
        "sync": found.sync._asdict() if found.sync else None,
        "step": {
            "seconds": step.seconds,
            "tokens_per_second_per_device": step.throughput,
            "mfu": step.mfu,
            "phases": {
                phase.phase: {
                    "seconds": phase.cost.seconds,
                    "mfu": step.mfu_of(phase),
                    "flops": phase.work.total,
                    "by_cause": phase.cost._asdict(),
                }
                for phase in step.phases
            },
        },
        "limit": {"phase": step.limit[0], "cause": step.limit[1]},
        "shortfalls": [{"phase": s.phase, "missing_bytes": s.missing, "text": s.text} for s in found.shortfalls],
        "remedy": remedy.overrides() if remedy else None,
    }
    return json.dumps(values, indent=2)


def search_json(found: Found) -> str:
    """A search for programs."""
    best = [
        {
            "overrides": one.overrides(),
            "tokens_per_second_per_device": one.estimate.step.throughput,
            "step_seconds": one.estimate.step.seconds,
            "mfu": one.estimate.step.mfu,
            "peak_bytes": one.estimate.memory.peak.nbytes,
            "limit": largest_cause(max(one.estimate.step.phases, key=lambda p: p.cost.seconds).cost),
        }
        for one in found.best
    ]
    return json.dumps({"timed": found.timed, "planned": found.planned, "best": best}, indent=2)


def _role_values(memory: Any) -> dict[str, Any]:
    states = memory.largest.states
    return {
        "layout": memory.role.layout._asdict(),
        "parameters_per_rank": states.parameters,
        "weights": states.weights,
        "gradients": states.gradients,
        "optimizer": states.optimizer,
    }


def _components(parts: Sequence[Any]) -> list[dict[str, Any]]:
    return [part._asdict() for part in parts]


def _count(number: float) -> str:
    """A number of parameters, such as ``2.27 B``."""
    unit, name = next(((u, n) for u, n in ((1e9, " B"), (1e6, " M"), (1e3, " K")) if number >= u), (1, ""))
    return f"{number / unit:.3g}{name}"


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:,.1f} MB"


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
