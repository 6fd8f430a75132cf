"""``megarl report``: the HTML report of a run, or the comparison of several, out of their folders."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.tracking.report import NoRunError, compare_runs


def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code: 0, or 2 where there is no run to report or the page cannot be written."""
    options = _parser().parse_args(argv)
    try:
        path = compare_runs(options.folder, options.output)
    except (NoRunError, OSError, ValueError) as error:
        print(f"megarl report: {error}", file=sys.stderr)
        return 2
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megarl report",
        description="One HTML page of a run, finished or not, or one that compares several. It opens offline.",
    )
    parser.add_argument(
        "folder", nargs="+", type=Path, help="a run's folder, or one with runs below it: an experiment's, a sweep's"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        help="the page; report.html, or comparison.html, in the first folder by default",
    )
    return parser
