"""Exact match of the last answer."""

import pytest

from megarl.rewards import search_exact_match


def score(text, truth):
    return search_exact_match("d", text, truth, {})


@pytest.mark.parametrize(
    ("text", "truth", "right", "read"),
    [
        ("<answer> The  Eiffel Tower. </answer>", {"target": ["eiffel tower"]}, 1.0, "eiffel tower"),
        ("<answer>7</answer>", 7, 1.0, "7"),
        ("<answer>8</answer> no, <answer>7</answer>", ["6", "7"], 1.0, "7"),
        ("<answer>7</answer> no, <answer>8</answer>", ["6", "7"], 0.0, "8"),
        ("<answer>8</answer><information>Doc <answer>7</answer></information>", "7", 0.0, "8"),
        ("7", "7", 0.0, None),
        ("<answer>17</answer>", "7", 0.0, "17"),
    ],
)
def test_the_last_answer_counts_and_not_what_was_found(text, truth, right, read):
    assert score(text, truth) == {"score": right, "answered": float("<answer>" in text), "pred": read}


def test_a_row_without_a_right_answer_is_an_error():
    with pytest.raises(ValueError, match="holds no answer"):
        score("<answer>7</answer>", {"target": []})
