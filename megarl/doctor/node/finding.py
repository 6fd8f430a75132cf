"""What a check found, and all that was found on one machine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """How bad it is: ``fail`` stops a run, ``warn`` makes it slow or fragile."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        check: its name.
        status: how bad that is.
        found: in words, with units.
        remedy: what to do; empty where nothing needs doing.
    """

    check: str
    status: Status
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class NodeReport:
    """All that was found on one machine.

    Attributes:
        host: its name.
        findings: in the order of the table.
        facts: versions and hardware by name, compared between machines.
    """

    host: str
    findings: list[Finding]
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return all(finding.status is not Status.FAIL for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Plain values, as ``megarl doctor --json`` prints them."""
        checks = [{**asdict(finding), "status": finding.status.value} for finding in self.findings]
        return {"host": self.host, "ok": self.ok, "checks": checks, "facts": dict(self.facts)}

    @staticmethod
    def from_json(text: str | bytes | Mapping[str, Any]) -> NodeReport:
        """The report that ``to_json`` was made from.

        Raises:
            ValueError: the text is no such report.
        """
        try:
            values = text if isinstance(text, Mapping) else json.loads(text)
            findings = [Finding(**{**check, "status": Status(check["status"])}) for check in values["checks"]]
            return NodeReport(values["host"], findings, values["facts"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a report of `megarl doctor --json`: {error}") from error


def table(reports: Iterable[NodeReport]) -> str:
    """Reports as plain text: a line per finding, its remedy below it, and a count at the end."""
    lines: list[str] = []
    everything: list[Finding] = []
    for report in reports:
        lines.append(f"== {report.host}")
        width = max((len(finding.check) for finding in report.findings), default=0)
        for finding in report.findings:
            lines.append(f"{finding.status.value:<5} {finding.check:<{width}}  {finding.found}")
            if finding.remedy:
                lines.append(f"{'':<5} {'':<{width}}  -> {finding.remedy}")
        everything += report.findings
    counts = [(sum(finding.status is status for finding in everything), status.value) for status in Status]
    return "\n".join([*lines, ", ".join(f"{count} {word}" for count, word in counts)])
