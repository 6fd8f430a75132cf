"""Run the commands of the tutorials and draw their pictures: ``python tools/draw_tutorials.py [PAGE ...]``.

Runs the shell blocks of ``docs/tutorials/PAGE.md`` in order, as a reader would, and draws each picture of the page that
is in ``docs/images/tutorials`` from the block above it. A block that is marked as not run runs only if its terminal is
drawn. ``PICTURES`` says what a picture shows: the terminal, curves of the newest run, or a part of its report.

Needs the quickstart's results, except for the page ``quickstart``, and a browser of the Chromium family
(``tools/headless_browser.py``).
"""

from __future__ import annotations

import argparse
import codecs
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from fcntl import ioctl
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from headless_browser import Browser, BrowserError, find_browser
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text
from screenshot_report import READY, TOP_OF, wait_for_charts

from megarl.tracking import read_metrics

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from support.doc_pages import NOT_RUN, Block, blocks  # noqa: E402 -- the parser of the pages belongs to the tests

PAGES, IMAGES = ROOT / "docs" / "tutorials", ROOT / "docs" / "images" / "tutorials"
MAX_BYTES = 150_000
COLUMNS, LINES = 110, 40
CURVE_WIDTH, CURVE_HEIGHT = 720, 340
REPORT_WIDTH = 1280
_IMAGE = re.compile(r"^!\[[^\]]*\]\(\.\./images/tutorials/([\w.]+)\)$")
_WEB_FONT = re.compile(r"@font-face \{.*?\}", re.S)  # documentation pages load nothing from the network
_SEQUENCE = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>78]|\r\n|\n|\r)")


class Terminal(NamedTuple):
    """The last lines of the block's output, or the screen when it first matched ``at``."""

    last: int = LINES
    at: str = ""
    hidden: str = ""
    """Lines that match are left out."""


class Curves(NamedTuple):
    """Metrics of the newest run of an experiment, by their titles."""

    experiment: str
    metrics: dict[str, str]


class Report(NamedTuple):
    """A part of the report of an experiment's newest run."""

    experiment: str
    height: int
    show: Callable[[Browser], None]


def overview(browser: Browser) -> None:
    """Show the top of the page."""


def first_answers(browser: Browser) -> None:
    """Show the answers to the prompts of the first step."""
    browser.choose("#kind", "train")
    browser.choose("#last-step", "1")
    browser.wait("rowView.rows.length > 1 && rowView.rows.every((row) => rollouts.step[row] === 1)")
    browser.on("#rollouts", TOP_OF)


def conversation(browser: Browser) -> None:
    """Open a right answer of the training, with the tokens that are not trained on."""
    browser.choose("#kind", "train")
    browser.choose("#low", "1")
    browser.choose("#color", "mask")
    browser.wait("rowView.rows.length > 1 && rowView.rows.every((row) => rollouts.score[row] >= 1)")
    browser.click("#rows > tr:nth-child(1 of :not(.group-row)) td:nth-child(4)")
    browser.on("#rollouts", TOP_OF)


BATCHES = r"Batches|actor log-probs|^ +layout|^ +(epochs|mini-batches|optimizer steps|prompts|samples|tokens) per"
REWARD, HELD_OUT = "critic/score/mean", "val-core/{}/reward/mean@1"
PICTURES: dict[str, Terminal | Curves | Report] = {
    "quickstart_live.svg": Terminal(24, r"step 24/40 .*\n.*update_actor"),
    "quickstart_end.svg": Terminal(20, hidden="Loading weights"),
    "quickstart_curves.svg": Curves("quickstart", {"reward": REWARD, "held out": HELD_OUT.format("arithmetic")}),
    "quickstart_report.png": Report("quickstart", 860, overview),
    "my_reward_data.svg": Terminal(),
    "my_reward_end.svg": Terminal(18),
    "my_reward_curves.svg": Curves("mine", {"score": REWARD, "exact": "reward_extra/exact/mean"}),
    "my_reward_report.png": Report("mine", 860, first_answers),
    "my_reward_ask.svg": Terminal(hidden="Loading weights"),
    "search_agent_end.svg": Terminal(24),
    "search_agent_curves.svg": Curves(
        "search_agent",
        {"reward": REWARD, "searches": "env/number_of_valid_search", "held out": HELD_OUT.format("facts")},
    ),
    "search_agent_report.png": Report("search_agent", 860, conversation),
    "stalled_run_report.svg": Terminal(12),
    "stalled_run_stacks.svg": Terminal(),
    "stalled_run_repaired.svg": Terminal(22),
    "grpo_8b_plan.svg": Terminal(60, hidden=BATCHES),
    "grpo_8b_dry_run.svg": Terminal(60, hidden=BATCHES),
    "from_verl_diff.svg": Terminal(),
    "from_verl_start.svg": Terminal(16, r"\u2713 read data"),
    "from_verl_curves.svg": Curves("from_verl", {"reward": REWARD, "held out": HELD_OUT.format("arithmetic")}),
    "from_trl_end.svg": Terminal(18),
    "from_trl_curves.svg": Curves(
        "from_trl", {"reward": REWARD, "groups with equal scores": "critic/score/zero_variance_fraction"}
    ),
}  # fmt: skip
"""Pictures by the name of their file."""


