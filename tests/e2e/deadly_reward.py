"""Rewards that kill rollout replicas: in the driver, as they score, or when they are next asked to generate."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Sequence
from typing import Any

from megarl.cluster import WorkerGroup
from megarl.rollout.router import Router

ROWS = 48
_calls = 0


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """The answer's length. After the first step replica 1 dies as it generates; after the second replica 0 dies before
    the weight sync; after the fourth both die as they generate."""
    global _calls
    _calls += 1
    step, row = divmod(_calls, ROWS)
    if row == 0:
        if step == 1:
            kill_as_they_generate([1])
        elif step == 2:
            kill([0])
        elif step == 4:
            kill_as_they_generate([0, 1])
    return float(len(solution_str))


def vote(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """A score, and an answer on which those of one prompt sometimes agree."""
    return {"score": float(len(solution_str) % 3), "pred": solution_str[:1].isascii()}


def vote_once_dead(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """As ``vote``; replica 1 dies as it generates the second batch of ``ROWS`` answers."""
    global _calls
    _calls += 1
    if _calls == ROWS:
        kill_as_they_generate([1])
    return vote(data_source, solution_str, ground_truth, extra_info)


def kill(ranks: Sequence[int]) -> None:
    (group,) = [thing for thing in gc.get_objects() if isinstance(thing, WorkerGroup) and thing.role == "rollout"]
    for rank in ranks:
        os.kill(group._cards[rank].pid, signal.SIGKILL)


def kill_as_they_generate(ranks: Sequence[int]) -> None:
    enter = Router.__aenter__

    async def kill_and_enter(router: Router) -> Router:
        Router.__aenter__ = enter
        kill(ranks)
        return await enter(router)

    Router.__aenter__ = kill_and_enter
