"""The one table of verl's keys that are not megarl's."""

from __future__ import annotations

from functools import cache

from megarl.config.verl.roles import role_rules
from megarl.config.verl.rollout import ENGINE_VALUES, rollout_rules
from megarl.config.verl.rules import Renamed, Rule, Values
from megarl.config.verl.run import VALUES, run_rules
from megarl.config.verl.transformer import transformer_rules

VALUE_RULES: dict[str, Values] = VALUES | ENGINE_VALUES
"""Keys of both, some of whose values differ."""


@cache
def rules() -> dict[str, Rule]:
    """Every rule by path; ``*`` at the end of a path stands for anything."""
    return run_rules() | rollout_rules() | role_rules() | transformer_rules()


@cache
def _patterns() -> list[str]:
    """Beginnings of the paths that end in ``*``, the longest first."""
    return sorted((path[:-1] for path in rules() if path.endswith("*")), key=len, reverse=True)


def rule_for(path: str) -> Rule | None:
    """The rule for a key: its own, or that of the longest beginning; None where it is no key of verl's to be told of.

    A translated key comes with the whole name that it has here.
    """
    exact = rules().get(path)
    if exact is not None:
        return exact
    for start in _patterns():
        if path.startswith(start) or path == start.removesuffix("."):
            rule = rules()[f"{start}*"]
            if isinstance(rule, Renamed):
                if path.startswith(f"{rule.to}."):
                    return None  # where verl's keys go is megarl's own
                return Renamed(f"{rule.to}.{path.removeprefix(start)}", rule.values, rule.left_out, rule.why)
            return rule
    return None
