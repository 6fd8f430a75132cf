"""Command line of ``megarl doctor --accept``: stages in processes, within a time limit each or a budget for all."""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.base.atomic_write import atomic_write_text
from megarl.base.child_process import kill_process_tree
from megarl.base.commands import EXIT_FAILED, exit_code
from megarl.base.errors import ConfigError
from megarl.ops.acceptance.results import (
    Result,
    StageReport,
    Verdict,
    count_verdicts,
    markdown,
    read_report,
    result_lines,
)
from megarl.ops.acceptance.stages import STAGES

STAGE_LIMIT_S = 480.0
CLOSING_S = 5.0  # seconds of a budget for the table
LEAST_S = 10.0  # a stage does not start with less: its imports take as long
UNFINISHED = "process of the stage"  # check of a stage whose process crashed or reached the limit


def main(argv: Sequence[str]) -> int:
    """Run the stages that have not passed, and print a table of all; returns the exit code."""
    started = time.monotonic()
    options = _parser().parse_args(argv)
    return exit_code(lambda: _main(options, started), interrupted="interrupted; the same command continues")


def _main(options: argparse.Namespace, started: float) -> int:
    reports = run_stages(_stages(options.stages), options, started)
    for report in reports:  # rows that failed or have a time; comparisons that passed are counted only
        compares = STAGES[report.stage].module == STAGES["parity"].module
        lines = result_lines(report, without=frozenset({Verdict.OK}) if compares else frozenset())
        print("\n".join(["", *lines]))
    print(f"\n{count_verdicts(reports)}; all rows, as tables for a page: {options.out / 'results.md'}")
    failed = any(report.count(Verdict.FAIL) or not report.is_complete for report in reports)
    return EXIT_FAILED if failed else 0


def run_stages(names: Sequence[str], options: argparse.Namespace, started: float) -> list[StageReport]:
    """Run stages: first those that measure no times, side by side, then the others, one at a time.

    A stage whose checks are all settled is not repeated unless ``--again``. The budget counts from ``started``, on the
    monotonic clock.

    Raises:
        ConfigError: ``--device cuda`` without a GPU, or an invalid ``--checks``.
    """
    from megarl.ops.acceptance.bench import choose_device  # imports torch

    try:
        re.compile(options.checks or "")
    except re.error as error:
        raise ConfigError(
            f"--checks {options.checks}: not a regular expression: {error}", code="acceptance.checks-pattern"
        ) from error
    device = choose_device(options.device)
    scale = options.scale or ("full" if device == "cuda" else "tiny")
    options.out.mkdir(parents=True, exist_ok=True)
    reports = {n: StageReport(n, scale) if options.again else read_report(options.out, n, scale) for n in names}
    deadline = None if options.budget is None else started + options.budget - CLOSING_S
    waiting = [name for name in names if reports[name].needs_run]
    while waiting:
        group = [name for name in waiting if not STAGES[name].is_timed] or waiting[:1]
        left = None if deadline is None else deadline - time.monotonic()
        limit = _limit(group, waiting, options.limit, left)
        waiting = [name for name in waiting if name not in group]
        if left is not None and limit < LEAST_S:
            print(f"== {', '.join(group)}: no time left in the budget", file=sys.stderr, flush=True)
            continue
        for name in group:
            reports[name].write(options.out)
        for report in _run(group, scale, device, options, limit):
            reports[report.stage] = report
        found = [read_report(options.out, name, size) for name in STAGES for size in ("full", "tiny")]
        atomic_write_text(options.out / "results.md", markdown(report for report in found if report.results))
    return list(reports.values())


def _limit(group: Sequence[str], waiting: Sequence[str], limit: float, left: float | None) -> float:
    """Seconds for the first stages of those that wait: their estimate, or more if more is left than all estimates."""
    if left is None:
        return limit
    own = max(STAGES[name].seconds for name in group)
    later = sum(STAGES[name].seconds for name in waiting if name not in group)
    return min(limit, left, own * max(1.0, left / (own + later)))


@dataclass
class _StageRun:
    """A stage in a process; a crash or the time limit is a failed check of its report."""

    name: str
    scale: str
    device: str
    options: argparse.Namespace

    def __post_init__(self) -> None:
        options, self.log = self.options, self.options.out / f"{self.name}.log"
        about = f"{STAGES[self.name].doc} ({self.scale} on {self.device}; log: {self.log})"
        print(f"== {self.name}: {about}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "megarl.ops.acceptance.stages", self.name, "--folder", str(options.out)]
        command += ["--scale", self.scale, "--device", self.device]
        command += [] if options.checks is None else ["--checks", options.checks]
        self.started = time.monotonic()
        with self.log.open("w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(command, stderr=errors)

    def finish(self, limit: float) -> StageReport:
        """Wait for the process until ``limit`` seconds after its start; returns its report."""
        try:
            status = self.process.wait(max(0.0, self.started + limit - time.monotonic()))
            ending = f"its process ended with {status} before its last check"
        except subprocess.TimeoutExpired:
            ending = f"ended after the limit of {limit:.0f} s; the same command continues"
            kill_process_tree(self.process)
        report = read_report(self.options.out, self.name, self.scale)
        if report.is_complete:
            report = replace(report, results=tuple(each for each in report.results if each.check != UNFINISHED))
        else:
            output = self.log.read_text(encoding="utf-8", errors="replace").strip() or "no output"
            note = f"{ending}; {output.splitlines()[-1][:300]}"
            report = replace(report, seconds=time.monotonic() - self.started)
            report = report.with_result(Result(UNFINISHED, Verdict.FAIL, note=note))
        report.write(self.options.out)
        return report


def _run(
    names: Sequence[str], scale: str, device: str, options: argparse.Namespace, limit: float
) -> Iterator[StageReport]:
    """Run stages side by side; all have ended afterwards, also if the wait is interrupted."""
    with contextlib.ExitStack() as ending:
        runs = []
        for name in names:
            runs.append(_StageRun(name, scale, device, options))
            ending.callback(kill_process_tree, runs[-1].process)
        for run in runs:
            yield run.finish(limit)


def _stages(text: str | None) -> list[str]:
    names = list(STAGES) if text is None else text.split(",")
    if unknown := [name for name in names if name not in STAGES]:
        raise ConfigError(
            f"--stages {text}: no stage {unknown[0]!r}; known: {', '.join(STAGES)}", code="acceptance.unknown-stage"
        )
    return names


def _parser() -> argparse.ArgumentParser:
    stages = "; ".join(f"{name}: {stage.doc}" for name, stage in STAGES.items())
    parser = argparse.ArgumentParser(
        prog="megarl doctor --accept",
        description="Run megarl's parts on this machine's GPU and compare with transformers and with `megarl plan`. "
        f"A second run continues where the first ended. Stages: {stages}.",
    )
    parser.add_argument("--stages", help="names separated by commas; default: all")
    parser.add_argument("--checks", metavar="REGEX", help="run the checks whose name matches; the others remain to do")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="end in time; the most valuable stages run first"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="folder of reports and logs (gpu_check)")
    parser.add_argument("--scale", choices=("tiny", "full"), help="sizes; default: full on a GPU, tiny on a CPU")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--again", action="store_true", help="repeat checks that passed")
    parser.add_argument("--limit", type=float, default=STAGE_LIMIT_S, help=f"seconds of a stage ({STAGE_LIMIT_S:.0f})")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
