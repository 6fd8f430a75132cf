"""Conversion between chat messages, tokens and OpenAI response bodies.

A request becomes token ids through the chat template. A completion becomes an assistant message with tool calls, and
then a JSON body or server-sent events.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from megarl.agents.endpoint.request import CONTEXT_LENGTH, MODEL, ApiError, ChatRequest
from megarl.agents.event_loop import in_tokenizer_thread
from megarl.agents.frames import encode_prompt, turn_frame
from megarl.agents.loop import read_images
from megarl.agents.tools.calling import Parser, ToolCall
from megarl.agents.types import AgentError, Message
from megarl.base.errors import DataError
from megarl.base.image_tokens import Image, with_placeholders
from megarl.data.images import ImageReader
from megarl.data.tokenizers import control_tokens, fewest_tokens
from megarl.rollout.interface import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HistoryDigest = bytes
"""Hash of a message history."""


@dataclass(frozen=True)
class AssistantTurn:
    """A generated turn as the client sees it.

    Attributes:
        content: text without tool calls, special tokens and stop string.
        calls: well-formed tool calls in order; malformed ones stay in the text.
        finish_reason: reason in OpenAI's words.
    """

    content: str
    calls: Sequence[ToolCall]
    malformed: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    completion: Completion

    def message(self) -> dict[str, Any]:
        """Return the message of the response."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.calls:
            message["content"] = self.content or None
            message["tool_calls"] = [
                {
                    "id": f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for call in self.calls
            ]
        return message

    def history(self) -> Message:
        """Return the message as a following request repeats it."""
        calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in self.calls]
        return {"role": "assistant", "content": self.content, **({"tool_calls": calls} if calls else {})}


@dataclass(frozen=True)
class ChatCompletion:
    """Result of a request.

    Attributes:
        prompt_ids: token ids of the context.
    """

    prompt_ids: Sequence[int]
    turns: Sequence[AssistantTurn]

    @property
    def weight_version(self) -> int:
        """Oldest version of the weights that generated a choice."""
        return min(turn.completion.weight_version for turn in self.turns)


class EncodedMessages(NamedTuple):
    """Token ids of messages, and their images."""

    ids: list[int]
    images: Sequence[Image]


class ChatFormat:
    """Chat template and tool-call parser of the policy.

    Args:
        max_tokens: longest context with its response; None = no limit. A request that is longer for certain, by its
            bytes, is refused before it is tokenized.
        reader: reads the images of messages; None = the policy reads text alone.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        parse: Parser,
        template_kwargs: Mapping[str, Any] | None = None,
        stop_strings: bool = True,
        max_tokens: int | None = None,
        reader: ImageReader | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._reader = reader
        self._control = control_tokens(tokenizer)
        self._max_tokens = max_tokens
        self._parse = parse
        self._template_kwargs = dict(template_kwargs or {})
        self._stop_strings = stop_strings

    def check(self, request: ChatRequest) -> None:
        """Refuse a request that the engine cannot serve.

        Raises:
            ApiError: the request has stop strings, and the engine has no tokenizer.
        """
        if request.stop and not self._stop_strings:
            raise ApiError(400, "stop: the rollout engine runs without a tokenizer and knows no texts", param="stop")

    @property
    def image_token(self) -> int | None:
        """The policy's image token; None if it reads text alone."""
        return None if self._reader is None else self._reader.token

    async def encoded_prompt(self, request: ChatRequest) -> EncodedMessages:
        """Encode a whole conversation with the generation prompt.

        Raises:
            ApiError: the chat template refuses the messages, they are too long, or an image cannot be read.
        """
        messages, images = await self._read(request.messages, 0)

        def encode() -> list[int]:
            hidden, tools = self._control.hide_messages(messages), self._control.hide_all(request.tools)
            return encode_prompt(self.tokenizer, hidden, tools, self._template_kwargs, images, self.image_token)

        ids = await self._encode([messages, json.dumps(request.tools, ensure_ascii=False)], images, encode)
        if not ids:
            raise ApiError(400, "messages: the chat template makes no token of them", param="messages")
        return EncodedMessages(ids, images)

    async def encoded_frame(self, request: ChatRequest, first: int, last: Completion) -> EncodedMessages:
        """Encode the messages between a generated turn and the next one.

        Args:
            first: number of the first of them in the request.

        Raises:
            ApiError: the chat template refuses the messages, they are too long, or an image cannot be read.
        """
        last_token = last.token_ids[-1] if last.token_ids else None
        messages, images = await self._read(request.messages[first:], first)

        def encode() -> list[int]:
            return turn_frame(self.tokenizer, messages, last_token, self._template_kwargs, images, self.image_token)

        return EncodedMessages(await self._encode(messages, images, encode), images)

    async def _read(self, messages: Sequence[Message], first: int) -> tuple[Sequence[Message], list[Image]]:
        """Read the images of messages in threads; decode them only if their tokens have room."""
        contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
        files = sum(part["type"] == "image" for content in contents for part in content)
        if not files:
            return messages, []
        self._check_length(files)
        try:
            return await read_images(
                messages, self._reader, "messages.{}.content.{}", first, check_tokens=self._check_length
            )
        except DataError as error:
            raise ApiError(400, error.text, code=error.code, param="messages") from error

    async def _encode(
        self, texts: Sequence[Any], images: Sequence[Image], encode: Callable[[], list[int]]
    ) -> list[int]:
        """Encode texts in the tokenizer's thread, unless their bytes prove that they are too long."""
        self._check_length(fewest_tokens(self.tokenizer, texts) + sum(image.rows * image.columns for image in images))
        try:
            return await in_tokenizer_thread(encode)
        except (AgentError, DataError) as error:
            raise ApiError(400, f"messages: {error.text}", code=error.code or None, param="messages") from error
        except (TypeError, ValueError, RecursionError) as error:
            raise ApiError(400, f"messages: {error}", param="messages") from error

    def _check_length(self, fewest: int) -> None:
        if self._max_tokens is not None and fewest > self._max_tokens:
            text = f"the new messages have at least {fewest} tokens; the context has {self._max_tokens}"
            raise ApiError(400, text, code=CONTEXT_LENGTH, param="messages")

    def turn(self, completion: Completion, request: ChatRequest) -> AssistantTurn:
        """Decode a completion into text and tool calls."""
        text = str(self.tokenizer.decode(completion.token_ids, skip_special_tokens=False))
        positions = [text.find(stop) for stop in request.stop]
        text = text[: min((at for at in positions if at >= 0), default=len(text))]
        calls = self._parse(text) if request.reads_calls else []
        good = [call for call in calls if call.problem is None]
        for start, end in sorted({call.span for call in good if call.span is not None}, reverse=True):
            text = text[:start] + text[end:]
        content = self._control.remove(text)
        if good:
            content = content.strip()
        reason: Literal["stop", "length", "tool_calls"] = "length" if completion.finish_reason == "length" else "stop"
        if good and reason == "stop":
            reason = "tool_calls"
        return AssistantTurn(content, good, len(calls) - len(good), reason, completion)


