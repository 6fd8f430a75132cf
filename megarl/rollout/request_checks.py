"""Checks of requests and options that every engine shares."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import TYPE_CHECKING

from megarl.base.errors import MegarlError, ModelError
from megarl.rollout.interface import (
    TAGS,
    EngineOptions,
    Request,
    RequestRefused,
    RolloutError,
    Tag,
    is_integer_type,
)

if TYPE_CHECKING:
    from megarl.models import ModelConfig


def check_tags(tags: Iterable[Tag]) -> set[Tag]:
    """Return sleep tags as a set, or raise RolloutError for an unknown one."""
    chosen = set(tags)
    if unknown := chosen - set(TAGS):
        raise RolloutError(
            f"sleep tag {sorted(unknown)[0]!r} is unknown; known ones: {', '.join(TAGS)}",
            code="engine.unknown-sleep-tag",
        )
    return chosen


def check_none_running(running: Sized, action: str, error: type[MegarlError] = RolloutError) -> None:
    """Raise an error that tells to do ``action`` later, if requests are running."""
    if running:
        raise error(f"{len(running)} requests are running: {action} when none is", code="engine.requests-running")


def check_token_ids(source: str, ids: Iterable[int], vocab_size: int) -> None:
    """Check that token ids are in the vocabulary.

    Args:
        source: name of the ids, for the error.

    Raises:
        RequestRefused: an id is no integer, or outside of it.
    """
    values = list(ids)
    for kind in set(map(type, values)):
        if not is_integer_type(kind):
            raise RequestRefused(
                f"{source}: expected integers, there is a {kind.__name__}", code="rollout.token-id-type"
            )
    if values and not (min(values) >= 0 and max(values) < vocab_size):
        outside = next(token for token in values if not 0 <= token < vocab_size)
        raise RequestRefused(
            f"{source}: {outside} is no token id, the vocabulary has {vocab_size}", code="rollout.token-id-range"
        )


def check_routes(config: ModelConfig, options: EngineOptions) -> None:
    """Refuse to return the experts of a dense model, by a ModelError."""
    if options.return_routes and config.experts is None:
        raise ModelError(
            f"return_routes=True, but {config.architecture} is a dense model, whose tokens have no experts",
            code="model.no-experts",
        )


def check_request(request: Request, max_model_len: int, vocab_size: int, *, return_routes: bool) -> None:
    """Check length, token ids and routes of a request.

    Raises:
        RequestRefused: the prompt is empty, the prior leaves nothing to generate, prompt and response exceed
            ``max_model_len``, a token id is outside the vocabulary, or the engine records no experts for the request.
    """
    name, prompt, limit = f"request '{request.request_id}'", request.prompt_ids, request.params.max_new_tokens
    if not is_integer_type(type(request.seed)):
        raise RequestRefused(f"{name}: seed={request.seed!r}, expected an integer", code="rollout.seed-type")
    if not len(prompt):
        raise RequestRefused(f"{name}: the prompt is empty, expected token ids", code="rollout.empty-prompt")
    if len(prompt) + limit > max_model_len:
        raise RequestRefused(
            f"{name}: a prompt of {len(prompt)} and max_new_tokens={limit} exceed the engine's "
            f"max_model_len={max_model_len}",
            code="rollout.request-too-long",
        )
    if len(request.prior_ids) >= limit:
        raise RequestRefused(
            f"{name}: prior has {len(request.prior_ids)} tokens, expected fewer than {limit}",
            code="rollout.prior-too-long",
        )
    if request.routes_from is not None:
        if not return_routes:
            raise RequestRefused(
                f"{name}: routes_from={request.routes_from}, but the engine has return_routes=False",
                code="rollout.routes-off",
            )
        if not 0 <= request.routes_from <= len(prompt):
            raise RequestRefused(
                f"{name}: routes_from={request.routes_from}, expected 0 to {len(prompt)}, the prompt's end",
                code="rollout.routes-range",
            )
    check_token_ids(f"{name}: prompt_ids", prompt, vocab_size)
    check_token_ids(f"{name}: prior", request.prior_ids, vocab_size)
    check_token_ids(f"{name}: stop_token_ids", request.params.stop_token_ids, vocab_size)
