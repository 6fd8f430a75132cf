"""JSON-lines files of a run: ``metrics.jsonl`` (metrics by step) and ``balance.jsonl`` (load by data-parallel rank).

A line of the metrics file holds ``step`` and the metrics. JSON has no NaN and no infinity: they are written as the
strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, and read back as numbers.

A line of the balance file holds ``step`` and lists over the ranks, by ``<role>/<quantity>``: ``tokens`` and ``work`` of
the role's update (work = model FLOPs relative to the mean of the ranks), and ``<verb>_s``, the busy seconds of a rank
in a verb. ``delay_s/<host>`` has one number: the seconds in which the others waited for a slow host. It is a separate
file because one metric per rank would swamp the metrics.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megarl.base.json_text import format_json, parse_json
from megarl.base.run_writer import RUN_WRITER

MetricsRow = dict[str, float]
METRICS_FILE, REPORT_FILE = "metrics.jsonl", "report.html"
VALIDATION_PREFIX = "val-core/"
"""Beginning of the metrics that measure a validation; verl's name."""
SKIPPED_STEPS_SUFFIX = "/skipped_steps"
"""End of the metrics that count skipped optimizer steps, after the role."""

BALANCE_FILE = "balance.jsonl"
BALANCE_BYTES = 16 << 20
TOKENS, WORK, SECONDS_SUFFIX, DELAY_PREFIX = "tokens", "work", "_s", "delay_s/"
RankLists = dict[str, list[float]]
BalanceRows = dict[int, RankLists]

_Row = TypeVar("_Row")


def read_metrics(path: Path | str) -> list[MetricsRow]:
    """Read a metrics file, ordered by step; ``row["step"]`` is the step.

    Lines of one step are merged; later values win. A truncated last line, left by a killed process, is skipped. A
    missing file has no rows.

    Raises:
        ValueError: a line other than the last is not a row.
    """
    rows: dict[int, MetricsRow] = {}
    for row in _read_rows(Path(path), "metrics", _metrics_row):
        rows.setdefault(int(row["step"]), {}).update(row)
    return [rows[step] for step in sorted(rows)]


def _metrics_row(values: Any) -> MetricsRow:
    row = {name: float(value) for name, value in values.items()}
    int(row["step"])
    return row


def _metrics_line(step: int, metrics: Mapping[str, float]) -> str:
    return format_json({"step": step, **{name: float(value) for name, value in metrics.items()}}) + "\n"


class MetricsFile:
    """Appends rows to a metrics file.

    Args:
        resumed_step: None for a new run: an existing file is renamed to ``<name>.old``. The step of the checkpoint for
            a resumed run: rows of later steps, which will be logged again, are dropped.
    """

    def __init__(self, path: Path | str, resumed_step: int | None = None) -> None:
        self.path = Path(path)
        RUN_WRITER.forget(self.path)
        if resumed_step is not None:
            kept = [row for row in read_metrics(self.path) if row["step"] <= resumed_step]
            RUN_WRITER.replace(self.path, "".join(_metrics_line(int(row.pop("step")), row) for row in kept))
        else:
            _set_aside(self.path)
            RUN_WRITER.append(self.path, "")

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one row: a kill after the call does not lose it, unless the disk is full."""
        RUN_WRITER.append(self.path, _metrics_line(step, metrics))


def read_balance(path: Path) -> BalanceRows:
    """Read a balance file: lists over the ranks by step, ordered; empty if the file is missing.

    The last line of a step counts. A truncated last line, left by a killed process, is skipped.

    Raises:
        ValueError: a line other than the last is not a row.
    """
    return dict(sorted(_read_rows(path, "balance", _balance_row)))


def _balance_row(values: Any) -> tuple[int, RankLists]:
    row = dict(values)
    step = int(row.pop("step"))
    return step, {name: [float(value) for value in ranks] for name, ranks in row.items()}


def _balance_line(step: int, lists: Mapping[str, Sequence[float]]) -> str:
    """Format a row; fractions get four significant digits, enough for the report's colors."""
    short = {name: [_short(value) for value in values] for name, values in lists.items()}
    return json.dumps({"step": step, **short}, separators=(",", ":"), allow_nan=False) + "\n"


def _short(value: float) -> float | int:
    return int(value) if float(value).is_integer() else float(f"{value:.4g}")


class BalanceFile:
    """Appends steps to a balance file of limited size.

    When the file reaches the limit, every second step is deleted, and from then on only every second step is written.

    Args:
        resumed_step: None for a new run: an existing file is renamed to ``<name>.old``. The step of the checkpoint for
            a resumed run: later steps, which will be written again, are dropped.
    """

    def __init__(self, path: Path, resumed_step: int | None = None, limit_bytes: int = BALANCE_BYTES) -> None:
        self.path, self.limit_bytes, self.stride = path, limit_bytes, 1
        RUN_WRITER.forget(path)
        if resumed_step is None:
            _set_aside(path)
        elif path.exists():
            self._write({step: lists for step, lists in read_balance(path).items() if step <= resumed_step})

    def add(self, step: int, lists: Mapping[str, Sequence[float]]) -> None:
        """Write a step's lists: a kill after the call does not lose them, unless the disk is full."""
        if step % self.stride:
            return
        RUN_WRITER.append(self.path, _balance_line(step, lists))
        while not RUN_WRITER.is_waiting(self.path) and self.path.stat().st_size > self.limit_bytes:
            rows = read_balance(self.path)
            if len(rows) < 2:
                return
            self.stride *= 2
            self._write({kept: row for kept, row in rows.items() if kept % self.stride == 0})

    def _write(self, rows: Mapping[int, Mapping[str, Sequence[float]]]) -> None:
        RUN_WRITER.replace(self.path, "".join(_balance_line(step, lists) for step, lists in rows.items()))


def _read_rows(path: Path, kind: str, parse: Callable[[Any], _Row]) -> list[_Row]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows: list[_Row] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(parse(parse_json(line)))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: not a row of {kind} ({error}): {line[:80]!r}") from error
    return rows


def _set_aside(path: Path) -> None:
    if path.exists():
        path.replace(path.with_name(path.name + ".old"))
