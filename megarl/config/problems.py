"""Problems of a configuration, collected so that one error reports all of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, NamedTuple

from megarl.base.errors import ConfigError


class Problem(NamedTuple):
    """One wrong key."""

    path: str
    value: Any
    text: str  # the problem and its remedy
    code: str  # stable name of the problem (`megarl.base.errors.MegarlError`)
    doc: str = ""

    def describe(self) -> str:
        """Describe the problem in lines of text, with the key written as an override."""
        lines = [f"{self.path}={format_value(self.value)}", f"    {self.text} [{self.code}]"]
        if self.doc:
            lines.append(f"    meaning: {self.doc}")
        return "\n".join(lines)


class InvalidConfigError(ConfigError):
    """A configuration with one or more problems; ``problems`` lists them, ``code`` is the first one's.

    Args:
        run: the run of a sweep that they belong to; empty for a single run.
    """

    def __init__(self, problems: Iterable[Problem], run: str = "") -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "The configuration has a problem:" if count == 1 else f"The configuration has {count} problems:"
        body = "\n".join(problem.describe() for problem in self.problems)
        head = f"In the run of the sweep with {run}:\n{head}" if run else head
        text = f"{head}\n" + "\n".join(f"  {line}" for line in body.splitlines())
        super().__init__(text, code=self.problems[0].code if self.problems else "")

    def __str__(self) -> str:
        return self.text  # each problem ends with its code


def format_value(value: Any) -> str:
    """Format a value in the syntax of an override, cut to a readable length."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = f"[{','.join(map(format_value, value))}]" if isinstance(value, list) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def nearest_keys(path: str, candidates: Iterable[str]) -> list[str]:
    """List the valid keys closest to a misspelt or misplaced one, best first.

    Several if the name occurs in equally close sections; empty if no key is close.
    """
    group, _, name = path.rpartition(".")

    def closeness(candidate: str) -> float:
        candidate_group, _, candidate_name = candidate.rpartition(".")
        return 0.7 * _similarity(name, candidate_name) + 0.3 * _similarity(group, candidate_group)

    scores = {candidate: closeness(candidate) for candidate in candidates}
    best = max(scores, key=scores.__getitem__, default="")
    if scores.get(best, 0.0) < 0.6:
        return []
    best_group, _, best_name = best.rpartition(".")
    if best_group == group:
        return [best]
    near = [k for k in scores if k.rpartition(".")[2] == best_name and scores[k] > scores[best] - 0.06]
    return sorted(near, key=lambda k: -scores[k])[:3]


def namesakes(path: str, candidates: Iterable[str]) -> list[str]:
    """List the keys with the name of a misplaced one, or the most similar key of its section."""
    group, _, name = path.rpartition(".")
    same = [key for key in candidates if key.rpartition(".")[2] == name]
    siblings = {key.rpartition(".")[2]: key for key in candidates if key.rpartition(".")[0] == group}
    return nearest_keys(path, same) or [siblings[n] for n in difflib.get_close_matches(name, siblings, 1, 0.7)]


def _similarity(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()
