import io
import os
import re
import shlex
import subprocess
import sys

import pytest
from rich.console import Console as RichConsole

from megarl.tracking import Console
from megarl.tracking.console import ProgressBars

STEP = {"critic/score/mean": 0.5, "timing_s/gen": 1.0, "timing_s/step": 2.0, "perf/total_num_tokens": 100.0}


def make(terminal, width=100, total_steps=60):
    text = io.StringIO()
    output = RichConsole(file=text, width=width, force_terminal=terminal, color_system=None, highlight=False)
    return Console(total_steps, output=output), text


def test_samples_cannot_write_escape_sequences():
    """A response may hold any character; escape sequences would set the terminal's title or rewrite lines above."""
    console, text = make(terminal=True)
    console.samples([{"input": "1+1?", "output": "\x1b]0;owned\x07\x1b[2J\x9b31mtwo é 二", "score": 1.0}], 1)
    assert not {"\x1b", "\x07", "\x9b"} & set(text.getvalue()), text.getvalue()
    assert "two é 二" in text.getvalue()


def test_output_without_terminal_is_plain_lines():
    console, text = make(terminal=False, width=40)
    with console:
        with console.phase("start", announce=True) as phase, console.phase("inner"):
            for ready in range(6):
                phase.update(ready, 5)
        console.log({"val-core/arithmetic/reward/mean@1": 0.25}, 0)
        console.log(STEP, 1)
        console.log({**STEP, "val-core/arithmetic/reward/mean@1": 0.75}, 2)
        console.summary({"val_accuracy_before": 0.25, "val_accuracy_after": 0.75, "report": "/x/" + "long" * 30})
    lines = text.getvalue().splitlines()
    assert lines[:3] == ["start ...", "start 0/5", "start 5/5"], "further lines about progress are seconds apart"
    lines = lines[3:]
    assert lines[0].startswith("✓ start 0.")
    assert lines[1] == "◆ validation step 0  arithmetic/reward/mean@1 0.250"
    assert lines[2] == "step 1/60  reward=0.500  sec=2.00  tok/s=50  [gen 1.00]"
    assert lines[4] == "◆ validation step 2  arithmetic/reward/mean@1 0.750  +0.500"
    assert lines[6] == "  held-out accuracy: 0.250 -> 0.750  (+0.500)"
    assert lines[7] == "  report: /x/" + "long" * 30, "a path must stay whole to be copied"
    assert len(lines) == 8 and "\x1b" not in text.getvalue()


def test_terminal_table_repeats_its_header_rarely():
    console, text = make(terminal=True)
    with console:
        for step in range(1, 54):
            console.log(STEP, step)
        console.log({**STEP, "timing_s/ref": 1.0}, 54)
    lines = text.getvalue().splitlines()
    headers = [index for index, line in enumerate(lines) if " step │" in line]
    assert headers == [1, 27, 53, 57], "every 25 rows, and when a phase appears"
    assert lines[0].startswith("seconds per phase: gen generation")
    assert lines[2].split() == ["1/60", "│", "0.500", "·", "·", "·", "│", "1.00", "│", "2.00", "50"]


@pytest.mark.parametrize("quiet", [False, True])
def test_skipped_optimizer_steps_are_warnings_and_counted_in_the_summary(quiet):
    text = io.StringIO()
    with Console(3, output=RichConsole(file=text, width=200, color_system=None), quiet=quiet) as console:
        console.log({**STEP, "actor/skipped_steps": 0.0}, 1)
        console.log({**STEP, "actor/skipped_steps": 2.0, "critic/skipped_steps": 1.0}, 2)
        console.log({"train/skipped_steps": 4.0}, 3)  # fine-tuning, and a step without a row
        console.summary({"steps": 3})
    shown = text.getvalue()
    assert [line for line in shown.splitlines() if " skipped " in line and line.startswith("step ")] == [
        "step 2: actor skipped 2 optimizer steps because of a non-finite loss or gradient; "
        "2 skipped since the start of this process",
        "step 2: critic skipped 1 optimizer step because of a non-finite loss or gradient; "
        "3 skipped since the start of this process",
        "step 3: train skipped 4 optimizer steps because of a non-finite loss or gradient; "
        "7 skipped since the start of this process",
    ]
    assert "skipped optimizer steps: 7 (non-finite loss or gradient)" in shown


