"""The balance file: ``balance.jsonl``, one JSON object per line and step, of what each data-parallel rank had to do.

A line holds ``step`` and lists over the ranks, by ``<role>/<quantity>``: ``tokens`` and ``work`` as they were dealt out
for the role's update (work by the model's FLOPs, over the mean of the ranks), and ``<verb>_s``, the seconds that a rank
was busy in a verb. It is a file of its own since a metric per rank would swamp the metrics.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

BALANCE_FILE = "balance.jsonl"
BALANCE_BYTES = 16 << 20
TOKENS, WORK, SECONDS_SUFFIX = "tokens", "work", "_s"

RankLists = dict[str, list[float]]
BalanceRows = dict[int, RankLists]


def read_balance(path: Path) -> BalanceRows:
    """By step, in order, the lists of a balance file; none where there is no file.

    A last line that a killed process left half written is left out. Of lines of one step the last counts.

    Raises:
        ValueError: a line other than the last is not such a row.
    """
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    rows: BalanceRows = {}
    for number, line in enumerate(lines, start=1):
        try:
            row = dict(json.loads(line))
            step = int(row.pop("step"))
            rows[step] = {name: [float(value) for value in values] for name, values in row.items()}
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: not a row of balance ({error}): {line[:80]!r}") from error
    return dict(sorted(rows.items()))


class BalanceFile:
    """Appends steps to a balance file.

    When the file reaches the limit, every second step is deleted, and from then on fewer steps are kept.

    Args:
        path: the file.
        resumed_step: None for a run that starts anew: an older run's file is moved to ``<name>.old``. A number for a
            run that continues after that step: later steps are dropped, since they will be written again.
        limit_bytes: of the file.
    """

    def __init__(self, path: Path, resumed_step: int | None = None, limit_bytes: int = BALANCE_BYTES) -> None:
        self.path, self.limit_bytes, self.stride = path, limit_bytes, 1
        if resumed_step is None:
            if path.exists():
                os.replace(path, path.with_name(path.name + ".old"))
        elif path.exists():
            self._write({step: lists for step, lists in read_balance(path).items() if step <= resumed_step})

    def add(self, step: int, lists: Mapping[str, Sequence[float]]) -> None:
        """Write a step's lists; once this returns, a killed process does not lose them."""
        if step % self.stride:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(step, lists))
        while self.path.stat().st_size > self.limit_bytes:
            rows = read_balance(self.path)
            if len(rows) < 2:
                return
            self.stride *= 2
            self._write({kept: row for kept, row in rows.items() if kept % self.stride == 0})

    def _write(self, rows: Mapping[int, Mapping[str, Sequence[float]]]) -> None:
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text("".join(_line(step, lists) for step, lists in rows.items()), encoding="utf-8")
        os.replace(partial, self.path)


def _line(step: int, lists: Mapping[str, Sequence[float]]) -> str:
    """Whole numbers as they are, others by four significant digits: more than a colour shows."""
    short = {name: [_short(value) for value in values] for name, values in lists.items()}
    return json.dumps({"step": step, **short}, separators=(",", ":"), allow_nan=False) + "\n"


def _short(value: float) -> float | int:
    return int(value) if float(value).is_integer() else float(f"{value:.4g}")
