r"""Rewards of mathematics: ``arithmetic``, ``gsm8k``, ``math`` (math-verify), and ``math_dapo``."""

from __future__ import annotations

import logging
import re
from decimal import Decimal
from functools import cache
from types import ModuleType
from typing import Any

from megarl.base.boxes import last_box
from megarl.base.errors import RewardError
from megarl.base.packages import require_package
from megarl.rewards.registry import register_reward

logger = logging.getLogger(__name__)


@register_reward("arithmetic")
def exact_integer(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, float | str]:
    """Score 1.0 if the stripped response is the ground truth's decimal digits, else 0.0 (the quickstart's reward).

    Returns:
        ``score``, and ``pred``: the stripped response.

    Raises:
        ValueError: the ground truth is no integer.
    """
    answer = solution_str.strip()
    return {"score": float(answer == str(int(ground_truth))), "pred": answer}


_NUMBER = r"\$?-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_MARKED_NUMBER = re.compile(rf"#### *({_NUMBER})")
_ANY_NUMBER = re.compile(_NUMBER)
GSM8K_METHODS = ("strict", "flexible")


@register_reward("gsm8k")
def gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> dict[str, float | str | None]:
    """Compare the final number with the ground truth, for GSM8K (Cobbe et al. 2021, arXiv:2110.14168).

    A right number scores ``score``, a wrong one ``format_score``, none 0.0. Numbers are compared by value: ``1,234``
    equals ``1234.0``, and a dollar sign is ignored.

    Args:
        ground_truth: the right number, or a solution of the dataset, which ends in ``#### number``.
        method: ``strict`` reads the number after the last ``####``, ``flexible`` the last number.

    Returns:
        ``score``; ``acc``: 1.0 if the number is right; ``pred``: the number, None = none.

    Raises:
        RewardError: the method is unknown.
        ValueError: the ground truth has no number.
    """
    if method not in GSM8K_METHODS:
        raise RewardError(f"method={method!r} must be one of {', '.join(GSM8K_METHODS)}", code="reward.gsm8k-method")
    right = _last_number(_MARKED_NUMBER, str(ground_truth)) or _last_number(_ANY_NUMBER, str(ground_truth))
    if right is None:
        raise ValueError(f"ground_truth={ground_truth!r:.200} has no number")
    pred = _last_number(_MARKED_NUMBER if method == "strict" else _ANY_NUMBER, solution_str)
    is_right = pred is not None and Decimal(pred) == Decimal(right)
    value = 0.0 if pred is None else score if is_right else format_score
    return {"score": value, "acc": float(is_right), "pred": pred}


