"""Runners of reward functions: in the driver, or in a pool of processes with time limits and retries."""

from typing import TypeAlias

from megarl.rewards.pool.jobs import InDriverRunner, RewardJob, RunCounts
from megarl.rewards.pool.pool import RewardPool

__all__ = ["InDriverRunner", "RewardJob", "RewardPool", "RunCounts", "Runner"]

Runner: TypeAlias = InDriverRunner | RewardPool
