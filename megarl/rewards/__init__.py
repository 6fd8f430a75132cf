"""Rewards: reward functions, the process pool that calls them, and the manager that scores a batch.

- ``registry``: reward functions by name, file, dotted path or data source. ``rules``: the built-in functions.
- ``calling``, ``outcome``: calls of a function, and their results. ``pool``: processes with time limits and retries.
- ``scorer``: arguments of the functions, and the weighted sum of several. ``manager``: scores a batch.
- ``shaping``: length rewards.
- ``sandbox``: runs generated programs. ``http``: requests to judges and sandboxes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.rewards.calling import FunctionSpec, InfrastructureFailure
from megarl.rewards.registry import custom_reward_spec, load_reward_function, register_reward
from megarl.rewards.rules import AGENT_RESULT, agent_score, exact_integer, search_exact_match
from megarl.rewards.scorer import Scorer, ScoreTerm, in_driver

if TYPE_CHECKING:
    from megarl.rewards.manager import FailurePolicy, RewardManager, Scored

__all__ = [
    "AGENT_RESULT",
    "FailurePolicy",
    "FunctionSpec",
    "InfrastructureFailure",
    "RewardManager",
    "ScoreTerm",
    "Scored",
    "Scorer",
    "agent_score",
    "custom_reward_spec",
    "exact_integer",
    "in_driver",
    "load_reward_function",
    "register_reward",
    "search_exact_match",
]


def __getattr__(name: str) -> object:
    # Lazy, so that reward functions can be checked and called without importing torch.
    if name not in ("FailurePolicy", "RewardManager", "Scored"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megarl.rewards import manager

    return getattr(manager, name)