def initial_digest(tools: Sequence[Mapping[str, Any]]) -> HistoryDigest:
    """Return the digest of an empty history with these declared tools."""
    return sha256(json.dumps(list(tools), sort_keys=True).encode()).digest()


def next_digest(history: HistoryDigest, message: Message) -> HistoryDigest:
    """Return the digest of a history and the message after it.

    Frameworks strip the assistant's text and change the ids of calls; both leave the digest unchanged. Images count by
    the digests of their files.
    """
    content = message["content"]
    if not isinstance(content, str):
        content = [part.get("text", part.get("key")) for part in content]
    if message["role"] == "assistant":
        content = content.strip()
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [(function["name"], function["arguments"]) for function in functions]
    canonical = json.dumps([message["role"], content, message.get("name"), calls], sort_keys=True)
    return sha256(history + canonical.encode()).digest()


def completion_body(
    completion: ChatCompletion,
    request: ChatRequest,
    tokenizer: PreTrainedTokenizerBase,
    image_token: int | None = None,
) -> dict[str, Any]:
    """Build the ``chat.completion`` body, with the additional field ``weight_version``.

    With ``return_token_ids`` the body has ``prompt_token_ids``, and each choice has ``token_ids``.

    Args:
        image_token: stands for each token of an image in ``prompt_token_ids``.
    """
    body: dict[str, Any] = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "system_fingerprint": f"weights-{completion.weight_version}",
        "weight_version": completion.weight_version,
    }
    body["choices"] = [
        {
            "index": index,
            "message": turn.message(),
            "finish_reason": turn.finish_reason,
            "logprobs": _log_probs(turn, tokenizer) if request.logprobs else None,
            **({"token_ids": list(turn.completion.token_ids)} if request.return_token_ids else {}),
        }
        for index, turn in enumerate(completion.turns)
    ]
    prompt = len(completion.prompt_ids)
    generated = sum(len(turn.completion.token_ids) for turn in completion.turns)
    body["usage"] = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }
    if request.return_token_ids:
        ids = completion.prompt_ids
        body["prompt_token_ids"] = list(ids) if image_token is None else with_placeholders(ids, image_token)
    return body


def completion_events(body: dict[str, Any], request: ChatRequest) -> Iterator[bytes]:
    """Convert a body to server-sent events: per choice one event with the whole message and one with its end."""
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


def _log_probs(turn: AssistantTurn, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Log-probs of every generated token, end tokens included; ``bytes`` is null: a token may be no valid text."""
    tokens = turn.completion
    texts = {token: tokenizer.decode([token]) for token in set(tokens.token_ids)}
    return {
        "content": [
            {"token": texts[token], "bytes": None, "logprob": log_prob, "top_logprobs": []}
            for token, log_prob in zip(tokens.token_ids, tokens.log_probs, strict=True)
        ],
        "refusal": None,
    }


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"
