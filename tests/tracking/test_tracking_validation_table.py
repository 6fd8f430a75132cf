"""The table of an evaluation, as text."""

from __future__ import annotations

import io

from rich.console import Console as RichConsole

from megarl.tracking import validation_table


def rows_of(metrics: dict[str, float], samples: int) -> list[list[str]]:
    text = io.StringIO()
    RichConsole(file=text, width=100, color_system=None).print(validation_table(metrics, samples))
    return [line.split() for line in text.getvalue().splitlines() if line.strip() and "─" not in line]


def test_a_row_per_data_source_with_the_variable_that_counts() -> None:
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


def test_of_one_answer_there_is_the_mean_alone_and_of_none_nothing() -> None:
    metrics = {"val-core/a/reward/mean@1": 0.5, "val-aux/a/num_prompts": 3.0, "val-aux/lost/num_prompts": 4.0}
    assert rows_of(metrics, 1) == [
        ["data", "source", "variable", "prompts", "mean@1", "length", "failed"],
        ["a", "reward", "3", "0.500", "-", "-"],
        ["lost", "-", "4", "-", "-", "-"],
    ]
