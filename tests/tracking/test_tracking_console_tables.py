"""The step table, the validation table and the closing summary."""

import io
import math

import pytest
from rich.console import Console as RichConsole

from megarl.tracking import validation_table
from megarl.tracking.console_tables import (
    RL_COLUMNS,
    SFT_COLUMNS,
    StepTable,
    length_cell,
    number_cell,
    plain_summary,
    rate_cell,
    seconds_cell,
    sparkline,
)

PHASES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights")


def metrics_of(**changes):
    metrics = {f"timing_s/{name}": 0.5 + index for index, name in enumerate(PHASES)}
    metrics |= {
        "timing_s/step": 40.0, "critic/score/mean": 0.8125, "actor/reward_kl_penalty": 0.0123, "actor/entropy": 1.25,
        "response_length/mean": 6.75, "perf/total_num_tokens": 40000.0,
    }  # fmt: skip
    return metrics | changes


@pytest.mark.parametrize(
    ("value", "width", "cell"),
    [
        (0.8125, 6, "0.812"), (0.0123, 6, "0.0123"), (-0.0123, 6, "-0.012"), (1.0, 6, "1.000"), (0.0, 6, "0.000"),
        (0.0007, 6, "7.0e-4"), (-0.0007, 6, "-7e-4"), (3.2e-11, 7, "3.2e-11"), (12.3456, 6, "12.346"),
        (-1.25, 6, "-1.250"), (12345.6, 6, "12346"), (1.5e9, 6, "1.5e9"), (math.nan, 6, "nan"), (-math.inf, 6, "-inf"),
    ],
)  # fmt: skip
def test_number_cell(value, width, cell):
    if value == 0.0:
        assert float(number_cell(value, width)) == 0.0
    else:
        assert number_cell(value, width) == cell
    assert len(number_cell(value, width)) <= width


@pytest.mark.parametrize("exponent", range(-12, 13))
@pytest.mark.parametrize("sign", [1, -1])
def test_number_cells_fit_and_round(exponent, sign):
    value = sign * 3.456789 * 10.0**exponent
    cell = number_cell(value, 7)
    assert len(cell) <= 7 and float(cell) == pytest.approx(value, rel=0.16)


def test_seconds_rate_and_length_cells():
    assert [seconds_cell(value) for value in (0.0, 0.054, 9.994, 9.996, 65.44, 99.96, 654.0, 1200.0)] == [
        "0.00", "0.05", "9.99", "10.0", "65.4", "100", "654", "20m",
    ]  # fmt: skip
    assert [seconds_cell(value) for value in (59969.0, 59971.0, 86400.0)] == ["999m", "17h", "24h"]
    assert [rate_cell(value) for value in (0.0, 987.0, 9800.0, 123456.0, 999960.0, 1.23e6, 4.5e9)] == [
        "0", "987", "9.8k", "123k", "1000k", "1.2M", "4.5G",
    ]  # fmt: skip
    assert [length_cell(value) for value in (6.75, 512.0, 12345.6, 131072.0)] == ["6.8", "512.0", "12346", "131k"]


def test_full_row_fits_100_characters_and_aligns_with_header():
    table = StepTable(RL_COLUMNS, 100, total_steps=9999)
    assert table.fit(metrics_of())
    header, row = table.header().plain, table.row(9999, metrics_of()).plain
    assert len(header) == len(row) <= 100
    bars = [index for index, character in enumerate(header) if character == "│"]
    assert len(bars) == 3 and all(row[index] == "│" for index in bars)
    assert header.split("│")[2].split() == ["gen", "rew", "old", "ref", "val", "adv", "crit", "act", "sync"]
    assert row.split("│")[1].split() == ["0.812", "0.0123", "1.250", "6.8"]
    assert row.split("│")[2].split() == ["0.50", "1.50", "2.50", "3.50", "4.50", "5.50", "6.50", "7.50", "8.50"]
    assert row.split("│")[3].split() == ["40.0", "1.0k"]


def test_phase_columns_appear_with_their_phase():
    table = StepTable(RL_COLUMNS, 100)
    without_critic = {
        name: v for name, v in metrics_of().items() if name not in ("timing_s/values", "timing_s/update_critic")
    }
    assert table.fit(without_critic) and "crit" not in table.header().plain
    assert not table.fit(without_critic)
    assert table.fit(metrics_of()) and "crit" in table.header().plain
    assert not table.fit(without_critic), "a phase that happened keeps its column"
    assert "·" in table.row(3, without_critic).plain
    assert "critic update" in table.legend().plain


