"""``megarl report``: write the HTML report of a run, or the comparison of several, from their folders."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megarl.base.commands import exit_code
from megarl.base.errors import ConfigError
from megarl.base.formatting import gigabytes
from megarl.ops.report.page import write_page
from megarl.ops.report.run_files import find_runs, read_run
from megarl.tracking.jsonl_files import REPORT_FILE

COMPARISON_FILE = "comparison.html"


def report_run(folder: Path | str, output: Path | str | None = None) -> Path:
    """Write the report of one run, by default as ``report.html`` in its folder; returns its path."""
    run = read_run(Path(folder))
    return write_page(Path(output) if output else run.folder / REPORT_FILE, [run], run.name)


def compare_runs(folders: Sequence[Path | str], output: Path | str | None = None) -> Path:
    """Write one page that compares the runs in or below folders; a single run gets its report.

    The page is ``comparison.html`` in the first folder unless ``output`` names another.

    Raises:
        NoRunError: a folder does not exist, or contains no run.
    """
    paths = [Path(folder) for folder in folders]
    runs = [read_run(folder) for folder in find_runs(paths)]
    if len(runs) == 1:
        return report_run(runs[0].folder, output)
    names = list(dict.fromkeys(run.name for run in runs))
    title = f"{len(runs)} runs of {names[0]}" if len(names) == 1 else f"{len(runs)} runs"
    return write_page(Path(output) if output else paths[0] / COMPARISON_FILE, runs, title)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns 0, or 2 if there is no run to report or the page cannot be written."""
    options = _parser().parse_args(argv)

    def report() -> int:
        path = compare_runs(options.folder, options.output)
        print(f"{path} ({gigabytes(path.stat().st_size)})")
        return 0

    return exit_code(report, bad_input=(ConfigError, OSError, ValueError))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megarl report",
        description="Write one HTML page of a run, finished or not, or a comparison of several. It opens offline.",
    )
    parser.add_argument(
        "folder", nargs="+", type=Path, help="folder of a run, or of an experiment or sweep with runs below it"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        help="path of the page; default: report.html, or comparison.html, in the first folder",
    )
    return parser
