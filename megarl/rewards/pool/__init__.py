"""Runners of reward functions: in the driver, or in a pool of processes with time limits and retries."""

from megarl.rewards.pool.pool import RewardPool
from megarl.rewards.pool.runner import InDriverRunner, RewardJob, RunCounts, Runner

__all__ = ["InDriverRunner", "RewardJob", "RewardPool", "RunCounts", "Runner"]
