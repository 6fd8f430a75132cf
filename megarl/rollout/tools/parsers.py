"""Calls of tools in what a model wrote, in the formats that chat templates teach."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megarl.errors import ConfigError


@dataclass(frozen=True)
class ToolCall:
    """One call, as the model wrote it.

    Attributes:
        name: of the tool; empty where the call cannot be read.
        arguments: any JSON value, to be checked against the tool's schema.
        problem: why the call cannot be read, in words for the model; None: it can.
        span: where it begins and ends in the text; None: the parser does not tell.
    """

    name: str = ""
    arguments: Any = None
    problem: str | None = None
    span: tuple[int, int] | None = field(default=None, compare=False)


Parser = Callable[[str], list[ToolCall]]
"""From the text of a turn, special tokens included, to its calls in their order; none where it calls nothing."""

PARSERS: dict[str, Parser] = {}


def register_tool_parser(name: str) -> Callable[[Parser], Parser]:
    """Decorator: makes a parser known as ``multi_turn.format``."""

    def register(parser: Parser) -> Parser:
        PARSERS[name] = parser
        return parser

    return register


def find_parser(name: str) -> Parser:
    """The parser of a format.

    Raises:
        ConfigError: there is none; the known ones are listed.
    """
    if name not in PARSERS:
        known = ", ".join(sorted(PARSERS))
        raise ConfigError(f"actor_rollout_ref.rollout.multi_turn.format={name} is unknown; known ones: {known}")
    return PARSERS[name]


_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


@register_tool_parser("hermes")
def hermes_calls(text: str) -> list[ToolCall]:
    """Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them."""
    return [replace(_read(match[1], "arguments"), span=match.span()) for match in _HERMES.finditer(text)]


_LLAMA_TAG = "<|python_tag|>"
_LLAMA_END = re.compile(r"<\|(?:eom_id|eot_id|end_of_text)\|>")


@register_tool_parser("llama3_json")
def llama3_calls(text: str) -> list[ToolCall]:
    """Llama 3: the turn is one call ``{"name": ..., "parameters": {...}}`` or several, with ``;`` between them.

    With ``<|python_tag|>`` what follows it is the calls; without, the whole turn must be, or it calls nothing.
    """
    before, tag, after = text.partition(_LLAMA_TAG)
    body = _LLAMA_END.sub("", after if tag else before).strip()
    if not tag and not body.startswith("{"):
        return []
    span = (len(before) if tag else 0, len(text))  # of all of them: the turn has no text behind them
    calls = [replace(_of_value(value, "parameters"), span=span) for value in _values(body)]
    if not tag and all(call.problem for call in calls):
        return []  # an answer that happens to be JSON, or to begin like it
    return calls


def _values(body: str) -> Iterator[Any]:
    """JSON values one after the other, ``;`` or white space between them; an error in place of what cannot be read."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(body):
        try:
            value, at = decoder.raw_decode(body, at)
        except ValueError as error:
            yield error
            return
        yield value
        while at < len(body) and body[at] in "; \t\r\n":
            at += 1


def _read(body: str, arguments_key: str) -> ToolCall:
    try:
        value = json.loads(body)
    except ValueError as error:
        value = error
    return _of_value(value, arguments_key)


def _of_value(value: Any, arguments_key: str) -> ToolCall:
    if isinstance(value, ValueError):
        return ToolCall(problem=f"the call is not valid JSON: {value}")
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return ToolCall(problem=f'the call must be a JSON object with "name" and "{arguments_key}"')
    other = {"arguments": "parameters", "parameters": "arguments"}[arguments_key]
    arguments = value.get(arguments_key, value.get(other, {}))
    if isinstance(arguments, str):  # some models write the arguments as a text that holds JSON
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            return ToolCall(problem=f"the arguments of {value['name']} are not valid JSON: {error}")
    return ToolCall(str(value["name"]), arguments)
