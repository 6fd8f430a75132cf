"""A chat completion as it is asked for: checked against a schema, fields of no meaning here refused.

A field is honoured, or it is ignored because it cannot change the answer (``user``, ``metadata``, ...), or only its
neutral value is taken (``presence_penalty: 0``), or it is refused by name. null is the same as absent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema

from megarl.rollout.agents.loop import Message
from megarl.rollout.endpoint.errors import ApiError

MODEL = "policy"
"""The name of the one model that is served."""
MOST_CHOICES = 64
# Below, dividing by it overflows; and it is greedy in all but name.
LOWEST_TEMPERATURE = 0.01

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
_COUNT = {"type": "integer", "minimum": 1}
_HONOURED: dict[str, Any] = {
    "model": {"type": "string"},
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
    "tools": {"type": "array", "items": _TOOL},
    "tool_choice": {"enum": ["none", "auto"]},
    "temperature": {"type": "number", "minimum": 0, "maximum": 100},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": -1, "not": {"const": 0}},
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "stop": {"type": ["string", "array"], "items": {"type": "string", "minLength": 1}, "minLength": 1, "maxItems": 16},
    "seed": {"type": "integer"},
    "n": {**_COUNT, "maximum": MOST_CHOICES},
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
_WHY = {
    "top_logprobs": "only the log-prob of the chosen token is known; ask for logprobs alone",
    "tool_choice": "calls cannot be forced: 'auto' or 'none'",
    "parallel_tool_calls": "the policy writes as many calls as it likes",
}
_SCHEMA = jsonschema.Draft202012Validator(
    {
        "type": "object",
        "properties": {**_HONOURED, **_NEUTRAL, **{name: {} for name in _IGNORED}},
        "required": ["messages"],
    }
)


@dataclass(frozen=True)
class ChatRequest:
    """What is asked for; None = the request leaves it open.

    Attributes:
        messages: of the conversation, the last one not the assistant's; contents are texts, arguments of calls values.
        tools: schemas that the prompt declares.
        reads_calls: calls in the answer are to be told apart from its text.
        temperature: see :class:`megarl.rollout.interface.SamplingParams`, also for the next two.
        top_p: as there.
        top_k: as there.
        max_tokens: most tokens to generate.
        stop: texts at which the answer ends; they are no part of it.
        seed: source of random numbers.
        n: answers.
        logprobs: each token is to come with its log-prob.
        stream: the answer is to come as server-sent events.
        include_usage: and the last of them is to count the tokens.
        return_token_ids: ids of prompt and answers are to come, too.
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


def parse_request(body: bytes) -> ChatRequest:
    """The request in the body of ``POST /v1/chat/completions``.

    Raises:
        ApiError: it is no JSON, or a field is unknown or has no meaning here; names the field.
    """
    fields = _read(body)
    unknown = sorted(fields.keys() - _HONOURED.keys() - _NEUTRAL.keys() - set(_IGNORED))
    if unknown:
        raise ApiError(
            400, f"{unknown[0]} is not supported; supported are {', '.join(sorted(_HONOURED))}", param=unknown[0]
        )
    problem = jsonschema.exceptions.best_match(_SCHEMA.iter_errors(fields))
    if problem is not None:
        where = ".".join(map(str, problem.path)) or None
        why = _WHY.get(str(next(iter(problem.path), "")), "")
        text = f"{where or 'the body'}: {problem.message:.300}{'; ' if why else ''}{why}"
        raise ApiError(400, text, param=where)
    _check_model(fields.get("model", MODEL))
    temperature = fields.get("temperature")
    if temperature is not None and 0 < temperature < LOWEST_TEMPERATURE:
        text = f"temperature={temperature} is too small to divide by: 0 (greedy), or at least {LOWEST_TEMPERATURE}"
        raise ApiError(400, text, param="temperature")
    return _request(fields)


def _request(fields: Mapping[str, Any]) -> ChatRequest:
    fields = {name: int(value) if _is_whole(name) else value for name, value in fields.items()}  # 5.0 is whole, too
    stop, tools = fields.get("stop", ()), tuple(fields.get("tools", ()))
    limits = [fields[name] for name in ("max_tokens", "max_completion_tokens") if name in fields]
    return ChatRequest(
        messages=_messages(fields["messages"]),
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


def _is_whole(name: str) -> bool:
    return _HONOURED.get(name, {}).get("type") == "integer"


def _read(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body, parse_constant=_no_number)
        if b"\\u" in body:  # half a surrogate pair is JSON, and no text
            json.dumps(fields, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object")
    return {name: value for name, value in fields.items() if value is not None}


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _check_model(name: str) -> None:
    if name != MODEL:
        text = f"the model {name!r:.100} does not exist; the policy is served as {MODEL!r}"
        raise ApiError(404, text, code="model_not_found", param="model")


def _messages(given: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    messages = tuple(_message(message, f"messages.{number}") for number, message in enumerate(given))
    if messages[-1]["role"] == "assistant":
        raise ApiError(400, "the last message must not be the assistant's", param="messages")
    return messages


def _message(given: Mapping[str, Any], where: str) -> Message:
    """With its content as one text; what else clients may send along, such as ``refusal``, is left out."""
    role = "system" if given["role"] == "developer" else given["role"]
    message: dict[str, Any] = {"role": role, "content": _text(given.get("content"), where)}
    if role == "assistant" and given.get("tool_calls"):
        message["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": _value(call["function"]["arguments"]),
                },
            }
            for call in given["tool_calls"]
        ]
    return message | {name: given[name] for name in ("name", "tool_call_id") if given.get(name) is not None}


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part["type"] != "text" or not isinstance(part.get("text"), str):
            raise ApiError(400, f"{where}.content: parts must be texts, got {part['type']!r:.40}", param=where)
    return "".join(part["text"] for part in content)


def _value(arguments: str) -> Any:
    """Arguments of a call as chat templates want them; what is no JSON stays a text."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