def test_narrow_terminal_has_no_phase_columns():
    table = StepTable(RL_COLUMNS, 70)
    table.fit(metrics_of())
    assert table.header().plain.split("│")[1].split() == ["reward", "KL", "entropy", "len", "sec", "tok/s"]
    assert table.legend().plain == ""


def test_plain_row_is_self_contained():
    line = StepTable(RL_COLUMNS, 80, total_steps=60).plain_row(3, metrics_of())
    assert line.startswith(
        "step 3/60  reward=0.812  KL=0.0123  entropy=1.250  len=6.8  sec=40.0  tok/s=1.0k  [gen 0.50, "
    )
    assert "\n" not in line


def test_supervised_columns():
    table = StepTable(SFT_COLUMNS, 100)
    metrics = {"train/loss": 1.5, "train/lr": 1e-4, "timing_s/step": 2.0, "perf/total_num_tokens": 100.0}
    assert table.plain_row(2, metrics) == "step 2  loss=1.500  lr=1.0e-4  sec=2.00  tok/s=50"


def rows_of(metrics, samples):
    text = io.StringIO()
    RichConsole(file=text, width=100, color_system=None).print(validation_table(metrics, samples))
    return [line.split() for line in text.getvalue().splitlines() if line.strip() and "─" not in line]


def test_validation_table_has_a_row_per_data_source():
    metrics = {
        "val-core/a/b/acc/mean@4": 0.25,
        "val-core/a/b/acc/best@4/mean": 0.5,
        "val-core/a/b/acc/maj@4/mean": 0.125,
        "val-aux/a/b/reward/mean@4": 9.0,
        "val-aux/a/b/acc/best@2/mean": 9.0,
        "val-aux/a/b/num_prompts": 20.0,
        "val-aux/a/b/response_length/mean": 31.25,
        "val-aux/a/b/failed_rewards": 2.0,
        "val-core/a/reward/mean@4": -1.0,
        "val-core/a/reward/best@4/mean": 2.0,
        "val-aux/a/num_prompts": 1.0,
        "val-aux/num_prompts": 21.0,
    }
    assert rows_of(metrics, 4) == [
        ["data", "source", "variable", "prompts", "mean@4", "best@4", "maj@4", "length", "failed"],
        ["a/b", "acc", "20", "0.250", "0.500", "0.125", "31.2", "2"],
        ["a", "reward", "1", "-1.000", "2.000", "-", "-", "-"],
    ]


def test_validation_table_of_one_sample_has_the_mean_only():
    metrics = {"val-core/a/reward/mean@1": 0.5, "val-aux/a/num_prompts": 3.0, "val-aux/lost/num_prompts": 4.0}
    assert rows_of(metrics, 1) == [
        ["data", "source", "variable", "prompts", "mean@1", "length", "failed"],
        ["a", "reward", "3", "0.500", "-", "-"],
        ["lost", "-", "4", "-", "-", "-"],
    ]


def test_sparkline_shows_the_shape():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0]) == "▁▁" and sparkline([]) == ""
    assert sparkline([0.0] * 50 + [1.0] * 50, width=4) == "▁▁██"


def test_unknown_entries_are_skipped():
    assert plain_summary({"steps": None, "val_accuracy_before": None}, "run") == ["run: finished"]
    assert plain_summary({"val_accuracy_after": 0.5, "steps": 3}, "run") == [
        "run: finished", "  held-out accuracy: 0.500", "  steps: 3",
    ]  # fmt: skip


def test_a_single_accuracy_is_no_change():
    assert plain_summary({"val_accuracy_before": 0.5}, "run")[1:] == ["  held-out accuracy: 0.500 before training"]
    assert plain_summary({"val_accuracy_after": 0.597}, "run")[1:] == ["  held-out accuracy: 0.597"]


def test_an_early_end_is_named():
    assert plain_summary({"stopped": "Ctrl-C"}, "run") == ["run: ended early (Ctrl-C)"]


def test_output_that_a_full_disk_refused_is_counted():
    assert plain_summary({"refused_output": 12345}, "run") == [
        "run: finished",
        "  console output: 12,345 characters refused by a full disk; metrics and logs have the rest",
    ]


@pytest.mark.parametrize(("before", "after", "text"), [(0.3, 0.9, "(+0.600)"), (0.9, 0.3, "(-0.600)")])
def test_accuracy_change_is_formatted(before, after, text):
    fact = plain_summary({"val_accuracy_before": before, "val_accuracy_after": after}, "run")[1]
    assert fact.startswith("  held-out accuracy: ") and fact.endswith(text)
