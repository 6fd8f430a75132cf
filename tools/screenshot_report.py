"""Take the pictures of docs/how_to/report.md: ``python tools/screenshot_report.py RUN SWEEP [--out docs/images]``.

Needs a browser of the Chromium family; see ``tools/headless_browser.py``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headless_browser import Browser, BrowserError, find_browser

from megarl.ops.report import compare_runs, report_run

READY = "document.documentElement.dataset.ready === 'charts'"
TOP_OF = "(section) => section.scrollIntoView({behavior: 'instant'})"
WIDTH, HEIGHT = 1280, 860
MAX_BYTES = 300_000


def main(argv: Sequence[str] | None = None) -> int:
    """Take all pictures; return the exit code."""
    options = _options(argv)
    try:
        program = find_browser()
        if program is None:
            raise BrowserError("no browser: install chromium on PATH, or set BROWSER")
        options.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder, Browser(program, WIDTH, HEIGHT) as browser:
            browser.open(report_run(options.run, Path(folder) / "report.html"), READY)
            _report(browser, options.out)
            browser.open(compare_runs([options.sweep], Path(folder) / "comparison.html"), READY)
            _comparison(browser, options.out)
    except (BrowserError, ValueError, OSError) as error:
        print(f"screenshot_report: {error}", file=sys.stderr)
        return 2
    pictures = sorted(options.out.glob("report_*.png"))
    for picture in pictures:
        print(f"{picture} ({picture.stat().st_size / 1e3:.0f} kB)")
    return int(any(picture.stat().st_size > MAX_BYTES for picture in pictures))


def _report(browser: Browser, out: Path) -> None:
    """Take overview and curves in light colors, responses and phases in dark colors."""
    browser.resize(WIDTH, 1180)
    wait_for_charts(browser)
    browser.picture(out / "report_overview.png")
    browser.resize(WIDTH, HEIGHT)
    browser.prefer("dark")
    browser.choose("#kind", "train")
    browser.choose("#high", "0.5")
    browser.wait(
        "document.querySelectorAll('#rows > tr').length > 1 && rowView.rows.every((row) => rollouts.score[row] <= 0.5)"
    )
    browser.click("#rows > tr:nth-child(1 of :not(.group-row)) td:nth-child(4)")
    browser.click("#rows > tr:nth-child(3 of :not(.group-row)) td:nth-child(4)")
    browser.on("#rollouts", TOP_OF)
    wait_for_charts(browser)
    browser.hover(".answer .token:nth-child(2)")
    browser.on("#rollouts", TOP_OF)
    browser.hover(".answer .token:nth-child(1)")
    wait_for_charts(browser)
    browser.picture(out / "report_answers.png")
    browser.on("#findings", "() => [...document.querySelectorAll('.group')][2].scrollIntoView({behavior: 'instant'})")
    wait_for_charts(browser)
    browser.picture(out / "report_time.png")
    browser.prefer("light")


def _comparison(browser: Browser, out: Path) -> None:
    browser.resize(WIDTH, 1180)
    wait_for_charts(browser)
    browser.picture(out / "report_comparison.png")


def wait_for_charts(browser: Browser) -> None:
    """Wait until every chart near the window is drawn and fits it."""
    fits = "plot.querySelector('svg') && plot.querySelector('svg').clientWidth <= plot.clientWidth"
    near = "(plot) => plot.getBoundingClientRect().bottom > 0 && plot.getBoundingClientRect().top < innerHeight"
    browser.wait(f"[...document.querySelectorAll('.plot')].filter({near}).every((plot) => {fits})")
    browser.evaluate("new Promise((done) => setTimeout(done, 600))")


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("sweep", type=Path, help="a folder of several runs")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder of the pictures")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
