"""Chat completion requests: validation against OpenAI's schema, and errors in OpenAI's form.

Each field is in one of four groups: supported; ignored, since it cannot change the response (``user``, ``metadata``);
accepted with its neutral value only (``presence_penalty: 0``); or rejected by name. null counts as absent.

The schema is checked with jsonschema: pydantic models would need the same rules (neutral values, refusals by name) as
validators, with other messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema

from megarl.agents.types import Message
from megarl.base.errors import DataError
from megarl.base.image_tokens import image_key
from megarl.base.json_text import parse_json
from megarl.data.images import part_file
from megarl.rollout.interface import MAX_INT32

MODEL = "policy"
"""Name of the only served model."""
MAX_CHOICES = 64
CONTEXT_LENGTH = "context_length_exceeded"
"""OpenAI's code of a request that is too long."""
_MOST_ENTRIES = {"messages": 10_000, "tools": 1_000, "stop": 16}
LOWEST_TEMPERATURE = 0.01
"""Division by a lower temperature overflows, and sampling would be greedy in all but name."""
_SHOW_IMAGES = ("user", "tool")
"""Roles whose messages may have images."""
MAX_SEED = 2**63 - 1
MAX_STOP_LENGTH = 256
"""Characters of a stop string: with stop strings, each step decodes a tail of that many tokens and more."""

_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"type": ["string", "null", "array"], "items": {"type": "object", "required": ["type"]}},
        "name": {"type": ["string", "null"]},
        "tool_call_id": {"type": ["string", "null"]},
        "tool_calls": {
            "type": ["array", "null"],
            "items": {
                "type": "object",
                "properties": {
                    "function": {
                        "type": "object",
                        "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
                        "required": ["name", "arguments"],
                    }
                },
                "required": ["function"],
            },
        },
        "function_call": {"type": "null"},
    },
    "required": ["role"],
}
_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "parameters": {"type": ["object", "null"]}},
            "required": ["name"],
        },
    },
    "required": ["function"],
}
_COUNT = {"type": "integer", "minimum": 1, "maximum": MAX_INT32}
_STOP_LENGTH = {"minLength": 1, "maxLength": MAX_STOP_LENGTH}
_STOP = {"type": "string", **_STOP_LENGTH}
_SUPPORTED: dict[str, Any] = {
    "model": {"type": "string"},
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    "tools": {"type": "array", "items": _TOOL},
    "tool_choice": {"enum": ["none", "auto"]},
    "temperature": {"type": "number", "minimum": 0, "maximum": 100},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": -1, "maximum": MAX_INT32, "not": {"const": 0}},
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "stop": {"type": ["string", "array"], "items": _STOP, **_STOP_LENGTH, "maxItems": 16},
    "seed": {"type": "integer", "minimum": -MAX_SEED, "maximum": MAX_SEED},
    "n": {**_COUNT, "maximum": MAX_CHOICES},
    "logprobs": {"type": "boolean"},
    "stream": {"type": "boolean"},
    "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
    "return_token_ids": {"type": "boolean"},
}
_NEUTRAL: dict[str, Any] = {
    "top_logprobs": {"const": 0},
    "parallel_tool_calls": {"const": True},
    "frequency_penalty": {"const": 0},
    "presence_penalty": {"const": 0},
    "logit_bias": {"maxProperties": 0},
    "response_format": {"type": "object", "properties": {"type": {"const": "text"}}},
}
_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
_REASONS = {
    "top_logprobs": "only the log-prob of the chosen token is known; request logprobs alone",
    "tool_choice": "calls cannot be forced: 'auto' or 'none'",
    "parallel_tool_calls": "the policy may write as many calls as it likes",
}
_SCHEMA = jsonschema.Draft202012Validator(
    {
        "type": "object",
        "properties": {**_SUPPORTED, **_NEUTRAL, **{name: {} for name in _IGNORED}},
        "required": ["messages"],
    }
)


class ApiError(Exception):
    """A refused or failed request, reported to the client in OpenAI's form.

    Attributes:
        message: description for people.
        code: description for programs, such as ``context_length_exceeded``.
        retry_after_s: seconds until a retry makes sense; None = never.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return additional HTTP headers of the response."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


@dataclass(frozen=True)
class ChatRequest:
    """A validated chat completion request; None = not set by the client.

    Attributes:
        messages: messages of the conversation, contents as strings and call arguments as values; the last message is
            not the assistant's. A content with images is a list of parts, ``{"type": "text", "text": ...}`` and
            ``{"type": "image", "image": file, "key": digest}``; see :meth:`drop_files`.
        tools: schemas declared in the prompt.
        reads_calls: parse tool calls in the response.
        stop: strings that end the response and are excluded from it.
        logprobs: return the log-prob of each token.
        stream: respond with server-sent events.
        include_usage: end the stream with the token counts.
        return_token_ids: return the token ids of prompt and choices.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    reads_calls: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False

    def drop_files(self) -> None:
        """Free the files of images, which are not needed while the response is generated."""
        for message in self.messages:
            for part in message["content"] if isinstance(message["content"], list) else ():
                part.pop("image", None)


