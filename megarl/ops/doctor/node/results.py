"""Results of the doctor's checks: one machine's report, and the comparison of several machines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from megarl.base.formatting import count_noun, table_lines
from megarl.base.json_text import parse_json

MUST_AGREE = ("python", "torch", "megatron-core", "ray", "transformers", "sglang", "NCCL", "driver", "CUDA", "GPUs")
"""Facts that must be the same on all nodes: Ray refuses another version of itself or of Python, NCCL hangs."""

CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 30.0


class Status(StrEnum):
    """Severity of a result: ``fail`` stops a run, ``warn`` makes it slow or fragile."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class CheckResult:
    """Result of one check."""

    check: str
    status: Status
    observation: str  # the observation in words, with units
    remedy: str = ""  # the action to take; empty if none is needed


def judged(check: str, observation: str, remedy: str, *, warn: bool = False, fail: bool = False) -> CheckResult:
    """Return the result of a check that failed, warns, or passed and needs no remedy."""
    status = Status.FAIL if fail else Status.WARN if warn else Status.PASS
    return CheckResult(check, status, observation, remedy if warn or fail else "")


@dataclass(frozen=True)
class NodeReport:
    """Results of all checks on one machine."""

    host: str  # name of the machine
    results: list[CheckResult]  # in the order of the table
    facts: Mapping[str, str] = field(default_factory=dict)  # versions and hardware by name, compared between machines
    gpus: int = 0  # number of GPUs

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(result.status is not Status.FAIL for result in self.results)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as ``megarl doctor --json`` prints them."""
        checks = [{**asdict(result), "status": result.status.value} for result in self.results]
        return {"host": self.host, "ok": self.ok, "checks": checks, "facts": dict(self.facts), "gpus": self.gpus}

    @staticmethod
    def from_json(text: str | bytes | Mapping[str, Any]) -> NodeReport:
        """Rebuild a report from the output of :meth:`to_json`.

        Raises:
            ValueError: the text is not such a report.
        """
        try:
            values = text if isinstance(text, Mapping) else parse_json(text)
            results = [CheckResult(**{**check, "status": Status(check["status"])}) for check in values["checks"]]
            return NodeReport(values["host"], results, values["facts"], values["gpus"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a report of `megarl doctor --json`: {error}") from error


def reports_table(reports: Iterable[NodeReport]) -> str:
    """Format reports as plain text: a line per result, its remedy below, and the counts at the end."""
    lines: list[str] = []
    results: list[CheckResult] = []
    for report in reports:
        lines.append(f"== {report.host}")
        rows = []
        for result in report.results:
            rows.append((f"{result.status.value:<5} {result.check}", result.observation))
            if result.remedy:
                rows.append(("", f"-> {result.remedy}"))
        lines += table_lines(rows)
        results += report.results
    counts = [(sum(result.status is status for result in results), status.value) for status in Status]
    return "\n".join([*lines, ", ".join(f"{count} {word}" for count, word in counts)])


class ClockOffset(NamedTuple):
    """Offset of a machine's clock from the local clock, with its error bound, in seconds."""

    ahead: float  # seconds that the machine's clock is ahead
    error: float  # bound of the measurement error


def clock_offset(sent: float, remote: float, received: float) -> ClockOffset:
    """Estimate the offset of a remote clock from one request: its time minus the middle of the round trip."""
    return ClockOffset(remote - (sent + received) / 2, (received - sent) / 2)


def compare_clocks(offsets: Mapping[str, ClockOffset]) -> CheckResult:
    """Check that the clocks of all machines agree; offsets are by host, relative to the same clock."""
    low, high = (pick(offsets, key=lambda host: offsets[host].ahead) for pick in (min, max))
    difference = offsets[high].ahead - offsets[low].ahead
    error = offsets[high].error + offsets[low].error
    certain = max(difference - error, 0.0)
    if certain < CLOCK_WARN_S:
        text = f"at most {difference * 1e3:.1f} ms apart (± {error * 1e3:.1f} ms)"
        return CheckResult("clocks", Status.PASS, text)
    remedy = "synchronise them: chronyd or systemd-timesyncd on every node; timelines and checkpoints' times go wrong"
    status = Status.FAIL if certain >= CLOCK_FAIL_S else Status.WARN
    return CheckResult("clocks", status, f"{high} is ahead of {low} by {difference:.1f} s", remedy)


def compare_facts(reports: Sequence[NodeReport]) -> list[CheckResult]:
    """Report each version or hardware fact that differs between machines; a single passed result if none does."""
    results = []
    for fact in dict.fromkeys(name for report in reports for name in report.facts):
        hosts: dict[str, list[str]] = defaultdict(list)
        for report in reports:
            hosts[report.facts.get(fact, "none")].append(report.host)
        if len(hosts) > 1:
            more = {value: f" and {len(names) - 3} more" if len(names) > 3 else "" for value, names in hosts.items()}
            text = "; ".join(f"{value} on {', '.join(hosts[value][:3])}{more[value]}" for value in sorted(hosts))
            status = Status.FAIL if fact in MUST_AGREE else Status.WARN
            results.append(CheckResult(fact, status, text, f"give all nodes the same {fact}"))
    text = f"{count_noun(len(reports), 'node')} have the same versions and hardware"
    return results or [CheckResult("same everywhere", Status.PASS, text)]
