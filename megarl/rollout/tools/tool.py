"""What a tool is: a JSON schema for the model, and an asynchronous call."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import jsonschema

from megarl.errors import ConfigError, MegarlError
from megarl.own_module import load_class
from megarl.rollout.agents.loop import Conversation


class ToolError(MegarlError):
    """A call that the model got wrong; the message is shown to it, so that it can try again."""


@dataclass(frozen=True)
class ToolResult:
    """What a tool answers.

    Attributes:
        text: for the model.
        metrics: numbers about the call, summed over a conversation's calls.
    """

    text: str
    metrics: Mapping[str, float] = field(default_factory=dict)


class Tool(abc.ABC):
    """Something that the model may call. One object serves all conversations, many at a time.

    Args:
        schema: as OpenAI's ``tools`` have it, ``{"type": "function", "function": {"name", "description",
            "parameters"}}``; None = the class's own.
        config: anything the tool wants to know.

    Raises:
        ConfigError: there is no schema, or it is malformed.
    """

    schema: ClassVar[Mapping[str, Any] | None] = None
    """Schema of tools of this class, where the configuration gives none."""

    def __init__(self, schema: Mapping[str, Any] | None = None, config: Mapping[str, Any] | None = None) -> None:
        self.declaration = checked_schema(self.schema if schema is None else schema, type(self).__name__)
        self.config = dict(config or {})

    @property
    def name(self) -> str:
        """By which the model calls it."""
        return str(self.declaration["function"]["name"])

    @abc.abstractmethod
    async def call(self, arguments: Mapping[str, Any], conversation: Conversation) -> str | ToolResult:
        """Does what the model asked for.

        Args:
            arguments: fit the schema.
            conversation: in which the call stands, with its row's facts.

        Raises:
            ToolError: the model asked for something wrong; it is told.
            Exception: anything else is a failure of the tool: it is tried again, and then fails the conversation.
        """

    def check(self, arguments: Any) -> Mapping[str, Any]:
        """The arguments of a call, if they fit the schema.

        Raises:
            ToolError: they do not; says where.
        """
        if not isinstance(arguments, Mapping):
            raise ToolError(f"the arguments of {self.name} must be a JSON object, got {arguments!r:.100}")
        validator = jsonschema.Draft202012Validator(self.declaration["function"].get("parameters", {}))
        problem = jsonschema.exceptions.best_match(validator.iter_errors(arguments))
        if problem is not None:
            where = f" at {'.'.join(map(str, problem.path))}" if problem.path else ""
            raise ToolError(f"the arguments of {self.name} do not fit its schema{where}: {problem.message:.200}")
        return arguments


def checked_schema(schema: Mapping[str, Any] | None, what: str) -> Mapping[str, Any]:
    """A tool's schema, if it has what a chat template and a check of arguments need.

    Raises:
        ConfigError: it has not.
    """
    function = schema.get("function") if isinstance(schema, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(
            f"tool {what}: tool_schema={schema!r:.200} must be a mapping with type: function and function: name, "
            "description, parameters"
        )
    try:
        jsonschema.Draft202012Validator.check_schema(function.get("parameters", {}))
    except jsonschema.SchemaError as error:
        raise ConfigError(f"tool {what}: tool_schema.function.parameters is no JSON schema: {error.message}") from error
    assert schema is not None
    return {"type": "function", **schema}


_Tool = TypeVar("_Tool", bound=type[Tool])
_TOOLS: dict[str, type[Tool]] = {}


def register_tool(name: str) -> Callable[[_Tool], _Tool]:
    """Decorator: makes a class known as ``class_name`` in a tool file.

    Raises:
        ConfigError: another class has the name.
    """

    def register(tool: _Tool) -> _Tool:
        if _TOOLS.get(name, tool) is not tool:
            raise ConfigError(f"tool {name!r} is registered already, by {_TOOLS[name].__module__}; choose another name")
        _TOOLS[name] = tool
        return tool

    return register


def find_tool(name: str) -> type[Tool]:
    """The class of a tool.

    Args:
        name: a registered name, ``path.py:Class``, or ``package.module.Class``.

    Raises:
        ConfigError: there is no such tool (the registered ones are listed).
    """
    if name in _TOOLS:
        return _TOOLS[name]
    if ":" not in name and "." not in name:
        raise ConfigError(f"tool {name!r} is unknown; known ones: {sorted(_TOOLS)}; or give path.py:Class")
    return load_class(name, Tool, "tool")  # type: ignore[type-abstract]