def test_failed_phase_restores_the_terminal():
    console, text = make(terminal=True)
    with pytest.raises(RuntimeError), console, console.phase("gen", announce=True):
        raise RuntimeError
    assert "✗ gen" in text.getvalue()
    assert text.getvalue().count("\x1b[?25l") == text.getvalue().count("\x1b[?25h") == 1, "the cursor is back"
    assert not console.bars._stack


def test_model_output_is_not_interpreted_as_markup():
    console, text = make(terminal=False)
    console.samples([{"input": "[red]what[/nothing]", "output": "a\n  b " + "x" * 300, "score": 0.5}], 3)
    question, answer = text.getvalue().splitlines()
    assert question.endswith("[red]what[/nothing]")
    assert answer.strip().startswith("answer a b xxx") and answer.endswith("…  score 0.5") and len(answer) <= 100
    console.message("[bold]as it is[/bold]")
    assert text.getvalue().endswith("[bold]as it is[/bold]\n")


def test_terminal_shows_a_summary_panel():
    console, text = make(terminal=True)
    with console:
        for step in range(1, 9):
            console.log({"critic/score/mean": step / 8}, step)
        console.summary({"val_accuracy_before": 0.25, "val_accuracy_after": 0.75, "steps": 8, "train_seconds": 75.0})
    panel = text.getvalue()
    assert "0.250 -> 0.750" in panel and "0.125 ▁▂▃▄▅▆▇█ 1.000" in panel and "8 in 1 min 15 s" in panel


def test_quiet_console_prints_warnings_and_summary():
    text = io.StringIO()
    with Console(
        3, output=RichConsole(file=text, force_terminal=True, width=100, color_system=None), quiet=True
    ) as console:
        with console.phase("start", announce=True):
            console.message("a plan")
        console.log({**STEP, "val-core/a/reward/mean@1": 0.5}, 1)
        console.samples([{"input": "q", "output": "a"}], 1)
        console.warn("a tracker fails")
        console.summary({"steps": 3}, "run")
    assert text.getvalue().splitlines() == ["a tracker fails", "run: finished", "  steps: 3"]


def test_printed_lines_are_logged_without_colors(caplog):
    console, _ = make(terminal=True)
    with caplog.at_level("INFO"), console:
        console.log(STEP, 1)
        console.warn("a tracker fails")
        console.summary({"steps": 1}, "run")
    logged = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert logged[0] == ("INFO", "step 1/60  reward=0.500  sec=2.00  tok/s=50  [gen 1.00]")
    assert logged[1:] == [("WARNING", "a tracker fails"), ("INFO", "run: finished\n  steps: 1")]


def test_ascii_terminal_gets_ascii_only():
    class Latin(io.StringIO):
        encoding = "iso-8859-1"

    text = Latin()
    output = RichConsole(file=text, width=90, force_terminal=True, color_system=None)
    with Console(60, output=output) as console:
        with console.phase("start", announce=True):
            console.samples([{"input": "Wie heißt 你好?", "output": "x" * 200, "score": 1}], 1)
        console.log({**STEP, "val-core/a/reward/mean@1": 0.5}, 1)
        console.log(STEP, 2)
        console.summary({"val_accuracy_before": 0.25, "val_accuracy_after": 0.75})
    shown = text.getvalue()
    shown.encode("iso-8859-1")
    assert "done: start" in shown and "heißt \\u4f60\\u597d?" in shown and "* validation step 1" in shown
    assert "0.250 -> 0.750" in shown


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = io.StringIO()
    with Console(60, output=RichConsole(file=text, width=90, force_terminal=True)) as console:
        console.log(STEP, 1)
    assert "\x1b[3" not in text.getvalue() and "\x1b[9" not in text.getvalue()


def test_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    text = io.StringIO()
    output = RichConsole(file=text, width=90, force_terminal=True, color_system=None)
    with Console(60, output=output) as console, console.phase("gen"):
        console.log(STEP, 1)
    assert text.getvalue() == "gen ...\nstep 1/60  reward=0.500  sec=2.00  tok/s=50  [gen 1.00]\n"


def test_table_follows_a_terminal_resize():
    text = io.StringIO()
    output = RichConsole(file=text, width=100, force_terminal=True, color_system=None, highlight=False)
    with Console(60, output=output) as console:
        console.log(STEP, 1)
        output.width = 50
        console.log(STEP, 2)
    assert "gen" in text.getvalue() and max(map(len, text.getvalue().splitlines()[-2:])) <= 50


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def picture(bars):
    text = io.StringIO()
    RichConsole(file=text, width=100).print(bars)
    return text.getvalue()


