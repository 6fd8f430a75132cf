"""Runners of reward functions: in the driver, or in a pool of processes with time limits and retries."""

from megarl.rewards.pool.jobs import RewardJob, RunCounts
from megarl.rewards.pool.pool import RewardPool
from megarl.rewards.pool.runner import InDriverRunner, Runner

__all__ = ["InDriverRunner", "RewardJob", "RewardPool", "RunCounts", "Runner"]
