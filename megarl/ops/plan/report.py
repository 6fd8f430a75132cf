"""Report of a plan: rich tables on a terminal, plain text elsewhere, and JSON."""

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

from megarl.base.formatting import GIB, count_noun, gib, gigabytes, metric_count, rough, table_lines
from megarl.config.batch import render_plan
from megarl.config.schema.jobs import POOL_OWNERS
from megarl.ops.plan.estimate import HOST_SHARE, Changes, Estimate, overrides_of
from megarl.ops.plan.flops import Cost
from megarl.ops.plan.memory import Component
from megarl.ops.plan.step_costs import StepCost, SyncTraffic

CAUSES = {
    "compute": "matrix products",
    "memory": "memory bandwidth",
    "parallel": "collectives of model parallelism",
    "bubble": "pipeline bubble",
    "data": "gradient reduction and weight gathers",
    "host": "copies to and from host memory",
    "latency": "kernel launches",
    "transfer": "weight sync transfers",
}
"""Display names of the fields of :class:`Cost`."""
SHOWN_CAUSES, LEAST_SHARE = 3, 0.03
UNCALIBRATED = (
    "no seconds, since no run has calibrated this hardware (--calibrate); causes are shares at its peak speeds"
)
WIDTH = 120  # line length of plain-text tables; only the last column wraps


@dataclass(frozen=True)
class ReportSection:
    """A section of a report: title, lines, table."""

    title: str
    lines: Sequence[str] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = field(default_factory=list)


def plan_sections(plan: Estimate, suggestion: Changes | None) -> list[ReportSection]:
    """Return the report of one configuration."""
    sections = [_overview(plan), _roles(plan), _memory(plan)]
    sections += [ReportSection("Batches", render_plan(plan.job.batches).splitlines()), _step(plan)]
    if plan.sync is not None:
        sections.append(_sync(plan.sync))
    return [*sections, _verdict(plan, suggestion)]


def _overview(plan: Estimate) -> ReportSection:
    job, hardware = plan.job, plan.hardware
    model = job.roles[0].model
    own = "".join(f", {pool.nodes} x {pool.devices_per_node} for {POOL_OWNERS[pool.section]}" for pool in job.own_pools)
    lines = [
        f"{job.nodes} x {job.devices_per_node} {hardware.name}{own}, {hardware.memory_gib:g} GiB each, of which "
        f"{plan.usable_bytes / GIB:.1f} GiB for tensors",
        f"{model.architecture}, {model.num_layers} layers of width {model.hidden_size}",
        plan.lengths.describe(),
    ]
    if model.vision is not None and job.rollout is not None:
        lines.append("images: memory and work as if one image filled each prompt, the most that images can cost")
    return ReportSection("Plan", lines)


def _roles(plan: Estimate) -> ReportSection:
    rows = []
    for name, memory in plan.memory.roles.items():
        states = memory.largest.states
        sizes = map(gib, (states.weights, states.gradients, states.optimizer))
        rows.append([name, memory.role.layout.describe(), metric_count(states.parameters), *sizes])
    rollout, kv = plan.job.rollout, plan.memory.kv
    lines = []
    if rollout is not None and not rollout.is_external:
        lines.append(f"rollout: {count_noun(rollout.replicas, 'replica')} of {rollout.config.name}, TP{rollout.tp}")
        if kv is not None:
            lines.append(
                f"each has room for {kv.tokens:,} tokens ({kv.sequences:,} of the longest trajectories): {kv.how}"
            )
    head = ["on the fullest rank, GiB", "layout", "parameters", "weights", "gradients", "optimizer"]
    return ReportSection("Models", lines, head, rows)


def _memory(plan: Estimate) -> ReportSection:
    rows, usable = [], plan.usable_bytes
    for phase in plan.memory.phases:
        parts = ", ".join(f"{c.owner} {c.name} {gib(c.nbytes)}" for c in phase.components if c.nbytes > 0.005 * usable)
        rows.append([phase.phase, gib(phase.nbytes), f"{phase.nbytes / max(1.0, usable):.0%}", parts])
    lines, host = [], plan.memory.host_bytes
    if host >= GIB / 2:
        parts = ", ".join(
            f"{c.owner} {c.name} {c.nbytes / GIB:,.0f}" for c in plan.memory.host if c.nbytes > 0.005 * host
        )
        lines.append(f"host memory of a node: {host / GIB:,.0f} of {plan.hardware.host_memory_gib:,g} GiB")
        lines += textwrap.wrap(f"of which {parts}", WIDTH - 2)
    return ReportSection("Memory of the fullest device", lines, ["phase", "GiB", "of usable", "components, GiB"], rows)


