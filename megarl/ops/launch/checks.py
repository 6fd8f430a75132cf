"""Checks of a started cluster: all nodes joined with their devices, and ``megarl doctor`` on every node.

As a program (``python -m megarl.ops.launch.checks``) it runs on the head and waits for the nodes.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass

from megarl.base.errors import MegarlError, ResourceError
from megarl.base.json_text import parse_json
from megarl.ops.doctor.node.results import NodeReport, Status
from megarl.ops.launch.settings import JobToRun


@dataclass(frozen=True)
class DoctorSummary:
    """Results of ``megarl doctor --nodes``, one line per result that did not pass."""

    failures: tuple[str, ...]  # results that stop a run
    warnings: tuple[str, ...]  # results that make it slow or fragile
    passed: int  # number of passed checks


def doctor_command(python: str, job: JobToRun) -> list[str]:
    """Return the doctor's command line; it runs on the head and checks every node and the network between them."""
    needs = ["--device", job.device, "--devices", str(job.devices)]
    folder = ["--checkpoint-dir", job.checkpoint_dir] if job.checkpoint_dir else []
    return [python, "-m", "megarl.cli", "doctor", "--nodes", "--json", *needs, *folder]


def parse_doctor_output(code: int, text: str) -> DoctorSummary:
    """Parse the output of ``megarl doctor --nodes --json``.

    Raises:
        ResourceError: the output is not a report; the message contains it.
    """
    try:
        (line,) = [line for line in text.splitlines() if line.startswith("{")]
        reports = [NodeReport.from_json(node) for node in parse_json(line)["nodes"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ResourceError(
            f"megarl doctor ended with code {code} and no report ({error}):\n{text.strip()}",
            code="launch.no-doctor-report",
        ) from error
    lines: dict[Status, list[str]] = {status: [] for status in Status}
    for report in reports:
        for result in report.results:
            remedy = f" -> {result.remedy}" if result.remedy else ""
            lines[result.status].append(f"{report.host}: {result.check}: {result.observation}{remedy}")
    return DoctorSummary(tuple(lines[Status.FAIL]), tuple(lines[Status.WARN]), len(lines[Status.PASS]))


def nodes_command(python: str, hosts: tuple[str, ...], job: JobToRun, timeout_s: float) -> list[str]:
    """Return the command line of :func:`main`, which runs on the head; no hosts: any ``job.nodes`` nodes."""
    needs = ["--nodes", str(job.nodes), "--device", job.device, "--devices", str(job.devices)]
    needs += ["--timeout-s", f"{timeout_s:.0f}"]
    return [python, "-m", "megarl.ops.launch.checks", *hosts, *needs]


def main() -> int:
    """Wait until all nodes have joined; print their addresses as JSON, or the problem with exit code 1."""
    from megarl.cluster.resources import wait_for_any_nodes, wait_for_nodes
    from megarl.cluster.session import RaySession  # imports Ray

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), required=True)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--timeout-s", type=float, required=True)
    options = parser.parse_args()
    try:
        needs = options.device, options.devices, options.timeout_s
        with RaySession():
            wait = wait_for_nodes(options.names, *needs) if options.names else wait_for_any_nodes(options.nodes, *needs)
            print(json.dumps(wait))
    except MegarlError as error:
        print(error.text, file=sys.stderr)  # the launcher adds its code
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
