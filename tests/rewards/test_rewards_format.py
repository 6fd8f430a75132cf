"""The format reward."""

import pytest
from support.expected_errors import raises

from megarl.rewards.rules import format_reward


@pytest.mark.parametrize(
    ("text", "kwargs", "score"),
    [
        ("<think>a\nb</think>\n<answer>c</answer>\n", {}, 1.0),
        ("<think>a</think> so <answer>c</answer>", {}, 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", {}, 0.0),
        ("<answer>c</answer>", {}, 0.0),
        ("a</think><answer>c</answer>", {"begin": "<think>"}, 1.0),
        ("a", {"wrong_score": -1.0}, -1.0),
        ("x = 7", {"pattern": r"x = \d+", "score": 0.5}, 0.5),
        ("so x = 7", {"pattern": r"x = \d+", "score": 0.5}, 0.0),
    ],
)
def test_the_whole_response_must_match(text, kwargs, score):
    assert format_reward("d", text, None, {}, **kwargs)["score"] == score


def test_invalid_pattern_is_refused():
    with raises("reward.format-pattern", "'('"):
        format_reward("d", "x", None, {}, pattern="(")
