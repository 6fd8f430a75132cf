"""What is wrong with a configuration, collected so that the user sees everything at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from megarl.errors import ConfigError


class Problem(NamedTuple):
    """One wrong key."""

    path: str  # full dotted path
    value: Any
    text: str  # what is wrong, and what would be right
    doc: str = ""  # what the key means

    @classmethod
    def at(cls, config: Any, path: str, text: str) -> Problem:
        """A problem with the value that a typed configuration has at a path."""
        return cls(path, value_at(config, path), text)

    def describe(self) -> str:
        """The problem in lines of text, the key written as an override."""
        lines = [f"{self.path}={show(self.value)}", f"    {self.text}"]
        if self.doc:
            lines.append(f"    meaning: {self.doc}")
        return "\n".join(lines)


class InvalidConfigError(ConfigError):
    """A configuration with one or more problems; ``problems`` has them one by one."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "The configuration has a problem:" if count == 1 else f"The configuration has {count} problems:"
        body = "\n".join(problem.describe() for problem in self.problems)
        super().__init__(f"{head}\n" + "\n".join(f"  {line}" for line in body.splitlines()))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)


def value_at(config: Any, path: str) -> Any:
    """The value at a dotted path of a typed configuration.

    Raises:
        AttributeError: there is no such key.
    """
    for name in path.split("."):
        config = getattr(config, name)
    return config


def show(value: Any) -> str:
    """A value as one would write it in an override, cut to a readable length."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = f"[{','.join(map(show, value))}]" if isinstance(value, list) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def nearest_key(path: str, known: Sequence[str]) -> str | None:
    """The known key that a misspelt or misplaced one most likely means, or None where nothing is close."""

    def closeness(candidate: str) -> float:
        (group, _, name), (other_group, _, other_name) = path.rpartition("."), candidate.rpartition(".")
        names = difflib.SequenceMatcher(None, name, other_name).ratio()
        groups = difflib.SequenceMatcher(None, group, other_group).ratio()
        return 0.7 * names + 0.3 * groups

    best = max(known, key=closeness, default=None)
    return best if best is not None and closeness(best) >= 0.6 else None
