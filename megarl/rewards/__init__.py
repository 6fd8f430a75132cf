"""Reward functions, by name or from a user's file, and the manager that scores a batch with one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.rewards.agent_score import AGENT_RESULT, agent_score
from megarl.rewards.arithmetic import exact_integer
from megarl.rewards.exact_match import search_exact_match
from megarl.rewards.registry import custom_reward_spec, load_reward_function, register_reward

if TYPE_CHECKING:
    from megarl.rewards.manager import RewardManager, Scored

__all__ = [
    "AGENT_RESULT",
    "RewardManager",
    "Scored",
    "agent_score",
    "custom_reward_spec",
    "exact_integer",
    "load_reward_function",
    "register_reward",
    "search_exact_match",
]


def __getattr__(name: str) -> object:
    # on first use, so that a reward function can be checked before anything imports torch
    if name not in ("RewardManager", "Scored"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megarl.rewards import manager

    return getattr(manager, name)
