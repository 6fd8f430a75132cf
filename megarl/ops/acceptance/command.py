"""Command line of ``megarl doctor --accept``: stages one after the other, each in a process with a time limit."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from megarl.base.atomic_write import atomic_write_text
from megarl.base.child_process import kill_process_tree
from megarl.base.errors import ConfigError, MegarlError
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
UNFINISHED = "process of the stage"
"""Check of a stage whose process crashed or reached the limit."""
EXIT_FAILED, EXIT_BAD_COMMAND, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str]) -> int:
    """Run the stages that have not passed, and print a table of all.

    Args:
        argv: arguments after ``--accept``.

    Returns:
        The exit code: 0, 1 if a check failed or a stage did not finish, 2 for a wrong command line, 130 after Ctrl-C.
    """
    options = _parser().parse_args(argv)
    try:
        reports = run_stages(_stages(options.stages), options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_COMMAND
    except MegarlError as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return EXIT_INTERRUPTED
    if options.json:
        print(json.dumps([asdict(report) for report in reports]))
    else:
        print("\n".join(line for report in reports for line in ["", *result_lines(report)]))
        print(f"\n{count_verdicts(reports)}; tables for a page: {options.out / 'results.md'}")
    failed = any(report.count(Verdict.FAIL) or not report.is_complete for report in reports)
    return EXIT_FAILED if failed else 0


def run_stages(names: Sequence[str], options: argparse.Namespace) -> list[StageReport]:
    """Run stages; stages without a failed or missing check are not repeated unless ``--again``.

    Raises:
        ConfigError: ``--device cuda`` without a GPU.
    """
    from megarl.ops.acceptance.bench import choose_device  # imports torch

    device = choose_device(options.device)
    scale = options.scale or ("full" if device == "cuda" else "tiny")
    options.out.mkdir(parents=True, exist_ok=True)
    reports = []
    for name in names:
        report = StageReport(name, scale) if options.again else read_report(options.out, name, scale)
        if not report.is_complete or report.count(Verdict.FAIL) or report.count(Verdict.MISSING):
            report.write(options.out)
            report = _run(name, scale, device, options)
        reports.append(report)
        atomic_write_text(options.out / "results.md", markdown(reports))
    return reports


def _run(name: str, scale: str, device: str, options: argparse.Namespace) -> StageReport:
    """Run a stage in a process; a crash or the time limit is a failed check of its report."""
    log = options.out / f"{name}.log"
    print(f"== {name}: {STAGES[name].doc} ({scale} on {device}; log: {log})", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "megarl.ops.acceptance.stages", name, "--folder", str(options.out)]
    started = time.monotonic()
    with open(log, "w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [*command, "--scale", scale, "--device", device], stdout=2 if options.json else None, stderr=errors
        )
        try:
            ending = _ending(process.wait(options.limit))
        except subprocess.TimeoutExpired:
            ending = f"ended after the limit of {options.limit:.0f} s; the same command continues"
        finally:
            kill_process_tree(process)
    report = read_report(options.out, name, scale)
    if report.is_complete:
        report = report.without(UNFINISHED)
        report.write(options.out)
        return report
    report = replace(report, seconds=time.monotonic() - started)
    report = report.with_result(Result(UNFINISHED, Verdict.FAIL, note=f"{ending}; {_last_line(log)}"))
    report.write(options.out)
    return report


def _ending(status: int) -> str:
    return f"its process ended with {status} before its last check"


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def _stages(text: str | None) -> list[str]:
    names = list(STAGES) if text is None else text.split(",")
    if unknown := [name for name in names if name not in STAGES]:
        raise ConfigError(f"--stages {text}: no stage {unknown[0]!r}; known: {', '.join(STAGES)}")
    return names


def _parser() -> argparse.ArgumentParser:
    stages = "; ".join(f"{name}: {stage.doc}" for name, stage in STAGES.items())
    parser = argparse.ArgumentParser(
        prog="megarl doctor --accept",
        description="Run megarl's parts on this machine's GPU and compare with transformers and with `megarl plan`. "
        f"A second run continues where the first ended. Stages: {stages}.",
    )
    parser.add_argument("--stages", help="names separated by commas; default: all")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="folder of reports and logs (gpu_check)")
    parser.add_argument("--scale", choices=("tiny", "full"), help="sizes; default: full on a GPU, tiny on a CPU")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--again", action="store_true", help="repeat checks that passed")
    parser.add_argument("--limit", type=float, default=STAGE_LIMIT_S, help=f"seconds of a stage ({STAGE_LIMIT_S:.0f})")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
