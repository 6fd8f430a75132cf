"""LLM as judge: a language model grades the response over an OpenAI-compatible endpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.rewards.calling import InfrastructureFailure
from megarl.rewards.http import get_json, post_json
from megarl.rewards.registry import register_reward

TEMPLATE = (
    "You grade an answer.\n\n[Question]\n{prompt}\n\n[Reference]\n{ground_truth}\n\n[Answer]\n{response}\n\n"
    "How good is the answer, from 0 (wrong) to 10 (right and complete)? End with one line: Score: <number>"
)
SCORE_PATTERN = r"Score:\s*(-?\d+(?:\.\d+)?)"
_FIELD = re.compile(r"\{(prompt|response|ground_truth)\}")
_TAIL = 4000
"""Characters at the end of a judgement that are searched for its score."""


@register_reward("judge")
async def judge(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    prompt_str: str,
    base_url: str = "",
    model: str = "",
    template: str = TEMPLATE,
    score_pattern: str = SCORE_PATTERN,
    score_range: Sequence[float] = (0.0, 10.0),
    max_tokens: int = 1024,
    temperature: float = 0.0,
    timeout_s: float = 60.0,
    api_key_env: str | None = None,
) -> dict[str, float | str]:
    """Score the judge's number, scaled from its range to 0..1.

    Args:
        solution_str: text of the response; ``{response}`` in the template.
        ground_truth: ``{ground_truth}`` in the template.
        prompt_str: text of the prompt; ``{prompt}`` in the template.
        base_url: base URL of the endpoint, without ``/chat/completions``.
        model: model name at the endpoint.
        score_pattern: regular expression whose first group is the score; the last match counts.
        score_range: lowest and highest score; a score outside is an invalid judgement.
        timeout_s: seconds per request.
        api_key_env: environment variable with the API key; None = no key.

    Returns:
        ``score``, and ``judgement``: the judge's text.

    Raises:
        InfrastructureFailure: the endpoint is unreachable, or its response is no chat completion.
        ValueError: the judgement has no score or one out of range, or the endpoint refuses the request.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": fill_template(template, prompt_str, solution_str, ground_truth)}],
        "max_tokens": max_tokens,
        "temperature": temperature,
    }
    url = f"{base_url.rstrip('/')}/chat/completions"
    judgement = _content(await post_json(url, body, timeout_s, _headers(api_key_env)), url)
    low, high = score_range
    return {"score": (read_score(judgement, score_pattern, low, high) - low) / (high - low), "judgement": judgement}


async def served_models(base_url: str, timeout_s: float, api_key_env: str | None = None) -> list[str]:
    """Return the names of the models that an OpenAI-compatible endpoint serves.

    Raises:
        InfrastructureFailure: the endpoint is unreachable, or answers no list of models.
        ValueError: the endpoint refuses the request.
    """
    url = f"{base_url.rstrip('/')}/models"
    answer = await get_json(url, timeout_s, _headers(api_key_env))
    models = answer.get("data") if isinstance(answer, Mapping) else None
    names = [model.get("id") for model in models if isinstance(model, Mapping)] if isinstance(models, list) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise InfrastructureFailure(f"{url} answered no list of models but {answer!r:.300}")
    return [str(name) for name in names]


def _headers(api_key_env: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {os.environ.get(api_key_env, '')}"} if api_key_env else {}


def fill_template(template: str, prompt: str, response: str, ground_truth: Any) -> str:
    """Fill the fields of a template; braces in the inserted texts stay unchanged."""
    values = {"prompt": prompt, "response": response, "ground_truth": str(ground_truth)}
    return _FIELD.sub(lambda match: values[match[1]], template)


def read_score(text: str, pattern: str, low: float, high: float) -> float:
    """Return the last score of a judgement.

    Raises:
        ValueError: the judgement has no score, or one out of range.
    """
    matches = list(re.finditer(pattern, text[-_TAIL:]))
    if not matches:
        raise ValueError(f"the judge gave no score: {text[-200:]!r}")
    try:
        score = float(matches[-1][1])
    except ValueError as error:
        raise ValueError(f"the judge's score {matches[-1][1]!r:.100} is no number") from error
    if not low <= score <= high:
        raise ValueError(f"the judge's score {score:g} is not from {low:g} to {high:g}")
    return score


def _content(completion: Any, url: str) -> str:
    choices = completion.get("choices") if isinstance(completion, Mapping) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, str):
        raise InfrastructureFailure(f"{url} answered no chat completion but {completion!r:.300}")
    return content