def _last_number(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the last match of a number, as plain digits."""
    matches: list[str] = pattern.findall(text)
    return matches[-1].replace(",", "").replace("$", "") if matches else None


_PERCENT = re.compile(
    r"(?<=[\d})])(?:\\[,;!: ]|\s)*"
    r"(?:\\?%|\\(?:text|textrm|mathrm|mbox)\s*\{\s*(?:\\?%|per\s?cent)[^{}]*\}|per\s?cent(?:age)?\b)(?!\s*[\d(])"
)
"""A percent sign, or its word, after a number."""


def _warm_up() -> None:
    """Import sympy and build the parser's tables."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # suppresses its warning about disabled time limits
    _verify(r"\boxed{\frac{1}{2}}", "0.5")


@register_reward("math", isolated=True, warm_up=_warm_up)
def mathematics(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> dict[str, float | str | None]:
    r"""Score 1.0 if the answer equals the ground truth by math-verify (expressions, sets, equations), else 0.0.

    The answer is the content of the last ``\boxed{}``. Without a box math-verify extracts it: an expression between
    dollar signs or after a phrase such as "the final answer is", or the last number. sympy evaluates generated text, so
    this function runs in a process of the pool, whose time limit stops endless simplifications.

    Args:
        ground_truth: the right answer in LaTeX, or a whole solution with ``\boxed{}``.

    Returns:
        ``score``; ``acc``: equal to the score; ``pred``: the parsed answer, None = none.

    Raises:
        ValueError: the ground truth cannot be parsed.
    """
    is_right, pred = _verify(solution_str, str(ground_truth))
    return {"score": float(is_right), "acc": float(is_right), "pred": pred}


def _verify(solution: str, truth: str) -> tuple[bool, str | None]:
    box, truth_box = last_box(solution), last_box(truth)
    boxed, is_right, shown = box is not None, False, None
    for right, answer in _readings(truth if truth_box is None else truth_box, solution if box is None else box, boxed):
        pred = _parse(answer, boxed)
        if pred:
            shown = shown or str(pred[-1])
            # math-verify's time limits use signals, which work in a main thread only
            is_right = is_right or bool(_library().verify(_parse_truth(right), pred, timeout_seconds=None))
    return is_right, shown


def _readings(truth: str, answer: str, boxed: bool) -> list[tuple[str, str]]:
    """Pairs of truth and answer, of which one must be equal: 28% equals 28 and 0.28, but no other percentage."""
    plain_truth, plain_answer = _PERCENT.sub("", truth), _PERCENT.sub("", answer)
    pairs = [(plain_truth, plain_answer)]
    if plain_truth != truth and plain_answer == answer:
        pairs.append((_hundredth(plain_truth), answer))
    elif plain_truth == truth and plain_answer != answer:
        pairs.append((truth, _hundredth(plain_answer) if boxed else answer))
    return pairs


def _hundredth(number: str) -> str:
    return f"\\frac{{{number}}}{{100}}"


_text_truths: set[str] = set()
"""Ground truths of this process that are no expressions."""


@cache
def _parse_truth(text: str) -> Any:
    """Parse the ground truth; cached for the samples of a prompt."""
    right = _parse(text, boxed=True)
    if not right:
        raise ValueError(f"ground_truth={text!r:.200} cannot be read as a mathematical expression")
    if all(isinstance(form, str) for form in right):
        if not _text_truths:
            logger.warning(
                "ground_truth=%.200r is no mathematical expression, so an answer needs the same text. Correct "
                "such truths, or score them with another reward function; further ones are not reported",
                text,
            )
        _text_truths.add(text)
    return right


def _parse(text: str, boxed: bool) -> Any:
    return _library().parse(f"\\boxed{{{text}}}" if boxed else text, _extraction(), parsing_timeout=None)


@cache
def _extraction() -> Any:
    return [_library().LatexExtractionConfig(boxed_match_priority=0), _library().ExprExtractionConfig()]


@cache
def _library() -> ModuleType:
    require_package("math_verify", "math", "reward function 'math'")
    import math_verify

    module: ModuleType = math_verify
    return module


DAPO_CHARACTERS = 300
"""Characters read from the end of a response."""
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_UNITS = (
    "square|ways|integers|dollars|mph|inches|ft|hours|km|units|points|feet|minutes|digits|cents|degrees|cm|gm|pounds|"
    "meters|meals|edges|students|childrentickets|multiples"
)
_DECORATION = (
    *(r"\ldots", r"\dots", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", r"\%"),
    *(r"\left", r"\right", r"\displaystyle", r"\!", "\\ ", '"'),
)
_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf|overline|mbox|boxed|fbox)\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\[dt]?frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])")
_SHORT_ROOT = re.compile(r"\\sqrt\s*([0-9a-zA-Z])")


@register_reward("math_dapo")
def math_dapo(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], strict_box_verify: bool = False
) -> dict[str, float | str]:
    r"""Score 1.0 if the normalized text of the answer is right, else -1.0 (DAPO's reward).

    The answer is the rest of the line after the last ``Answer:``. With ``strict_box_verify`` it is the content of the
    last ``\boxed{}``, compared without normalization.

    Args:
        solution_str: text of the response; only its last 300 characters are read.
        strict_box_verify: read a box.

    Returns:
        ``score``; ``acc``: 1.0 if the answer is right; ``pred``: the compared answer, empty = none.
    """
    end, truth = solution_str[-DAPO_CHARACTERS:], str(ground_truth)
    if strict_box_verify:
        answer, right = last_box(end) or "", truth
    else:
        lines = _ANSWER_LINE.findall(end)
        answer, right = normalize_math_answer(lines[-1]) if lines else "", normalize_math_answer(truth)
    is_right = bool(answer) and answer == right
    return {"score": 1.0 if is_right else -1.0, "acc": float(is_right), "pred": answer}


def normalize_math_answer(answer: str) -> str:
    """Normalize an answer as Minerva does: without units, words and LaTeX decoration.

    Source: Lewkowycz et al. 2022 (arXiv:2206.14858), appendix D.1.
    """
    text = answer.rpartition("=")[2].strip().rstrip(".").replace("$", "")
    text = re.sub(r"\b(?:an?|the)\s", "", _PERCENT.sub("", text))
    text = re.sub(r",?\s*\band\b", ",", _unwrap(text))
    for word in _DECORATION:
        text = text.replace(word, "")
    text = re.sub(rf"\b(?:{_UNITS})\b(?:\^[23])?", "", text)
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", _SHORT_ROOT.sub(r"\\sqrt{\1}", text))
    text = "".join(text.split())
    return text.replace(",", "") if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", text) else text


def _unwrap(text: str) -> str:
    r"""Remove nested ``\text{}`` and similar commands around their content."""
    while (changed := _WRAPPER.sub(r"\1", text)) != text:
        text = changed
    return text
