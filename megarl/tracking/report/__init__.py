"""The report of a run, or of several that are compared: one self-contained HTML page.

It is made of nothing but the runs' folders, so it can be made again at any time: while a run goes on, after it was
killed, on another machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.tracking.report.page import write_page
from megarl.tracking.report.run_files import NoRunError, find_runs, read_run
from megarl.tracking.report.sample_files import SampleFiles, begin_samples

__all__ = ["REPORT_FILE", "NoRunError", "SampleFiles", "begin_samples", "compare_runs", "report_run"]

REPORT_FILE, COMPARISON_FILE = "report.html", "comparison.html"


def report_run(folder: Path | str, output: Path | str | None = None) -> Path:
    """Write the report of one run.

    Args:
        folder: the run's, with its ``metrics.jsonl``.
        output: the HTML file; None = ``report.html`` in the run's folder.

    Returns:
        The path of the page.
    """
    run = read_run(Path(folder))
    return write_page(Path(output) if output else run.folder / REPORT_FILE, [run], run.name)


def compare_runs(folders: Sequence[Path | str], output: Path | str | None = None) -> Path:
    """Write one page that compares runs, or the report of the only one there is.

    Args:
        folders: of runs, or of sweeps and experiments, which stand for all runs below them.
        output: the HTML file; None = ``comparison.html`` in the first folder.

    Returns:
        The path of the page.

    Raises:
        NoRunError: a folder does not exist, or there is no run in it.
    """
    paths = [Path(folder) for folder in folders]
    runs = [read_run(folder) for folder in find_runs(paths)]
    if len(runs) == 1:
        return report_run(runs[0].folder, output)
    names = list(dict.fromkeys(run.name for run in runs))
    title = f"{len(runs)} runs of {names[0]}" if len(names) == 1 else f"{len(runs)} runs"
    return write_page(Path(output) if output else paths[0] / COMPARISON_FILE, runs, title)