def test_progress_is_reported_or_estimated_from_last_duration(clock):
    bars = ProgressBars(10, clock)
    first = bars.enter("gen")
    clock.now = 4.0
    assert first.share is None
    bars.leave()
    second = bars.enter("gen")
    clock.now = 7.0
    assert second.share == pytest.approx(0.75) and second.remark == "3.0 of about 4.0 s"
    clock.now = 99.0
    assert second.share == 0.99, "longer than usual is never done"
    second.update(16, 64)
    assert second.share == 0.25 and second.remark == "16/64  95.0 s"
    second.update(0, 0)
    assert second.share == 1.0


def test_time_left_follows_the_pace_of_this_process(clock):
    bars = ProgressBars(30, clock)
    assert bars.seconds_left() is None
    clock.now = 100.0
    bars.finish_step(21)  # resumed: the first row is that of step 21
    assert bars.seconds_left() is None
    clock.now = 106.0
    bars.finish_step(23)
    assert bars.seconds_left() == pytest.approx(21.0)
    assert "step 23/30" in picture(bars) and "21.0 s left, 1 min 46 s gone" in picture(bars)


def test_innermost_phase_is_shown(clock):
    bars = ProgressBars(None, clock)
    assert picture(bars).strip() == ""
    bars.enter("step")
    bars.enter("update_actor")
    assert "update_actor" in picture(bars) and "step" not in picture(bars)
    bars.leave()
    assert "step" in picture(bars)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [200, 110, 80, 60, 40, 20])
def test_bars_fit_every_terminal(clock, width, encoding):
    class Screen(io.StringIO):
        pass

    Screen.encoding = encoding
    bars = ProgressBars(4000, clock)
    bars.finish_step(1)
    clock.now = 600000.0
    bars.finish_step(1234)
    bars.enter("update_actor")
    text = Screen()
    RichConsole(file=text, width=width, force_terminal=True, color_system=None).print(bars)
    run, phase = text.getvalue().splitlines()
    assert len(run) <= min(width, 110) and len(phase) <= min(width, 110)
    text.getvalue().encode("utf-8" if width < 80 else encoding)  # rich's ellipsis
    if width >= 80:
        assert "step 1234/4000" in run and "31 %" in run and "373 h 53 min left, 166 h 40 min gone" in run
        assert "update_actor" in phase


def test_height_is_constant_between_phases(clock):
    bars = ProgressBars(10, clock)
    lines = picture(bars).count("\n")
    bars.enter("gen")
    assert picture(bars).count("\n") == lines


SCRIPT = """
import logging, os, sys, warnings
from pathlib import Path
from megarl.base.logs import driver_log
from megarl.tracking import Console
from megarl.tracking.console import ProgressBars

with driver_log(Path(sys.argv[1]), "INFO") as log, Console(5) as console:
    print("before")
    with console.phase("gen"):
        print("stray", "words")
        print("\\r 10 %\\r100 %", file=sys.stderr)
        logging.getLogger("megarl.x").warning("look out")
        logging.getLogger("megarl.x").info("a detail")
        console.log({"critic/score/mean": 0.5}, 1)
        warnings.warn("old function")
    console.summary({"steps": 1}, "run")
    print("after", end="")
"""


@pytest.mark.parametrize("terminal", [True, False])
def test_each_line_is_printed_once_and_logged_once(tmp_path, terminal):
    """In a subprocess, with a real terminal (``script``) and without."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    if terminal:
        command = ["script", "-qec", shlex.join(command), "/dev/null"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "100", "TERM": "xterm"}
    )
    shown, logged = done.stdout + done.stderr, (tmp_path / "driver.log").read_text(encoding="utf-8")
    assert done.returncode == 0, shown
    for words in ("before", "stray words", "100 %", "WARNING megarl.x: look out", "after"):
        assert shown.count(words) == 1, words
    assert "a detail" not in shown and "old function" not in shown
    for words in ("before", "stray words", "100 %", "look out", "a detail", "old function", "reward=0.500"):
        assert logged.count(words) == 1, words
    assert ("step 1/5  reward=0.500" in shown) != terminal
    stamped = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (INFO |WARNING) ")
    assert all(stamped.match(line) for line in logged.splitlines() if not line.startswith(" ") and line)