class Screen:
    """Lines of a terminal, for output that only moves up and rewrites whole lines, as rich does."""

    def __init__(self) -> None:
        self.lines, self._row, self._returned, self._rest = [""], 0, False, ""

    def feed(self, text: str) -> None:
        """Write output; an escape sequence may continue in the next call."""
        text = self._rest + text
        cut = text.rfind("\x1b", max(0, len(text) - 12))
        incomplete = cut >= 0 and not _SEQUENCE.match(text, cut)
        self._rest = text[cut:] if incomplete else ""
        for part in _SEQUENCE.split(text[:cut] if incomplete else text):
            self._write(part)

    def _write(self, part: str) -> None:
        if part in ("\n", "\r\n"):
            self._row, self._returned = self._row + 1, False
            self.lines += [""] * (self._row + 1 - len(self.lines))
        elif part == "\r":
            self._returned = True
        elif part.startswith("\x1b"):
            self._control(part)
        elif part:
            self._clear_if_returned()
            self.lines[self._row] += part

    def _control(self, part: str) -> None:
        kind, number = part[-1], part[2:-1]
        if kind == "A":
            self._row = max(0, self._row - int(number or 1))
        elif kind == "K":
            self.lines[self._row] = ""
        elif kind == "J":
            del self.lines[self._row + 1 :]
        elif kind == "m":
            self._clear_if_returned()
            self.lines[self._row] += part

    def _clear_if_returned(self) -> None:
        if self._returned:
            self.lines[self._row], self._returned = "", False

    @property
    def shown(self) -> list[str]:
        """Lines without the empty ones at the end."""
        end = max(
            (number for number, line in enumerate(self.lines, 1) if Text.from_ansi(line).plain.strip()), default=0
        )
        return self.lines[:end]


class Session:
    """Runs blocks on a terminal.

    Attributes:
        screen: output of the last block.
        seen: lines when the output first matched, by pattern.
    """

    def __init__(self) -> None:
        self.screen, self.seen = Screen(), dict[str, list[str]]()

    def run(self, code: str, patterns: Sequence[str]) -> None:
        """Run a block and show its output here too."""
        self.screen, self.seen = Screen(), {}
        start = time.monotonic()
        reader, writer = pty.openpty()
        ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(LINES)}
        command = ["bash", "-uo", "pipefail", "-c", code]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=writer, stdout=writer, stderr=writer, start_new_session=True
        )
        os.close(writer)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end within a character
        while True:
            try:
                output = decoder.decode(os.read(reader, 65536))
            except OSError:  # the last process has closed the terminal
                break
            sys.stdout.write(output)
            self.screen.feed(output)
            text = "\n".join(Text.from_ansi(line).plain for line in self.screen.lines[-LINES:]) if patterns else ""
            for pattern in patterns:
                if pattern not in self.seen and re.search(pattern, text):
                    self.seen[pattern] = self.screen.shown
        os.close(reader)
        print(f"== exit status {process.wait()} after {time.monotonic() - start:.0f} s", flush=True)


def draw_terminal(session: Session, what: Terminal, code: str, target: Path) -> None:
    """Draw the block's commands and lines of its output.

    Raises:
        BrowserError: the output never matched.
    """
    if what.at and what.at not in session.seen:
        raise BrowserError(f"{target.name}: the output never matched {what.at}")
    lines = session.seen[what.at] if what.at else session.screen.shown
    console = Console(file=io.StringIO(), record=True, width=COLUMNS, force_terminal=True, highlight=False)
    for line in typed(code):
        console.print(Text(line, style="bold bright_green"))
    hidden = len(lines) > what.last
    for line in lines[-what.last :]:
        text = Text.from_ansi(for_readers(line))
        if what.hidden and re.search(what.hidden, text.plain):
            hidden = True
            continue
        if hidden:
            console.print("...", style="dim")
        hidden = False
        console.print(text)
    picture = console.export_svg(title="megarl", theme=MONOKAI, unique_id=target.stem)
    fonts = _WEB_FONT.sub("", picture).replace("Fira Code", "Fira Code, DejaVu Sans Mono, Menlo")
    target.write_text(fonts, encoding="utf-8")


