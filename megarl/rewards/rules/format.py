"""The format reward: does the response match a pattern?"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from megarl.base.errors import RewardError
from megarl.rewards.registry import register_reward

THINK_ANSWER = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"
"""Reasoning, then an answer, and nothing else (DeepSeek-R1, arXiv:2501.12948, table 1)."""
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


@register_reward("format")
def format_reward(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    pattern: str = THINK_ANSWER,
    begin: str = "",
    score: float = 1.0,
    wrong_score: float = 0.0,
) -> dict[str, float]:
    """Score ``score`` if the whole response matches a pattern, else ``wrong_score``.

    With the default pattern, each of its tags must occur exactly once.

    Args:
        pattern: regular expression; its dot matches line breaks.
        begin: start of the response that is part of the prompt, such as ``<think>``.

    Returns:
        ``score``, and ``format``: 1.0 for a match.

    Raises:
        RewardError: the pattern is no regular expression.
    """
    text = begin + solution_str
    matches = _compile(pattern).fullmatch(text) is not None
    if pattern == THINK_ANSWER:
        matches = matches and all(text.count(tag) == 1 for tag in _TAGS)
    return {"score": score if matches else wrong_score, "format": float(matches)}


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        text = f"format's pattern {pattern!r} is no regular expression: {error}"
        raise RewardError(text, code="reward.format-pattern") from error