def parse_request(body: bytes | bytearray) -> ChatRequest:
    """Parse and validate the body of ``POST /v1/chat/completions``.

    Raises:
        ApiError: the body is no JSON object, or a field is unknown or unsupported; names the field.
    """
    fields = _read_json(body)
    unknown = sorted(fields.keys() - _SUPPORTED.keys() - _NEUTRAL.keys() - set(_IGNORED))
    if unknown:
        raise ApiError(
            400, f"{unknown[0]} is not supported; supported are {', '.join(sorted(_SUPPORTED))}", param=unknown[0]
        )
    for name, most in _MOST_ENTRIES.items():  # the schema would be checked for each entry
        if isinstance(fields.get(name), list) and len(fields[name]) > most:
            raise ApiError(400, f"{name} has {len(fields[name])} entries; at most {most} are served", param=name)
    problem = jsonschema.exceptions.best_match(_SCHEMA.iter_errors(fields))
    if problem is not None:
        path = ".".join(map(str, problem.path)) or None
        reason = _REASONS.get(str(next(iter(problem.path), "")), "")
        text = f"{path or 'the body'}: {problem.message:.300}{'; ' if reason else ''}{reason}"
        raise ApiError(400, text, param=path)
    if (model := fields.get("model", MODEL)) != MODEL:
        text = f"the model {model!r:.100} does not exist; the policy is served as {MODEL!r}"
        raise ApiError(404, text, code="model_not_found", param="model")
    temperature = fields.get("temperature")
    if temperature is not None and 0 < temperature < LOWEST_TEMPERATURE:
        text = f"temperature={temperature} is too small to divide by: 0 (greedy), or at least {LOWEST_TEMPERATURE}"
        raise ApiError(400, text, param="temperature")
    return _request(fields)


def _request(fields: Mapping[str, Any]) -> ChatRequest:
    integers = {name for name, schema in _SUPPORTED.items() if schema.get("type") == "integer"}
    fields = {name: int(value) if name in integers else value for name, value in fields.items()}  # accepts 5.0
    messages = tuple(_message(message, f"messages.{number}") for number, message in enumerate(fields["messages"]))
    if messages[-1]["role"] == "assistant":
        raise ApiError(400, "the last message must not be the assistant's", param="messages")
    stop, tools = fields.get("stop", ()), tuple(fields.get("tools", ()))
    limits = [fields[name] for name in ("max_tokens", "max_completion_tokens") if name in fields]
    return ChatRequest(
        messages=messages,
        tools=tools,
        reads_calls=bool(tools) and fields.get("tool_choice", "auto") != "none",
        temperature=fields.get("temperature"),
        top_p=fields.get("top_p"),
        top_k=fields.get("top_k"),
        max_tokens=min(limits, default=None),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        seed=fields.get("seed"),
        n=fields.get("n", 1),
        logprobs=fields.get("logprobs", False),
        stream=fields.get("stream", False),
        include_usage=fields.get("stream_options", {}).get("include_usage", False),
        return_token_ids=fields.get("return_token_ids", False),
    )


def _read_json(body: bytes | bytearray) -> dict[str, Any]:
    try:
        fields = parse_json(body, parse_constant=_refuse_constant)
        if b"\\u" in body:  # half a surrogate pair is valid JSON, but no valid text
            json.dumps(fields, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object")
    return {name: value for name, value in fields.items() if value is not None}


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _message(message: Mapping[str, Any], path: str) -> Message:
    """Join the texts of the content and drop fields that templates do not read, such as ``refusal``."""
    role = "system" if message["role"] == "developer" else message["role"]
    normalized: dict[str, Any] = {"role": role, "content": _content(message.get("content"), role, path)}
    if role == "assistant" and message.get("tool_calls"):
        normalized["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": _arguments(call["function"]["arguments"]),
                },
            }
            for call in message["tool_calls"]
        ]
    return normalized | {name: message[name] for name in ("name", "tool_call_id") if message.get(name) is not None}


def _content(content: Any, role: str, path: str) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    parts, kinds = list[dict[str, Any]](), ("text", "image_url") if role in _SHOW_IMAGES else ("text",)
    for number, part in enumerate(content):
        where = f"{path}.content.{number}"
        if part["type"] not in kinds:
            text = f"{where}: parts must be texts, or images (image_url) of a user or a tool, got {part['type']!r:.40}"
            raise ApiError(400, text, param=path)
        try:
            file = part_file(part, where)
        except DataError as error:
            raise ApiError(400, error.text, code=error.code, param=path) from error
        image = {"type": "image", "image": file, "key": image_key(file)} if file is not None else None
        parts.append(image or {"type": "text", "text": part["text"]})
    return parts if any(part["type"] == "image" for part in parts) else "".join(part["text"] for part in parts)


def _arguments(arguments: str) -> Any:
    """Decode the arguments of a call for the chat template; invalid JSON stays a string."""
    try:
        return parse_json(arguments)
    except (ValueError, RecursionError):
        return arguments
