"""Results of acceptance stages: one row per check, written to a JSON file after each check."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from megarl.base.atomic_write import atomic_write_text
from megarl.base.errors import DataError
from megarl.base.formatting import count_noun, duration, table_lines
from megarl.base.json_text import parse_json


class Verdict(StrEnum):
    """Outcome of a check; only ``FAIL`` makes the command fail."""

    OK = "ok"
    FAIL = "FAIL"
    BELOW = "below"  # correct, but slower or larger than its target
    MISSING = "missing"  # a package or file is absent
    INFO = "info"  # no target, or nothing to measure on this device


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    check: str  # name, unique within its stage
    outcome: Verdict  # see `Verdict`
    value: float | None = None  # measured number; None without one
    unit: str = ""
    target: str = ""  # expected value or limit, in words
    note: str = ""  # further numbers, or the error

    @property
    def number(self) -> str:
        """The value with its unit, with three significant digits."""
        if self.value is None:
            return ""
        digits = f"{self.value:,.0f}" if abs(self.value) >= 1000 else f"{self.value:.3g}"
        return f"{digits} {self.unit}".rstrip()


@dataclass(frozen=True)
class StageReport:
    """Results of a stage."""

    stage: str
    scale: str  # full or tiny
    results: tuple[Result, ...] = ()  # in the order of their checks
    facts: Mapping[str, Any] = field(default_factory=dict)  # date, device and versions
    seconds: float = 0.0  # duration of the last run
    is_complete: bool = False  # whether the stage reached its end
    left_out: int = 0  # checks that --checks left for a later run

    @property
    def needs_run(self) -> bool:
        """Whether another run can add or change a result."""
        unsettled = self.count(Verdict.FAIL) + self.count(Verdict.MISSING)
        return not self.is_complete or bool(self.left_out or unsettled)

    def with_result(self, result: Result) -> StageReport:
        """Add a result; a result of the same check is replaced."""
        others = tuple(each for each in self.results if each.check != result.check)
        return replace(self, results=(*others, result))

    def count(self, outcome: Verdict) -> int:
        """Count the results with an outcome."""
        return sum(result.outcome is outcome for result in self.results)

    def write(self, folder: Path) -> None:
        """Write ``<stage>.json``."""
        values = asdict(self) | {"results": [asdict(result) for result in self.results]}
        atomic_write_text(folder / f"{self.stage}.json", json.dumps(values, indent=1) + "\n")


def read_report(folder: Path, stage: str, scale: str) -> StageReport:
    """Read the report of an earlier run; an empty one if there is none at this scale.

    Raises:
        DataError: the file is no report.
    """
    file = folder / f"{stage}.json"
    if not file.is_file():
        return StageReport(stage, scale)
    try:
        values = parse_json(file.read_text(encoding="utf-8"))
        results = tuple(Result(**{**row, "outcome": Verdict(row["outcome"])}) for row in values.pop("results"))
        report = StageReport(**values, results=results)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{file} is not a report of an acceptance stage: {error}; remove it", code="acceptance.not-a-report"
        ) from error
    return report if report.scale == scale else StageReport(stage, scale)


def result_lines(report: StageReport, *, without: frozenset[Verdict] = frozenset()) -> list[str]:
    """Format a report as lines of a text table, failures first, ``without`` some outcomes, which are counted."""
    results = sorted(
        (r for r in report.results if r.outcome not in without), key=lambda r: r.outcome is not Verdict.FAIL
    )
    rows = [(r.outcome.value, r.check, r.number, r.target, r.note) for r in results]
    ending = "" if report.is_complete else ", not finished"
    ending += f", {report.left_out} left out" if report.left_out else ""
    return [f"== {report.stage}: {count_verdicts([report])}, {duration(report.seconds)}{ending}", *table_lines(rows)]


def count_verdicts(reports: Iterable[StageReport]) -> str:
    """Count the outcomes: ``12 checks: 11 ok, 1 missing``."""
    results = [result for report in reports for result in report.results]
    counts = [(sum(result.outcome is outcome for result in results), outcome.value) for outcome in Verdict]
    text = ", ".join(f"{number} {word}" for number, word in counts if number)
    return f"{count_noun(len(results), 'check')}: {text}" if results else "no check"


def markdown(reports: Iterable[StageReport]) -> str:
    """Format reports as a page with one table per stage, for ``docs/gpu_results.md``."""
    lines: list[str] = []
    for report in reports:
        facts = ", ".join(f"{name} {value}" for name, value in report.facts.items())
        lines += [f"### {report.stage}", "", f"{facts}; {count_verdicts([report])}; {duration(report.seconds)}", ""]
        lines += ["| check | outcome | value | target | note |", "|---|---|---|---|---|"]
        for row in report.results:
            cells = (row.check, row.outcome.value, row.number, row.target, row.note)
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)
