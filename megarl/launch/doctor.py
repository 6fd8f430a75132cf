"""``megarl doctor`` on every node of the cluster, before the job starts."""

from __future__ import annotations

import json
from dataclasses import dataclass

from megarl.errors import ResourceError
from megarl.launch.settings import JobToRun


@dataclass(frozen=True)
class Check:
    """What the doctor found, a line per finding that is not in order.

    Attributes:
        failures: what stops a run.
        warnings: what makes it slow or fragile.
        passed: number of findings that are in order.
    """

    failures: tuple[str, ...]
    warnings: tuple[str, ...]
    passed: int


def check_command(python: str, job: JobToRun) -> list[str]:
    """Run on the head; looks at every node of the cluster, and at what is between them."""
    needs = ["--device", job.device, "--devices", str(job.devices)]
    folder = ["--checkpoint-dir", job.checkpoint_dir] if job.checkpoint_dir else []
    return [python, "-m", "megarl.cli", "doctor", "--nodes", "--json", *needs, *folder]


def read_check(code: int, text: str) -> Check:
    """What ``megarl doctor --nodes --json`` printed.

    Raises:
        ResourceError: it is no report; says what it is instead.
    """
    try:
        (line,) = [line for line in text.splitlines() if line.startswith("{")]
        nodes = json.loads(line)["nodes"]
        lines: dict[str, list[str]] = {"fail": [], "warn": [], "pass": []}
        for node in nodes:
            for found in node["checks"]:
                remedy = f" -> {found['remedy']}" if found["remedy"] else ""
                lines[found["status"]].append(f"{node['host']}: {found['check']}: {found['found']}{remedy}")
    except (ValueError, KeyError, TypeError) as error:
        raise ResourceError(f"megarl doctor ended with code {code} and no report ({error}):\n{text.strip()}") from error
    return Check(tuple(lines["fail"]), tuple(lines["warn"]), len(lines["pass"]))
