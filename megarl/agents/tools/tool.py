"""Tools: the base class with its JSON schema, the registry, and the YAML file that lists a run's tools."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jsonschema
import yaml

from megarl.agents.types import Conversation
from megarl.base.errors import ConfigError, MegarlError
from megarl.base.registry import Registry
from megarl.base.user_code import load_user_class

_ENTRY_KEYS = {"class_name", "config", "tool_schema", "timeout_s", "retries"}


Content: TypeAlias = "str | Sequence[Mapping[str, Any]]"
"""Text of a message, or its parts."""


class ToolError(MegarlError):
    """A model's mistake in a tool call; the message becomes the tool's result, for a retry."""

    def __init__(self, text: str) -> None:
        super().__init__(text, code="tool.wrong-call")


@dataclass(frozen=True)
class ToolResult:
    """Result of a tool call.

    Attributes:
        content: text for the model, or a list of parts with images, see :func:`megarl.data.images.read_parts`.
        metrics: numbers about the call, summed over a conversation's calls.
    """

    content: Content
    metrics: Mapping[str, float] = field(default_factory=dict)


class Tool(abc.ABC):
    """Base class of tools. One object serves all conversations concurrently.

    Args:
        schema: schema in the form of OpenAI's ``tools``, ``{"type": "function", "function": {"name", "description",
            "parameters"}}``; None = the class's schema.

    Raises:
        ConfigError: the schema is missing or malformed.
    """

    schema: ClassVar[Mapping[str, Any] | None] = None
    """Schema of this class, used if the configuration has none."""

    def __init__(self, schema: Mapping[str, Any] | None = None, config: Mapping[str, Any] | None = None) -> None:
        self.declaration = checked_schema(self.schema if schema is None else schema, type(self).__name__)
        self.config = dict(config or {})

    @property
    def name(self) -> str:
        """Function name in the schema, by which the model calls the tool."""
        return str(self.declaration["function"]["name"])

    @abc.abstractmethod
    async def call(self, arguments: Mapping[str, Any], conversation: Conversation) -> Content | ToolResult:
        """Run one call.

        Args:
            conversation: the conversation of the call; ``facts`` has the data row's columns.

        Raises:
            ToolError: a mistake of the model; the message is returned to it.
            Exception: a failure of the tool; the call is retried and finally fails the conversation.
        """

    def check(self, arguments: Any) -> Mapping[str, Any]:
        """Validate the arguments of a call against the schema and return them.

        Raises:
            ToolError: the arguments do not match; names the position.
        """
        if not isinstance(arguments, Mapping):
            raise ToolError(f"the arguments of {self.name} must be a JSON object, got {arguments!r:.100}")
        validator = jsonschema.Draft202012Validator(self.declaration["function"].get("parameters", {}))
        problem = jsonschema.exceptions.best_match(validator.iter_errors(arguments))
        if problem is not None:
            position = f" at {'.'.join(map(str, problem.path))}" if problem.path else ""
            raise ToolError(f"the arguments of {self.name} do not fit its schema{position}: {problem.message:.200}")
        return arguments


def checked_schema(schema: Mapping[str, Any] | None, owner: str) -> Mapping[str, Any]:
    """Validate a tool's schema and return it with its ``type``.

    Args:
        owner: name of the tool's class, for the error message.

    Raises:
        ConfigError: the schema is malformed.
    """
    function = schema.get("function") if isinstance(schema, Mapping) else None
    if schema is None or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(
            f"tool {owner}: tool_schema={schema!r:.200} must be a mapping with type: function and function: name, "
            "description, parameters",
            code="tool.bad-schema",
        )
    try:
        jsonschema.Draft202012Validator.check_schema(function.get("parameters", {}))
    except jsonschema.SchemaError as error:
        text = f"tool {owner}: tool_schema.function.parameters is no JSON schema: {error.message}"
        raise ConfigError(text, code="tool.bad-schema") from error
    return {"type": "function", **schema}


TOOLS: Registry[type[Tool]] = Registry(
    "class_name", loader=lambda spec, key: load_user_class(spec, Tool, key), hint="or write path.py:Class"
)


register_tool = TOOLS.register
"""Decorator that registers a tool class for ``class_name`` in a tool file."""


class ToolEntry(NamedTuple):
    """A tool of the tool file with its time limit and retries.

    Attributes:
        timeout_s: seconds per attempt.
        retries: further attempts after a failed one.
    """

    tool: Tool
    timeout_s: float = 30.0
    retries: int = 2


def load_tools(path: str) -> dict[str, ToolEntry]:
    """Build the tools of a YAML file, by name.

    Args:
        path: file with ``tools:``, a list of entries with ``class_name`` (a registered name, ``path.py:Class`` or a
            dotted path), and optionally ``config`` (passed to the class), ``tool_schema``, ``timeout_s``, ``retries``.

    Raises:
        ConfigError: the file is missing or malformed, or a tool cannot be built; names file and entry.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        text = f"actor_rollout_ref.rollout.multi_turn.tool_config_path={path}: there is no such file"
        raise ConfigError(text, code="tool.file-missing")
    try:
        content = yaml.safe_load(file.read_bytes())  # YAML is UTF-8, whatever the locale
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML file: {error}", code="tool.file-yaml") from error
    entries = content.get("tools") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries:
        text = f"{path} must have 'tools', a list with at least one entry; it has {content!r:.200}"
        raise ConfigError(text, code="tool.file-entries")
    tools: dict[str, ToolEntry] = {}
    for number, fields in enumerate(entries):
        entry = _build_entry(fields, f"{path}, tools[{number}]")
        if entry.tool.name in tools:
            text = f"{path}, tools[{number}]: two tools are named {entry.tool.name!r}"
            raise ConfigError(text, code="tool.name-twice")
        tools[entry.tool.name] = entry
    return tools


def _build_entry(fields: Any, position: str) -> ToolEntry:
    if not isinstance(fields, Mapping) or "class_name" not in fields:
        raise ConfigError(f"{position} needs 'class_name', got {fields!r:.200}", code="tool.file-entries")
    unknown = sorted(fields.keys() - _ENTRY_KEYS)
    if unknown:
        raise ConfigError(f"{position}: unknown keys {unknown}; use {sorted(_ENTRY_KEYS)}", code="tool.unknown-key")
    policy = {name: fields[name] for name in ("timeout_s", "retries") if name in fields}
    for name, minimum in (("timeout_s", 0.001), ("retries", 0)):
        value = policy.get(name, minimum)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < minimum:
            raise ConfigError(f"{position}: {name}={value!r} must be a number >= {minimum}", code="tool.entry-limits")
    try:
        tool = TOOLS.find(str(fields["class_name"]))(schema=fields.get("tool_schema"), config=fields.get("config"))
    except ConfigError as error:
        raise ConfigError(f"{position}: {error.text}", code=error.code) from error
    return ToolEntry(tool, **policy)
