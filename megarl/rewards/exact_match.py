"""The reward of question answering with search: is the last answer exactly one of the right ones?"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

from megarl.rewards.registry import register_reward

_INFORMATION = re.compile(r"<information>.*?</information>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@register_reward("search_em")
def search_exact_match(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, float | str | None]:
    """1.0 if the last ``<answer>`` outside of ``<information>`` is a right answer, else 0.0.

    Answers are compared in lower case, without punctuation, articles and superfluous white space, as SQuAD's exact
    match does (Rajpurkar et al. 2016, arXiv:1606.05250).

    Args:
        data_source: not read.
        solution_str: the response's text, what was found included.
        ground_truth: the right answer, a list of right answers, or a mapping that has either under ``target``.
        extra_info: not read.

    Returns:
        ``score``; ``answered``: 1.0 if there is an answer at all; ``pred``: the answer as it is compared, None = none.

    Raises:
        ValueError: there is no right answer to compare with.
    """
    targets = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    right = [targets] if isinstance(targets, str | int | float) else list(targets if targets is not None else [])
    if not right:
        raise ValueError(f"ground_truth={ground_truth!r} holds no answer to compare with")
    answers = _ANSWER.findall(_INFORMATION.sub("", solution_str))
    answer = normalized(answers[-1]) if answers else None
    score = answer is not None and answer in {normalized(str(target)) for target in right}
    return {"score": float(score), "answered": float(bool(answers)), "pred": answer}


def normalized(answer: str) -> str:
    """An answer without what does not matter."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())
