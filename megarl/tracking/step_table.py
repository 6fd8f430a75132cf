"""The row that a step gets on the console: which metrics it shows, and how wide.

Nothing here prints. A table is as wide as its columns need, at most the width it is given: phases that did not happen
have no column, and where the terminal is too narrow the phases give way altogether.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

Metrics = Mapping[str, float]


def number_cell(value: float, width: int) -> str:
    """A number with about four significant digits, as many as ``width`` holds; scientific where it is tiny or huge."""
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
    """Seconds as ``0.05``, ``9.87``, ``65.4``, ``654``, from 1000 on in minutes, then in hours."""
    if value >= 1000:
        return f"{value / 60:.0f}m" if value / 60 < 999.5 else f"{value / 3600:.0f}h"
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def length_cell(value: float, width: int = 5) -> str:
    """A number of tokens as ``7.3``, ``512.0``, ``12345``, ``131k``."""
    return rate_cell(value) if value >= 99999.5 else f"{value:.{1 if value < 999.95 else 0}f}"


def rate_cell(value: float, width: int = 5) -> str:
    """A number as ``987``, ``9.8k``, ``123k``, ``1.2M``, ``4.5G``."""
    power = next((power for power in range(3) if value < 1000 ** (power + 1)), 3)
    unit, scaled = ("", "k", "M", "G")[power], value / 1000**power
    return f"{scaled:.{1 if unit and scaled < 99.95 else 0}f}{unit}"


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        header: what stands above it.
        read: its value from a step's metrics, None where there is none.
        width: characters of the cell.
        show: value and width to cell.
        style: rich style of the cell.
        is_spare: whether it gives way first where there is no room for all figures.
        phase: what the phase does, where the column is a phase's seconds; it is shown only where the phase happened.
    """

    header: str
    read: Callable[[Metrics], float | None]
    width: int
    show: Callable[[float, int], str] = number_cell
    style: str = ""
    phase: str = ""
    is_spare: bool = False


def first_of(*names: str) -> Callable[[Metrics], float | None]:
    """A reader of the first of these metrics that a step has."""
    return lambda metrics: next((metrics[name] for name in names if name in metrics), None)


def tokens_per_second(metrics: Metrics) -> float | None:
    """All tokens of the step per second of the step, all devices together."""
    tokens, seconds = metrics.get("perf/total_num_tokens"), metrics.get("timing_s/step")
    return tokens / seconds if tokens is not None and seconds else metrics.get("perf/throughput")


def _phase(header: str, name: str, meaning: str) -> Column:
    return Column(header, first_of(f"timing_s/{name}"), 4, seconds_cell, "dim", phase=meaning)


_TOTALS = (
    Column("sec", first_of("timing_s/step"), 4, seconds_cell),
    Column("tok/s", tokens_per_second, 5, rate_cell),
)
RL_COLUMNS = (
    Column("reward", first_of("critic/score/mean"), 6, style="bold green"),
    Column("KL", first_of("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl"), 6, style="magenta"),
    Column("entropy", first_of("actor/entropy"), 7, style="cyan", is_spare=True),
    Column("len", first_of("response_length/mean"), 5, length_cell, is_spare=True),
    _phase("gen", "gen", "generation"),
    _phase("rew", "reward", "reward"),
    _phase("old", "old_log_prob", "old log-probs"),
    _phase("ref", "ref", "reference"),
    _phase("repr", "repr_align", "alignment"),
    _phase("val", "values", "values"),
    _phase("adv", "adv", "advantages"),
    _phase("crit", "update_critic", "critic update"),
    _phase("act", "update_actor", "actor update"),
    _phase("sync", "update_weights", "weight sync"),
    *_TOTALS,
)
SFT_COLUMNS = (
    Column("loss", first_of("train/loss"), 7, style="bold green"),
    Column("accuracy", first_of("train/accuracy"), 8, style="cyan"),
    Column("grad norm", first_of("train/grad_norm"), 9, is_spare=True),
    Column("lr", first_of("train/lr"), 7, style="dim", is_spare=True),
    *_TOTALS,
)
PAIR_COLUMNS = (
    *SFT_COLUMNS[:2],
    Column("margin", first_of("train/margin"), 7, style="magenta"),
    *SFT_COLUMNS[2:4],
    Column("val acc", first_of("val/accuracy"), 7, style="bold cyan"),
    *_TOTALS,
)


class StepTable:
    """Lays out header and rows.

    Args:
        columns: what to show besides the step.
        width: characters that a line may have.
        total_steps: steps of the run, None where they are not known.
        is_ascii: whether the output has no other characters.
    """

    def __init__(
        self, columns: Sequence[Column], width: int, total_steps: int | None = None, is_ascii: bool = False
    ) -> None:
        self.columns = tuple(columns)
        self.width = width
        self.total_steps = total_steps
        self.rule, self.nothing, self.dot = ("|", "-", "/") if is_ascii else ("│", "·", "·")
        self.shown: tuple[Column, ...] = tuple(column for column in columns if not column.phase)

    @property
    def _step_width(self) -> int:
        return max(4, 2 * len(str(self.total_steps)) + 1 if self.total_steps else 6)

    def fit(self, metrics: Metrics) -> bool:
        """Choose the columns for a step; True where they changed, so that a header is due.

        A phase that happened once keeps its column.
        """
        wanted = tuple(
            column
            for column in self.columns
            if not column.phase or column in self.shown or column.read(metrics) is not None
        )
        if self._line_width(wanted) > self.width:
            wanted = tuple(column for column in wanted if not column.phase)
        changed, self.shown = wanted != self.shown, wanted
        return changed

    def _line_width(self, columns: Sequence[Column]) -> int:
        return len(self._line(" " * self._step_width, [(" " * column.width, "") for column in columns], columns).plain)

    def _line(self, step: str, cells: Sequence[tuple[str, str]], columns: Sequence[Column], style: str = "") -> Text:
        line = Text()
        line.append(step.rjust(self._step_width), style=style or "bold")
        was_phase: bool | None = None
        for (cell, cell_style), column in zip(cells, columns, strict=True):
            line.append(f" {self.rule} " if bool(column.phase) != was_phase else " ", style="dim")
            line.append(cell.rjust(column.width), style=style or cell_style)
            was_phase = bool(column.phase)
        return line

    def legend(self) -> Text:
        """What the phases' headers stand for, in one line; empty where no phase is shown."""
        names = f" {self.dot} ".join(f"{column.header} {column.phase}" for column in self.shown if column.phase)
        return Text(f"seconds per phase: {names}" if names else "", style="dim")

    def header(self) -> Text:
        """The line above the rows; phases are in seconds."""
        return self._line("step", [(column.header, "") for column in self.shown], self.shown, style="bold blue")

    def row(self, step: int, metrics: Metrics) -> Text:
        """The line of one step; the slowest phase stands out."""
        name = f"{step}/{self.total_steps}" if self.total_steps else str(step)
        values = [column.read(metrics) for column in self.shown]
        slowest = max((v for v, column in zip(values, self.shown, strict=True) if column.phase and v), default=None)
        cells = [
            (self.nothing, "dim") if value is None
            else (column.show(value, column.width), "yellow" if column.phase and value == slowest else column.style)
            for value, column in zip(values, self.shown, strict=True)
        ]  # fmt: skip
        return self._line(name, cells, self.shown)

    def plain_row(self, step: int, metrics: Metrics) -> str:
        """The same as one self-contained line of ``name=value`` for logs, phases as ``name 0.12s``."""
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
