"""What is wrong with a configuration, collected so that the user sees everything at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
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


def nearest_keys(path: str, known: Iterable[str]) -> list[str]:
    """The known keys that a misspelt or misplaced one most likely means, best first.

    More than one where a name occurs in several equally near groups; empty where nothing is close.
    """
    group, _, name = path.rpartition(".")

    def closeness(candidate: str) -> float:
        other_group, _, other_name = candidate.rpartition(".")
        return 0.7 * _similarity(name, other_name) + 0.3 * _similarity(group, other_group)

    scores = {candidate: closeness(candidate) for candidate in known}
    best = max(scores, key=scores.__getitem__, default="")
    if scores.get(best, 0.0) < 0.6:
        return []
    best_group, _, best_name = best.rpartition(".")
    if best_group == group:
        return [best]
    near = [k for k in scores if k.rpartition(".")[2] == best_name and scores[k] > scores[best] - 0.06]
    return sorted(near, key=lambda k: -scores[k])[:3]


def _similarity(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
