"""Tables of the console: a row per step, a row per data source of a validation, and the closing summary.

Phases that did not happen have no column in the step table. On a narrow terminal all phase columns are dropped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from megarl.base.formatting import duration

Metrics = Mapping[str, float]
_PROMPTS = re.compile(r"val-aux/(.+)/num_prompts")
_BLOCKS = "▁▂▃▄▅▆▇█"


def number_cell(value: float, width: int) -> str:
    """Format a number with about four significant digits within ``width``; tiny and huge numbers are scientific."""
    if not math.isfinite(value):
        return str(value)[:width]
    most = 4 if abs(value) < 0.1 else 3 if abs(value) < 100 else 1
    for digits in range(most, -1, -1):
        cell = f"{value:.{digits}f}"
        if len(cell) <= width and (value == 0 or abs(value) >= 10 ** min(0, 1 - digits)):
            return cell
    for digits in (1, 0):
        cell = f"{value:.{digits}e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
        if len(cell) <= width:
            break
    return cell


def seconds_cell(value: float, width: int = 4) -> str:
    """Format seconds as ``0.05``, ``9.87``, ``65.4``, ``654``; from 1000 on as minutes, then hours."""
    if value >= 1000:
        return f"{value / 60:.0f}m" if value / 60 < 999.5 else f"{value / 3600:.0f}h"
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def length_cell(value: float, width: int = 5) -> str:
    """Format a number of tokens as ``7.3``, ``512.0``, ``12345``, ``131k``."""
    return rate_cell(value) if value >= 99999.5 else f"{value:.{1 if value < 999.95 else 0}f}"


def rate_cell(value: float, width: int = 5) -> str:
    """Format a number as ``987``, ``9.8k``, ``123k``, ``1.2M``, ``4.5G``."""
    power = next((power for power in range(3) if value < 1000 ** (power + 1)), 3)
    unit, scaled = ("", "k", "M", "G")[power], value / 1000**power
    return f"{scaled:.{1 if unit and scaled < 99.95 else 0}f}{unit}"


@dataclass(frozen=True)
class MetricColumn:
    """A column of the step table.

    Attributes:
        read: returns its value from a step's metrics; None = the step has no value.
        width: characters of a cell.
        phase: description of the phase, for columns with the seconds of a phase, which appear once the phase happened.
    """

    header: str
    read: Callable[[Metrics], float | None]
    width: int
    show: Callable[[float, int], str] = number_cell
    style: str = ""
    phase: str = ""


def _first_of(*names: str) -> Callable[[Metrics], float | None]:
    return lambda metrics: next((metrics[name] for name in names if name in metrics), None)


def _tokens_per_second(metrics: Metrics) -> float | None:
    tokens, seconds = metrics.get("perf/total_num_tokens"), metrics.get("timing_s/step")
    return tokens / seconds if tokens is not None and seconds else metrics.get("perf/throughput")


def _phase(header: str, name: str, meaning: str) -> MetricColumn:
    return MetricColumn(header, _first_of(f"timing_s/{name}"), 4, seconds_cell, "dim", phase=meaning)


_TOTALS = (
    MetricColumn("sec", _first_of("timing_s/step"), 4, seconds_cell),
    MetricColumn("tok/s", _tokens_per_second, 5, rate_cell),
)
RL_COLUMNS = (
    MetricColumn("reward", _first_of("critic/score/mean"), 6, style="bold green"),
    MetricColumn("KL", _first_of("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl"), 6, style="magenta"),
    MetricColumn("entropy", _first_of("actor/entropy"), 7, style="cyan"),
    MetricColumn("len", _first_of("response_length/mean"), 5, length_cell),
    _phase("gen", "gen", "generation"),
    _phase("rew", "reward", "reward"),
    _phase("old", "old_log_prob", "old log-probs"),
    _phase("ref", "ref", "reference"),
    _phase("teach", "teacher", "teachers"),
    _phase("repr", "repr_align", "alignment"),
    _phase("val", "values", "values"),
    _phase("adv", "adv", "advantages"),
    _phase("crit", "update_critic", "critic update"),
    _phase("act", "update_actor", "actor update"),
    _phase("sync", "update_weights", "weight sync"),
    *_TOTALS,
)
SFT_COLUMNS = (
    MetricColumn("loss", _first_of("train/loss"), 7, style="bold green"),
    MetricColumn("accuracy", _first_of("train/accuracy"), 8, style="cyan"),
    MetricColumn("grad norm", _first_of("train/grad_norm"), 9),
    MetricColumn("lr", _first_of("train/lr"), 7, style="dim"),
    *_TOTALS,
)
PAIR_COLUMNS = (
    *SFT_COLUMNS[:2],
    MetricColumn("margin", _first_of("train/margin"), 7, style="magenta"),
    *SFT_COLUMNS[2:4],
    MetricColumn("val acc", _first_of("val/accuracy"), 7, style="bold cyan"),
    *_TOTALS,
)


class StepTable:
    """Layout of the step table: header and rows.

    Args:
        width: largest number of characters of a line.
    """

    def __init__(self, columns: Sequence[MetricColumn], width: int, total_steps: int | None = None) -> None:
        self.columns = tuple(columns)
        self.width = width
        self.total_steps = total_steps
        self.shown: tuple[MetricColumn, ...] = tuple(column for column in columns if not column.phase)

    @property
    def _step_width(self) -> int:
        return max(4, 2 * len(str(self.total_steps)) + 1 if self.total_steps else 6)

    def fit(self, metrics: Metrics) -> bool:
        """Choose the columns for a step; returns whether they changed, which calls for a new header.

        A phase that happened once keeps its column.
        """
        columns = tuple(
            column
            for column in self.columns
            if not column.phase or column in self.shown or column.read(metrics) is not None
        )
        blank = [(" " * column.width, "") for column in columns]
        if len(self._line(" " * self._step_width, blank, columns).plain) > self.width:
            columns = tuple(column for column in columns if not column.phase)
        changed, self.shown = columns != self.shown, columns
        return changed

    def _line(
        self, step: str, cells: Sequence[tuple[str, str]], columns: Sequence[MetricColumn], style: str = ""
    ) -> Text:
        line = Text()
        line.append(step.rjust(self._step_width), style=style or "bold")
        was_phase: bool | None = None
        for (cell, cell_style), column in zip(cells, columns, strict=True):
            line.append(" │ " if bool(column.phase) != was_phase else " ", style="dim")
            line.append(cell.rjust(column.width), style=style or cell_style)
            was_phase = bool(column.phase)
        return line

    def legend(self) -> Text:
        """Explain the phase headers in one line; empty if no phase is shown."""
        names = " · ".join(f"{column.header} {column.phase}" for column in self.shown if column.phase)
        return Text(f"seconds per phase: {names}" if names else "", style="dim")

    def header(self) -> Text:
        """Format the header; phases are in seconds."""
        return self._line("step", [(column.header, "") for column in self.shown], self.shown, style="bold blue")

    def row(self, step: int, metrics: Metrics) -> Text:
        """Format the row of a step; the slowest phase is highlighted."""
        name = f"{step}/{self.total_steps}" if self.total_steps else str(step)
        values = [column.read(metrics) for column in self.shown]
        slowest = max((v for v, column in zip(values, self.shown, strict=True) if column.phase and v), default=None)
        cells = [
            ("·", "dim") if value is None
            else (column.show(value, column.width), "yellow" if column.phase and value == slowest else column.style)
            for value, column in zip(values, self.shown, strict=True)
        ]  # fmt: skip
        return self._line(name, cells, self.shown)

    def plain_row(self, step: int, metrics: Metrics) -> str:
        """Format a step as one self-contained line of ``name=value`` for logs, with phases as ``name 0.12``."""
        name = f"{step}/{self.total_steps}" if self.total_steps else str(step)
        parts, phases = [f"step {name}"], []
        for column in self.columns:
            value = column.read(metrics)
            if value is None:
                continue
            cell = column.show(value, max(column.width, 8))
            if column.phase:
                phases.append(f"{column.header} {cell}")
            else:
                parts.append(f"{column.header.replace(' ', '_')}={cell}")
        return "  ".join(parts) + (f"  [{', '.join(phases)}]" if phases else "")


def validation_table(metrics: Mapping[str, float], samples: int) -> Table:
    """Tabulate a validation: a row per data source.

    The columns are the number of prompts; mean, best and majority over N responses; response length in tokens; failed
    rewards.

    Args:
        metrics: ``val-core/...`` and ``val-aux/...`` of a validation; a missing metric is a dash.
        samples: N, responses per prompt.
    """
    of_n = [f"mean@{samples}", *([f"best@{samples}", f"maj@{samples}"] if samples > 1 else [])]
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False)
    table.add_column("data source", overflow="fold")
    table.add_column("variable", overflow="fold")
    for title in ("prompts", *of_n, "length", "failed"):
        table.add_column(title, justify="right", no_wrap=True)
    for source in [match[1] for match in map(_PROMPTS.fullmatch, metrics) if match]:
        variable = _variable(metrics, source, of_n[0])
        core = f"val-core/{source}/{variable}"
        names = [f"{core}/{of_n[0]}", *(f"{core}/{name}/mean" for name in of_n[1:])]
        table.add_row(
            source,
            variable,
            _cell(metrics, f"val-aux/{source}/num_prompts", "g"),
            *(_cell(metrics, name, ".3f") for name in names),
            _cell(metrics, f"val-aux/{source}/response_length/mean", ".1f"),
            _cell(metrics, f"val-aux/{source}/failed_rewards", "g"),
        )
    return table


def _variable(metrics: Mapping[str, float], source: str, mean: str) -> str:
    """Name of the variable that ``val-core`` has for a data source."""
    begin, end = f"val-core/{source}/", f"/{mean}"
    variables = (name[len(begin) : -len(end)] for name in metrics if name.startswith(begin) and name.endswith(end))
    return next((name for name in variables if "/" not in name), "-")


def _cell(metrics: Mapping[str, float], name: str, form: str) -> str:
    return format(metrics[name], form) if name in metrics else "-"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Draw a curve in one line of text: block characters for the means of ``width`` equal stretches.

    Values that are not finite are skipped.
    """
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * index // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(_BLOCKS[round((mean - low) / span * (len(_BLOCKS) - 1))] for mean in means)


