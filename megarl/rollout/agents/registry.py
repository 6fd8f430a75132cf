"""Which agent loops exist: a decorator and a dict, and one's own from a file."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TypeVar

from megarl.errors import ConfigError
from megarl.own_module import load_class
from megarl.rollout.agents.loop import AgentLoop

_Loop = TypeVar("_Loop", bound=type[AgentLoop])

_LOOPS: dict[str, type[AgentLoop]] = {}
# Imported on demand: tools and search bring dependencies of their own.
_BUILT_IN = {
    "single_turn_agent": "megarl.rollout.agents.single_turn",
    "tool_agent": "megarl.rollout.agents.tool_agent",
    "search_agent": "megarl.rollout.agents.search_agent",
    "external_agent": "megarl.rollout.agents.external_agent",
}


def register_agent_loop(name: str) -> Callable[[_Loop], _Loop]:
    """Decorator: makes a class known as an agent loop's ``name``, as rows and configuration call it.

    Raises:
        ConfigError: another class has the name.
    """

    def register(loop: _Loop) -> _Loop:
        known = _LOOPS.get(name, loop)
        if (known.__module__, known.__qualname__) != (loop.__module__, loop.__qualname__):
            raise ConfigError(f"agent loop {name!r} is registered already, by {known.__module__}; choose another name")
        _LOOPS[name] = loop
        return loop

    return register


def known_agent_loops() -> list[str]:
    """Names that :func:`find_agent_loop` accepts, sorted."""
    return sorted({*_LOOPS, *_BUILT_IN})


def find_agent_loop(name: str) -> type[AgentLoop]:
    """The class of an agent loop.

    Args:
        name: a registered name, ``path.py:Class``, or ``package.module.Class``.

    Raises:
        ConfigError: there is no such loop (the known ones are listed), or the class is no agent loop.
    """
    if name not in _LOOPS and name in _BUILT_IN:
        importlib.import_module(_BUILT_IN[name])
    if name in _LOOPS:
        return _LOOPS[name]
    if ":" not in name and "." not in name:
        known = ", ".join(known_agent_loops())
        raise ConfigError(f"agent loop {name!r} is unknown; known ones: {known}; or give path.py:Class")
    return load_class(name, AgentLoop, "agent loop")  # type: ignore[type-abstract]
