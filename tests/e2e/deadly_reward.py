"""Reward functions that kill rollout replicas from the driver, at once or during the next generation."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Sequence
from typing import Any

from megarl.agents.types import ConversationGroup
from megarl.cluster.agent_runners import AgentRunners
from megarl.cluster.calls import PendingCall
from megarl.cluster.worker_group import WorkerGroup

ROWS = 48
_calls = 0


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Return the length of the response, and kill replicas after some steps.

    After step 1, replica 1 dies during generation; after step 2, replica 0 dies within a bucket of the weight sync;
    after step 4, both die during generation.
    """
    global _calls
    _calls += 1
    step, row = divmod(_calls, ROWS)
    if row == 0:
        if step == 1:
            kill_during_generation([1])
        elif step == 2:
            kill_within_bucket(0)
        elif step == 4:
            kill_during_generation([0, 1])
    return float(len(solution_str))


def length_and_kill(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """Return the length; replica 0 dies within a bucket of the weight sync after the second step."""
    global _calls
    _calls += 1
    if _calls == 2 * ROWS:
        kill_within_bucket(0)
    return {"score": float(len(solution_str))}


def length_and_kill_at_once(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """Return the length; the only replica dies when the first batch is scored, while others are generated."""
    global _calls
    _calls += 1
    if _calls == 1:
        kill([0])
    return {"score": float(len(solution_str))}


def vote(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Return a score, and a prediction that is often equal for several responses to one prompt."""
    return {"score": float(len(solution_str) % 3), "pred": solution_str[:1].isascii()}


def vote_and_kill(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    """Score like ``vote``; replica 1 dies while it generates the second batch of ``ROWS`` responses."""
    global _calls
    _calls += 1
    if _calls == ROWS:
        kill_during_generation([1])
    return vote(data_source, solution_str, ground_truth, extra_info)


def kill_within_bucket(rank: int) -> None:
    """Kill a replica once the next bucket of a weight sync is on its way to it."""
    submit_gather = WorkerGroup.submit_gather

    def import_and_kill(group: WorkerGroup, *args: Any, **options: Any) -> PendingCall:
        WorkerGroup.submit_gather = submit_gather
        signal_replica(rank, signal.SIGSTOP)
        pending = submit_gather(group, *args, **options)
        kill([rank])
        return pending

    WorkerGroup.submit_gather = import_and_kill


def signal_replica(rank: int, number: int) -> None:
    (group,) = [item for item in gc.get_objects() if isinstance(item, WorkerGroup) and item.role == "rollout"]
    os.kill(group.processes[rank].pid, number)


def kill(ranks: Sequence[int]) -> None:
    for rank in ranks:
        signal_replica(rank, signal.SIGKILL)


def kill_during_generation(ranks: Sequence[int]) -> None:
    """Kill replicas that have requests: they stand still from before the submission, so that they cannot answer."""
    submit = AgentRunners.submit

    def submit_and_kill(runners: AgentRunners, groups: Sequence[ConversationGroup]) -> None:
        AgentRunners.submit = submit
        for rank in ranks:
            signal_replica(rank, signal.SIGSTOP)
        submit(runners, groups)
        kill(ranks)

    AgentRunners.submit = submit_and_kill
