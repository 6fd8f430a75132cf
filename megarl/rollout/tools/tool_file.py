"""Tools from a YAML file, as ``multi_turn.tool_config_path`` names it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megarl.errors import ConfigError
from megarl.rollout.tools.tool import Tool, find_tool

_ENTRY = {"class_name", "config", "tool_schema", "timeout_s", "retries"}


class EquippedTool(NamedTuple):
    """A tool with how patiently it is called.

    Attributes:
        tool: the tool.
        timeout_s: seconds that one attempt may take.
        retries: further attempts after one that failed.
    """

    tool: Tool
    timeout_s: float = 30.0
    retries: int = 2


def load_tools(path: str) -> dict[str, EquippedTool]:
    """The tools of a YAML file, by their names.

    Args:
        path: file with ``tools:``, a list of entries ``class_name`` (a registered name, ``path.py:Class`` or a dotted
            path), and optionally ``config`` (handed to the class), ``tool_schema``, ``timeout_s`` and ``retries``.

    Raises:
        ConfigError: the file is not there or is malformed, or a tool cannot be built; names file and entry.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"actor_rollout_ref.rollout.multi_turn.tool_config_path={path}: there is no such file")
    try:
        content = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML file: {error}") from error
    entries = content.get("tools") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path} must have 'tools', a list with at least one entry; it has {content!r:.200}")
    tools: dict[str, EquippedTool] = {}
    for number, entry in enumerate(entries):
        equipped = _equip(entry, f"{path}, tools[{number}]")
        if equipped.tool.name in tools:
            raise ConfigError(f"{path}, tools[{number}]: there are two tools called {equipped.tool.name!r}")
        tools[equipped.tool.name] = equipped
    return tools


def _equip(entry: Any, where: str) -> EquippedTool:
    if not isinstance(entry, Mapping) or "class_name" not in entry:
        raise ConfigError(f"{where} must be a mapping with 'class_name', got {entry!r:.200}")
    unknown = sorted(entry.keys() - _ENTRY)
    if unknown:
        raise ConfigError(f"{where}: unknown keys {unknown}; known are {sorted(_ENTRY)}")
    patience = {name: entry[name] for name in ("timeout_s", "retries") if name in entry}
    for name, least in (("timeout_s", 0.001), ("retries", 0)):
        value = patience.get(name, least)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
            raise ConfigError(f"{where}: {name}={value!r} must be a number of at least {least}")
    try:
        tool = find_tool(str(entry["class_name"]))(schema=entry.get("tool_schema"), config=entry.get("config"))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return EquippedTool(tool, **patience)
