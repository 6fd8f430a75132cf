"""The closing summary of a run, for the console and the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich import box
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megarl.base.formatting import duration

REPORT_FILE = "report.html"
VALIDATION_PREFIX = "val-core/"
"""Beginning of the metrics that measure a validation; verl's name."""
SKIPPED_STEPS_SUFFIX = "/skipped_steps"
"""End of the metrics that count skipped optimizer steps, after the role."""
_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-~=+*#"


def sparkline(values: Sequence[float], width: int = 40, is_ascii: bool = False) -> str:
    """Draw a curve in one line of text: block characters for the means of ``width`` equal stretches.

    Values that are not finite are skipped.
    """
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * index // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    blocks = _ASCII_BLOCKS if is_ascii else _BLOCKS
    return "".join(blocks[round((mean - low) / span * (len(blocks) - 1))] for mean in means)


def summary_facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return labels and texts of a summary's entries, in display order."""

    def present(*names: str) -> bool:
        return all(summary.get(name) is not None for name in names)

    facts: list[tuple[str, str]] = []
    before, after = summary.get("val_accuracy_before"), summary.get("val_accuracy_after")
    if before is not None and after is not None:
        facts.append(("held-out accuracy", f"{before:.3f} -> {after:.3f}  ({after - before:+.3f})"))
    elif after is not None:
        facts.append(("held-out accuracy", f"{after:.3f}"))
    elif before is not None:
        facts.append(("held-out accuracy", f"{before:.3f} before training"))
    if present("steps"):
        took = f" in {duration(summary['train_seconds'])}" if present("train_seconds") else ""
        facts.append(("steps", f"{summary['steps']}{took}"))
    if present("skipped_steps"):
        facts.append(("skipped optimizer steps", f"{summary['skipped_steps']} (non-finite loss or gradient)"))
    if present("wall_seconds"):
        facts.append(("whole run", duration(summary["wall_seconds"])))
    if present("rollout_tokens_per_s"):
        facts.append(("rollout", f"{summary['rollout_tokens_per_s']:,.0f} tokens/s generated"))
    if present("update_tokens_per_s"):
        facts.append(("update", f"{summary['update_tokens_per_s']:,.0f} tokens/s trained on"))
    if present("refused_output"):
        lost = f"{summary['refused_output']:,} characters refused by a full disk; metrics and logs have the rest"
        facts.append(("console output", lost))
    for label, name in (("policy", "hf_dir"), ("report", "report")):
        if present(name):
            facts.append((label, str(summary[name])))
    return facts


def plain_summary(summary: Mapping[str, Any], title: str) -> list[str]:
    """Format the summary as plain lines."""
    stopped = summary.get("stopped")
    state = f"ended early ({stopped})" if stopped else "finished"
    return [f"{title}: {state}", *(f"  {label}: {text}" for label, text in summary_facts(summary))]


def _accuracy_bars(before: float, after: float, is_ascii: bool, width: int = 24) -> Text:
    shares = [min(1.0, max(0.0, share)) for share in (before, after)]  # a mean reward may be anything
    kept, gained = round(width * min(shares)), round(width * max(shares))
    bar, rest = ("#", ".") if is_ascii else ("━", "━")
    return Text.assemble(
        "   ", (bar * kept, "blue"), (bar * (gained - kept), "green" if after > before else "red"),
        (rest * (width - gained), "bright_black"),
    )  # fmt: skip


def summary_panel(
    summary: Mapping[str, Any], title: str, rewards: Sequence[float] = (), is_ascii: bool = False
) -> Panel:
    """Format the summary as a panel for a terminal, with an accuracy bar and a sparkline of the rewards."""
    arrow = "->" if is_ascii else "→"
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    before, after = summary.get("val_accuracy_before"), summary.get("val_accuracy_after")
    for label, text in summary_facts(summary):
        value = Text(text.replace("->", arrow), style="bold" if label == "held-out accuracy" else "")
        if label == "held-out accuracy" and before is not None and after is not None:
            value.append_text(_accuracy_bars(before, after, is_ascii))
        grid.add_row(label, value)
        if label == "held-out accuracy" and rewards:
            grid.add_row(
                "reward",
                Text(
                    f"{sparkline(rewards, is_ascii=is_ascii)}  {rewards[0]:.3f} {arrow} {rewards[-1]:.3f}",
                    style="green",
                ),
            )
    stopped = summary.get("stopped")
    return Panel(
        grid,
        title=Text(f"{title}: ended early ({stopped})" if stopped else title, style="bold"),
        box=box.ASCII if is_ascii else box.ROUNDED,
        border_style="yellow" if stopped else "green",
        padding=(1, 2),
    )
