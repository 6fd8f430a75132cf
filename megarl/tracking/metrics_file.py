"""The metrics file: ``metrics.jsonl``, one JSON object per line and step, each flushed when written.

A line holds ``step`` and the metrics. JSON has no NaN and no infinity: they are written as the strings ``"NaN"``,
``"Infinity"`` and ``"-Infinity"``, and read back as the numbers they are.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

MetricsRow = dict[str, float]
FILE_NAME = "metrics.jsonl"


def _to_json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _line(step: int, metrics: Mapping[str, float]) -> str:
    row = {"step": step, **{name: _to_json(float(value)) for name, value in metrics.items()}}
    return json.dumps(row, allow_nan=False) + "\n"


def read_metrics(path: Path | str) -> list[MetricsRow]:
    """Rows of a metrics file in the order of their steps; ``row["step"]`` is the step.

    A last line that a killed process left half written is left out. Lines of one step are merged, later ones winning.
    A file that is not there has no rows.

    Raises:
        ValueError: a line other than the last is not a row.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows: dict[int, MetricsRow] = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = {name: float(value) for name, value in json.loads(line).items()}
            rows.setdefault(int(row["step"]), {}).update(row)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: not a row of metrics ({error}): {line[:80]!r}") from error
    return [rows[step] for step in sorted(rows)]


class MetricsFile:
    """Appends rows to a metrics file.

    Args:
        path: the file; its folder is made.
        resumed_step: None for a run that starts anew: rows of an older run are moved to ``<name>.old``. A number for a
            run that continues after that step: rows of later steps, which the interrupted run logged after its last
            checkpoint, are dropped, since they will be logged again.
    """

    def __init__(self, path: Path | str, resumed_step: int | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if resumed_step is not None:
            self._keep_until(resumed_step)
        elif self.path.exists():
            os.replace(self.path, self.path.with_name(self.path.name + ".old"))
        self._file = self.path.open("a", encoding="utf-8")

    def _keep_until(self, step: int) -> None:
        kept = [row for row in read_metrics(self.path) if row["step"] <= step]
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text("".join(_line(int(row.pop("step")), row) for row in kept), encoding="utf-8")
        os.replace(partial, self.path)

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one row; once this returns, a killed process does not lose it."""
        self._file.write(_line(step, metrics))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