def _step(plan: Estimate) -> ReportSection:
    step, rows = plan.step, []
    total = step.total
    for phase in step.phases:
        times = [rough(phase.cost.total), f"{phase.cost.total / total:.0%}"]
        times.append(f"{step.mfu_of(phase):.0%}" if phase.flops else "-")
        flops = metric_count(phase.flops) if phase.flops else "-"
        rows.append([phase.phase, flops, *(times if step.is_calibrated else ()), causes(phase.cost)])
    lines = [f"at the same time, on separate devices: {', '.join(group)}" for group in step.simultaneous]
    if plan.job.rollout is not None and plan.job.rollout.is_external:
        lines.append("generation and the weight sync use external servers and are not modelled")
    if not step.is_calibrated:
        return ReportSection("Work of a step", [*lines, UNCALIBRATED], ["phase", "FLOPs", "causes"], rows)
    flops = metric_count(sum(phase.flops for phase in step.phases))
    rows.append(["step", flops, rough(total), "100%", f"{step.mfu:.0%}", ""])
    lines.append(f"{rough(step.throughput)} tokens per second and device; without rewards, data loading and the driver")
    if plan.job.rollout is not None and plan.job.rollout.own_devices:
        generation = sum(phase.cost.total for phase in step.phases if phase.phase == "gen")
        least = rough(max(generation, total - generation))
        lines.append(
            f"asynchronous training overlaps generation with the other phases: a step takes at least {least} s"
        )
    return ReportSection("Seconds of a step", lines, ["phase", "FLOPs", "s", "share", "MFU", "causes"], rows)


def causes(cost: Cost) -> str:
    """Describe the largest causes, with their shares of the cost."""
    parts = sorted(zip(Cost._fields, cost, strict=True), key=lambda pair: -pair[1])
    shares = [(name, part / (cost.total or 1.0)) for name, part in parts[:SHOWN_CAUSES]]
    return ", ".join(f"{CAUSES[name]} {share:.0%}" for name, share in shares if share >= LEAST_SHARE)


def _sync(sync: SyncTraffic) -> ReportSection:
    lines = [
        f"{gigabytes(sync.total)} in {count_noun(sync.buckets, 'bucket')}: {gigabytes(sync.on_device)} on the same "
        f"device, {gigabytes(sync.within_nodes)} inside nodes, {gigabytes(sync.between_nodes)} between nodes",
        f"at most {gigabytes(sync.most_received)} received and {gigabytes(sync.most_sent)} sent by a rank",
    ]
    return ReportSection("Weight sync", lines)


def _verdict(plan: Estimate, suggestion: Changes | None) -> ReportSection:
    fullest = max(plan.memory.phases, key=lambda memory: memory.nbytes)
    lines = [
        f"memory: {fullest.phase} is the fullest, {fullest.nbytes / max(1.0, plan.usable_bytes):.0%} of the "
        f"usable memory, most of it {fullest.dominant.owner} {fullest.dominant.name}",
    ]
    if plan.fits:
        return ReportSection("It fits", lines)
    return ReportSection("It does not fit", shortfall_lines(plan, suggestion))


def shortfall_lines(plan: Estimate, suggestion: Changes | None) -> list[str]:
    """Describe the shortfalls of a plan, and the change that makes it fit."""
    parts = (", ".join(f"{c.owner} {c.name} {gib(c.nbytes)}" for c in s.largest) for s in plan.shortfalls)
    lines = [s.text + (f": {text}" if text else "") for s, text in zip(plan.shortfalls, parts, strict=True)]
    if suggestion is None:
        lines.append("no known change makes it fit; try layout=auto, other --hardware, or more nodes")
        rollout = plan.job.rollout
        if rollout is not None and plan.job.device == "cuda" and rollout.tp == plan.job.devices_per_node:
            lines.append(
                "a run starts replicas within one node; a larger replica needs external servers: "
                "actor_rollout_ref.rollout.engine_kwargs.sglang.urls"
            )
    else:
        changes = "this change" if len(suggestion) == 1 else "these changes, all of them needed"
        lines.append(f"it would fit with {changes}: {' '.join(overrides_of(suggestion))}")
    return lines


