"""An answer as clients of OpenAI's interface expect it, whole or as server-sent events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarl.rollout.endpoint.request import MODEL, ChatRequest
from megarl.rollout.endpoint.translation import AssistantTurn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Answer:
    """What a request came to.

    Attributes:
        prompt_ids: what the policy was shown.
        turns: what it said, one for each of the ``n`` that were asked for.
    """

    prompt_ids: Sequence[int]
    turns: Sequence[AssistantTurn]

    @property
    def weight_version(self) -> int:
        """Of the weights that wrote it, the oldest."""
        return min(turn.completion.weight_version for turn in self.turns)


def completion_body(answer: Answer, request: ChatRequest, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """``chat.completion``, with ``weight_version`` on top.

    Where ``return_token_ids`` asks for them there are ``prompt_token_ids``, and ``token_ids`` for each choice.
    """
    body = _head("chat.completion", answer)
    body["choices"] = [
        {
            "index": index,
            "message": turn.message(),
            "finish_reason": turn.finish_reason,
            "logprobs": _log_probs(turn, tokenizer) if request.logprobs else None,
            **({"token_ids": list(turn.completion.token_ids)} if request.return_token_ids else {}),
        }
        for index, turn in enumerate(answer.turns)
    ]
    body["usage"] = _usage(answer)
    if request.return_token_ids:
        body["prompt_token_ids"] = list(answer.prompt_ids)
    return body


def completion_events(body: dict[str, Any], request: ChatRequest) -> Iterator[bytes]:
    """The same as server-sent events: each choice in one piece, then its end.

    Args:
        body: as :func:`completion_body` made it.
        request: that it answers.
    """
    usage, choices = body.pop("usage"), body.pop("choices")
    head = body | {"object": "chat.completion.chunk"}
    for choice in choices:
        message, reason = choice.pop("message"), choice.pop("finish_reason")
        calls = message.pop("tool_calls", None)
        if calls:
            message["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
        yield _event(head | {"choices": [choice | {"delta": message, "finish_reason": None}]})
        end = {"index": choice["index"], "delta": {}, "finish_reason": reason, "logprobs": None}
        yield _event(head | {"choices": [end]})
    if request.include_usage:
        yield _event(head | {"choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def _head(kind: str, answer: Answer) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": MODEL,
        "system_fingerprint": f"weights-{answer.weight_version}",
        "weight_version": answer.weight_version,
    }


def _usage(answer: Answer) -> dict[str, int]:
    prompt, written = len(answer.prompt_ids), sum(len(turn.completion.token_ids) for turn in answer.turns)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def _log_probs(turn: AssistantTurn, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Of every generated token, those that end the turn included. A token alone may be no text: ``bytes`` is null."""
    written = turn.completion
    return {
        "content": [
            {"token": tokenizer.decode([token]), "bytes": None, "logprob": log_prob, "top_logprobs": []}
            for token, log_prob in zip(written.token_ids, written.log_probs, strict=True)
        ],
        "refusal": None,
    }


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"
