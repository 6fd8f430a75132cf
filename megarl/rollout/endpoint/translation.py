"""Between chat messages and tokens: what a request adds to the context, and what the policy's tokens say."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

from megarl.rollout.agents.frames import encode_prompt, plain_text, turn_frame
from megarl.rollout.agents.loop import AgentError, Message
from megarl.rollout.endpoint.errors import ApiError
from megarl.rollout.endpoint.request import ChatRequest
from megarl.rollout.interface import Completion
from megarl.rollout.tools.parsers import Parser, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Digest = bytes
"""Stands for a history of messages."""


@dataclass(frozen=True)
class AssistantTurn:
    """What the policy said, as the client sees it.

    Attributes:
        content: its text, without calls, special tokens and the stop string.
        calls: of tools, in their order; those that cannot be read stay in the text.
        malformed: how many could not.
        finish_reason: in OpenAI's words.
        completion: the tokens.
    """

    content: str
    calls: Sequence[ToolCall]
    malformed: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    completion: Completion

    def message(self) -> dict[str, Any]:
        """The message of the answer."""
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
        """The message as a request that goes on from it repeats it."""
        calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in self.calls]
        return {"role": "assistant", "content": self.content, **({"tool_calls": calls} if calls else {})}


class ChatFormat:
    """How one policy is talked to.

    Args:
        tokenizer: of the policy, with a chat template.
        parse: finds calls in its text.
        template_kwargs: extra arguments for the chat template.
        stop_strings: whether the engine knows them.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        parse: Parser,
        template_kwargs: Mapping[str, Any] | None = None,
        stop_strings: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self._parse = parse
        self._template_kwargs = dict(template_kwargs or {})
        self._stop_strings = stop_strings

    def check(self, request: ChatRequest) -> None:
        """Refuses what the engine cannot do.

        Raises:
            ApiError: the request has stop strings, and the engine does not decode.
        """
        if request.stop and not self._stop_strings:
            raise ApiError(400, "stop: the rollout engine runs without a tokenizer and knows no texts", param="stop")

    def prompt_ids(self, request: ChatRequest) -> list[int]:
        """A whole conversation, up to where the answer begins.

        Raises:
            ApiError: the chat template refuses the messages.
        """
        try:
            ids = encode_prompt(self.tokenizer, self._plain(request.messages), request.tools, self._template_kwargs)
        except (AgentError, TypeError, ValueError) as error:
            raise ApiError(400, f"messages: {error}", param="messages") from error
        if not ids:
            raise ApiError(400, "messages: the chat template makes no token of them", param="messages")
        return ids

    def frame_ids(self, messages: Sequence[Message], last: Completion) -> list[int]:
        """What stands between a turn of the policy and its next one, where these messages follow the turn.

        Raises:
            ApiError: the chat template refuses the messages.
        """
        last_token = last.token_ids[-1] if last.token_ids else None
        try:
            return turn_frame(self.tokenizer, self._plain(messages), last_token, self._template_kwargs)
        except (AgentError, TypeError, ValueError) as error:
            raise ApiError(400, f"messages: {error}", param="messages") from error

    def turn(self, completion: Completion, request: ChatRequest) -> AssistantTurn:
        """What the policy's tokens say."""
        text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=False)
        found = [text.find(stop) for stop in request.stop]
        text = text[: min((at for at in found if at >= 0), default=len(text))]
        calls = self._parse(text) if request.reads_calls else []
        good = [call for call in calls if call.problem is None]
        for begin, end in sorted({call.span for call in good if call.span is not None}, reverse=True):
            text = text[:begin] + text[end:]
        content = plain_text(self.tokenizer, text)
        if good:
            content = content.strip()
        reason: Literal["stop", "length", "tool_calls"] = "length" if completion.finish_reason == "length" else "stop"
        if good and reason == "stop":
            reason = "tool_calls"
        return AssistantTurn(content, good, len(calls) - len(good), reason, completion)

    def _plain(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Without special tokens, by which a text could pass for a turn."""
        return [{**message, "content": plain_text(self.tokenizer, message["content"])} for message in messages]


def begin_digest(tools: Sequence[Mapping[str, Any]]) -> Digest:
    """Of a conversation that declares these tools, before its first message."""
    return sha256(json.dumps(list(tools), sort_keys=True).encode()).digest()


def next_digest(history: Digest, message: Message) -> Digest:
    """Of a history and the message that follows it.

    Frameworks strip what the assistant wrote, and give calls other ids: neither makes it another message.
    """
    content = message["content"]
    if message["role"] == "assistant":
        content = content.strip()
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = [(function["name"], function["arguments"]) for function in functions]
    said = json.dumps([message["role"], content, message.get("name"), calls], sort_keys=True)
    return sha256(history + said.encode()).digest()