def plain_summary(summary: Mapping[str, Any], title: str) -> list[str]:
    """Format a run's closing summary as lines; missing and None entries are skipped."""
    stopped = summary.get("stopped")
    facts: dict[str, str] = {}
    before, after = summary.get("val_accuracy_before"), summary.get("val_accuracy_after")
    if before is not None and after is not None:
        facts["held-out accuracy"] = f"{before:.3f} -> {after:.3f}  ({after - before:+.3f})"
    elif after is not None:
        facts["held-out accuracy"] = f"{after:.3f}"
    elif before is not None:
        facts["held-out accuracy"] = f"{before:.3f} before training"
    if rewards := summary.get("rewards"):
        facts["reward"] = f"{rewards[0]:.3f} {sparkline(rewards)} {rewards[-1]:.3f}"
    if (steps := summary.get("steps")) is not None:
        seconds = summary.get("train_seconds")
        facts["steps"] = f"{steps} in {duration(seconds)}" if seconds is not None else str(steps)
    if (seconds := summary.get("wall_seconds")) is not None:
        facts["whole run"] = duration(seconds)
    for label, name, form in (
        ("skipped optimizer steps", "skipped_steps", "{} (non-finite loss or gradient)"),
        ("rollout", "rollout_tokens_per_s", "{:,.0f} tokens/s generated"),
        ("update", "update_tokens_per_s", "{:,.0f} tokens/s trained on"),
        ("console output", "refused_output", "{:,} characters refused by a full disk; metrics and logs have the rest"),
        ("policy", "hf_dir", "{}"),
        ("report", "report", "{}"),
    ):
        if summary.get(name) is not None:
            facts[label] = form.format(summary[name])
    state = f"ended early ({stopped})" if stopped else "finished"
    return [f"{title}: {state}", *(f"  {label}: {text}" for label, text in facts.items())]
