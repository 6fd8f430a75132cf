import io

import pytest
from rich.console import Console as RichConsole

from megarl.tracking import Console

STEP = {"critic/score/mean": 0.5, "timing_s/gen": 1.0, "timing_s/step": 2.0, "perf/total_num_tokens": 100.0}


def make(terminal, width=100, total_steps=60):
    text = io.StringIO()
    output = RichConsole(file=text, width=width, force_terminal=terminal, color_system=None, highlight=False)
    return Console(total_steps, output=output), text


def test_a_log_file_gets_plain_self_contained_lines():
    console, text = make(terminal=False, width=40)
    with console:
        with console.phase("start", announce=True), console.phase("inner"):
            pass
        console.log({"val-core/arithmetic/reward/mean@1": 0.25}, 0)
        console.log(STEP, 1)
        console.log({**STEP, "val-core/arithmetic/reward/mean@1": 0.75}, 2)
        console.summary({"val_accuracy_before": 0.25, "val_accuracy_after": 0.75, "report": "/x/" + "long" * 30})
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("✓ start 0.")
    assert lines[1] == "◆ validation step 0  arithmetic/reward/mean@1 0.250"
    assert lines[2] == "step 1/60  reward=0.500  sec=2.00  tok/s=50  [gen 1.00]"
    assert lines[4] == "◆ validation step 2  arithmetic/reward/mean@1 0.750  +0.500"
    assert lines[6] == "  held-out accuracy: 0.250 -> 0.750  (+0.500)"
    assert lines[7] == "  report: /x/" + "long" * 30, "a path must stay whole to be copied"
    assert len(lines) == 8 and "\x1b" not in text.getvalue()


def test_a_terminal_gets_a_table_with_a_rare_header():
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


def test_the_terminal_is_given_back_when_a_phase_fails():
    console, text = make(terminal=True)
    with pytest.raises(RuntimeError), console, console.phase("gen", announce=True):
        raise RuntimeError
    assert "✗ gen" in text.getvalue()
    assert text.getvalue().count("\x1b[?25l") == text.getvalue().count("\x1b[?25h") == 1, "the cursor is back"
    assert not console.status._stack


def test_what_a_model_writes_is_not_markup():
    console, text = make(terminal=False)
    console.samples([{"input": "[red]what[/nothing]", "output": "a\n  b " + "x" * 300, "score": 0.5}], 3)
    question, answer = text.getvalue().splitlines()
    assert question.endswith("[red]what[/nothing]")
    assert answer.strip().startswith("answer a b xxx") and answer.endswith("…  score 0.5") and len(answer) <= 100
    console.message("[bold]as it is[/bold]")
    assert text.getvalue().endswith("[bold]as it is[/bold]\n")


def test_closing_panel_on_a_terminal():
    console, text = make(terminal=True)
    with console:
        for step in range(1, 9):
            console.log({"critic/score/mean": step / 8}, step)
        console.summary({"val_accuracy_before": 0.25, "val_accuracy_after": 0.75, "steps": 8, "train_seconds": 75.0})
    panel = text.getvalue()
    assert "0.250 → 0.750" in panel and "▁▂▃▄▅▆▇█" in panel and "8 in 1 min 15 s" in panel