def print_report(sections: Sequence[ReportSection], console: Console) -> None:
    """Print a report, with rich tables on a terminal and as aligned text elsewhere."""
    for section in sections:
        if console.is_terminal:
            _print_rich(section, console)
        else:
            console.file.write(plain_text(section) + "\n")


def _print_rich(section: ReportSection, console: Console) -> None:
    console.print(Text(section.title, style="bold"))
    for line in section.lines:
        console.print(Text(f"  {line}"), soft_wrap=True)
    if section.rows:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for number, name in enumerate(section.head):
            table.add_column(name, justify="left" if number in (0, len(section.head) - 1) else "right")
        for row in section.rows:
            table.add_row(*row)
        console.print(table)
    else:
        console.print()


def plain_text(section: ReportSection) -> str:
    """Return a section as text: lines unwrapped, so that commands can be pasted; tables within ``WIDTH`` columns."""
    lines = [section.title, *(f"  {line}" for line in section.lines)]
    if section.rows:
        cells = [list(section.head), *map(list, section.rows)]
        starts = table_lines([row[:-1] for row in cells], indent="  ")
        width = max(map(len, starts)) + 2
        for start, row in zip(starts, cells, strict=True):
            first = f"{start:<{width}}"
            lines.append(textwrap.fill(row[-1], WIDTH, initial_indent=first, subsequent_indent=" " * width) or first)
    return "\n".join(line.rstrip() for line in lines) + "\n"


def plan_json(plan: Estimate, suggestion: Changes | None) -> str:
    """Return a plan as JSON; sizes in bytes, times in seconds and only with a calibration."""
    values = {
        "fits": plan.fits,
        "hardware": plan.hardware.name,
        "lengths": plan.lengths._asdict(),
        "usable_bytes": plan.usable_bytes,
        "usable_host_bytes": HOST_SHARE * plan.hardware.host_bytes,
        "roles": {
            name: {
                "layout": memory.role.layout._asdict(),
                "parameters_per_rank": memory.largest.states.parameters,
                **{part: getattr(memory.largest.states, part) for part in ("weights", "gradients", "optimizer")},
            }
            for name, memory in plan.memory.roles.items()
        },
        "memory": {phase.phase: _memory_values(phase.components) for phase in plan.memory.phases},
        "host_memory": _memory_values(plan.memory.host),
        "kv_cache": plan.memory.kv._asdict() if plan.memory.kv else None,
        "sync": plan.sync._asdict() if plan.sync else None,
        "step": _step_values(plan.step),
        "shortfalls": [{"phase": s.phase, "missing_bytes": s.missing, "text": s.text} for s in plan.shortfalls],
        "remedy": overrides_of(suggestion) if suggestion else None,
    }
    return json.dumps(values, indent=2)


def _step_values(step: StepCost) -> dict[str, Any]:
    phases: dict[str, dict[str, Any]] = {}
    for phase in step.phases:
        shares = {name: part / (phase.cost.total or 1.0) for name, part in phase.cost._asdict().items()}
        phases[phase.phase] = {"flops": phase.flops, "shares_of_cost": shares}
        if step.is_calibrated:
            phases[phase.phase] |= {"seconds": phase.cost.total, "mfu": step.mfu_of(phase)}
    return {"phases": phases, **speeds(step)}


def speeds(step: StepCost) -> dict[str, float]:
    """Return the predicted speeds of a step; empty without a calibration."""
    if not step.is_calibrated:
        return {}
    return {"seconds": step.total, "tokens_per_second_per_device": step.throughput, "mfu": step.mfu}


def _memory_values(parts: Sequence[Component]) -> dict[str, Any]:
    return {"bytes": sum(part.nbytes for part in parts), "components": [part._asdict() for part in parts]}