def typed(code: str) -> Iterator[str]:
    """Yield the commands of a block behind a prompt, without the text of files."""
    end, continued = "", False
    for line in code.strip().splitlines():
        if end:
            end = "" if line == end else end
            continue
        yield line if continued else f"$ {line}"
        continued = line.endswith("\\")
        if opening := re.search(r"<<'(\w+)'", line):
            end = opening[1]
            yield "  ..."


def for_readers(line: str) -> str:
    """Replace the path of this checkout; a frame at the end of the line stays in its column."""
    short = line.replace(f"({ROOT.name}/", "(").replace(str(ROOT), "~/megarl")
    missing = len(line) - len(short)
    return re.sub(r"(~/megarl\S*)", rf"\1{' ' * missing}", short) if missing and "\u2502" in line else short


def draw_curves(browser: Browser, what: Curves, target: Path) -> None:
    """Draw metrics against the step; the page in the browser has Plotly."""
    rows = read_metrics(newest_run(what.experiment) / "metrics.jsonl")
    traces = []
    for title, metric in what.metrics.items():
        points = [(row["step"], row[metric]) for row in rows if metric in row]
        traces.append(
            {"x": [x for x, _ in points], "y": [y for _, y in points], "name": title, "mode": "lines+markers"}
        )
    layout = {
        "xaxis": {"title": {"text": "step"}, "gridcolor": "#ddd"},
        "yaxis": {"gridcolor": "#ddd", "rangemode": "tozero"},
        "margin": {"l": 50, "r": 20, "t": 30, "b": 45},
        "legend": {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 1, "xanchor": "right"},
        "font": {"family": "system-ui, sans-serif"},
        "colorway": ["#3b6fb6", "#d98324", "#2a9d8f"],
    }
    size = {"format": "svg", "width": CURVE_WIDTH, "height": CURVE_HEIGHT}
    address = browser.evaluate(f"Plotly.toImage({json.dumps({'data': traces, 'layout': layout})}, {json.dumps(size)})")
    target.write_text(unquote(address.partition(",")[2]), encoding="utf-8")


def newest_run(experiment: str) -> Path:
    """Return the folder of an experiment's newest run.

    Raises:
        BrowserError: there is none.
    """
    runs = sorted((ROOT / "outputs" / experiment).glob("*/report.html"), key=lambda file: file.stat().st_mtime)
    if not runs:
        raise BrowserError(f"outputs/{experiment} has no run with a report")
    return runs[-1].parent


def draw(browser: Browser, session: Session, block: Block, name: str) -> None:
    """Draw one picture after its block has run."""
    what, target = PICTURES[name], IMAGES / name
    if isinstance(what, Terminal):
        draw_terminal(session, what, block.code, target)
        return
    browser.resize(REPORT_WIDTH, what.height if isinstance(what, Report) else 900)
    browser.open(newest_run(what.experiment) / "report.html", READY)
    if isinstance(what, Curves):
        draw_curves(browser, what, target)
        return
    what.show(browser)
    wait_for_charts(browser)
    browser.picture(target)


def draw_page(browser: Browser, page: Path) -> None:
    """Run the blocks of a page down to its last picture, and draw the pictures, in order."""
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    pictures = [(number, match[1]) for number, line in lines if (match := _IMAGE.match(line))]
    found = [block for block in blocks(page) if block.language == "bash" and block.line < pictures[-1][0]]
    session = Session()
    for number, block in enumerate(found):
        end = found[number + 1].line if number + 1 < len(found) else sys.maxsize
        names = [name for line, name in pictures if block.line < line < end]
        shown = [what for name in names if isinstance(what := PICTURES[name], Terminal)]
        if shown or not block.mark.startswith(NOT_RUN):
            print(f"== {block.name}", flush=True)
            session.run(block.code, [what.at for what in shown if what.at])
        for name in names:
            draw(browser, session, block, name)
            size = (IMAGES / name).stat().st_size
            print(f"{IMAGES / name} ({size / 1e3:.0f} kB)", flush=True)
            if size > MAX_BYTES:
                raise BrowserError(f"{name} has {size:,} bytes, at most {MAX_BYTES:,} are allowed")


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the pictures of the named tutorials, by default all; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="name of a page without .md")
    options = parser.parse_args(argv)
    names = options.pages or ["quickstart", *sorted(p.stem for p in PAGES.glob("*.md") if p.stem != "quickstart")]
    try:
        program = find_browser()
        if program is None:
            raise BrowserError("no browser: install chromium on PATH, or set BROWSER")
        IMAGES.mkdir(parents=True, exist_ok=True)
        with Browser(program, REPORT_WIDTH, 900) as browser:
            for name in names:
                draw_page(browser, PAGES / f"{name}.md")
    except (BrowserError, ValueError, OSError) as error:
        print(f"draw_tutorials: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
