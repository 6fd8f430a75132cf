"""Rewards of question answering with search: exact match, substring, F1, and Search-R1's reward with format.

Answers are compared in lower case, without punctuation, articles and extra white space, as in SQuAD's metrics and
Search-R1 (Rajpurkar et al. 2016, arXiv:1606.05250; Jin et al. 2025, arXiv:2503.09516).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from megarl.rewards.registry import register_reward

_INFORMATION = re.compile(r"<information>(.*?)</information>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

Fields = dict[str, float | str | None]


@register_reward("search_em")
def search_exact_match(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], format_score: float = 0.0
) -> Fields:
    """Score 1.0 if the last ``<answer>`` outside of ``<information>`` is a right answer, else 0.0.

    Args:
        solution_str: text of the response, including retrieved documents.
        ground_truth: the right answer, a list of right answers, or a mapping with either under ``target``.

    Returns:
        ``score``; ``answered``: 1.0 if there is an answer; ``pred``: the normalized answer, None = none.

    Raises:
        ValueError: the ground truth has no answer.
    """
    return _best_match(solution_str, ground_truth, format_score, lambda answer, right: float(answer == right))


@register_reward("search_subem")
def search_substring_match(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], format_score: float = 0.0
) -> Fields:
    """Score 1.0 if the last ``<answer>`` contains a right answer, else 0.0; otherwise as :func:`search_exact_match`."""
    return _best_match(solution_str, ground_truth, format_score, lambda answer, right: float(right in answer))


@register_reward("search_f1")
def search_f1(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], format_score: float = 0.0
) -> Fields:
    """Score the word F1 of the last ``<answer>`` and the best right answer; otherwise as :func:`search_exact_match`.

    A word counts as often as it occurs in both.
    """
    return _best_match(solution_str, ground_truth, format_score, _word_f1)


def _best_match(solution: str, ground_truth: Any, format_score: float, compare: Callable[[str, str], float]) -> Fields:
    targets, answer = _right_answers(ground_truth), _last_answer(solution)
    score = 0.0 if answer is None else max(compare(answer, target) for target in targets) or format_score
    return {"score": score, "answered": float(answer is not None), "pred": answer}


def _right_answers(ground_truth: Any) -> list[str]:
    """Return the normalized right answers."""
    targets = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    answers = [targets] if isinstance(targets, str | int | float) else list(targets if targets is not None else [])
    if not answers:
        raise ValueError(f"ground_truth={ground_truth!r} holds no answer to compare with")
    return [normalize_qa_answer(str(answer)) for answer in answers]


def _last_answer(solution: str) -> str | None:
    """Return the policy's last answer, normalized, or None."""
    answers = _ANSWER.findall(_INFORMATION.sub("", solution))
    return normalize_qa_answer(answers[-1]) if answers else None


def _word_f1(answer: str, right: str) -> float:
    """Compute the word F1 of two normalized texts; two texts without words are equal."""
    words, right_words = answer.split(), right.split()
    if not words or not right_words:
        return float(words == right_words)
    common = sum((Counter(words) & Counter(right_words)).values())
    return 2 * common / (len(words) + len(right_words))


def normalize_qa_answer(answer: str) -> str:
    """Normalize an answer: lower case, without punctuation, articles and extra white space."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


_TAGS = ("think", "search", "information", "answer")
_TAG = re.compile(rf"</?(?:{'|'.join(_TAGS)})>")
# Allowed successors of a block; an answer ends the response.
_NEXT = {None: ("think",), "think": ("search", "answer"), "search": ("information",), "information": ("think",)}


@register_reward("search_format_em")
def search_structure(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    structure_format_score: float = 0.2,
    final_format_score: float = 0.1,
    retrieval_score: float = 0.1,
    score: float = 1.0,
) -> dict[str, float | str | None]:
    """Score exact match together with the format of the conversation and the retrieved documents (Search-R1).

    ==============  =======================================================  ==============================
    answer          well-formed                                              malformed
    ==============  =======================================================  ==============================
    right           ``score``                                                ``score - structure_format_score``
    wrong           ``structure_format_score``, plus ``retrieval_score``     ``final_format_score``
                    if a retrieved document has a right answer
    none            as wrong                                                 0
    ==============  =======================================================  ==============================

    Args:
        ground_truth: as in ``search_em``.

    Returns:
        ``score``; ``acc``: 1.0 if the answer is right; ``format``: 1.0 if well-formed; ``retrieved``: 1.0 if a document
        has a right answer; ``pred``.
    """
    targets, answer = _right_answers(ground_truth), _last_answer(solution_str)
    well_formed = _has_structure(solution_str)
    documents = [normalize_qa_answer(text) for text in _INFORMATION.findall(solution_str)]
    retrieved = any(target in text for text in documents for target in targets)
    is_right = answer is not None and answer in targets
    if is_right:
        value = score if well_formed else score - structure_format_score
    elif well_formed:
        value = structure_format_score + (retrieval_score if retrieved else 0.0)
    else:
        value = 0.0 if answer is None else final_format_score
    facts = {"acc": is_right, "format": well_formed, "retrieved": retrieved}
    return {"score": value, **{name: float(fact) for name, fact in facts.items()}, "pred": answer}


def _has_structure(text: str) -> bool:
    """Return whether a response has the form: ``<think>``, any searches with ``<think>`` after them, ``<answer>``."""
    previous, at = None, 0
    while at < len(text.rstrip()) and previous != "answer":
        opening = _TAG.search(text, at)
        name = opening.group().strip("<>") if opening else ""
        if opening is None or text[at : opening.start()].strip() or name not in _NEXT[previous]:
            return False
        closing = _TAG.search(text, opening.end())
        if closing is None or closing.group() != f"</{name}>":
            return False
        previous, at = name, closing.end()
    return previous == "answer" and not text[at:].strip()
