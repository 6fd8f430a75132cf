"""What is worth knowing about a batch of conversations, under the names that users of verl and Search-R1 know."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megarl.rollout.agents.loop import Trajectory

ACTIONS, VALID_ACTIONS = "env/actions", "env/valid_actions"
VALID_SEARCHES, FINISHED = "env/valid_searches", "env/finished"


def trajectory_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Metrics of a batch.

    - ``num_turns/{mean,max,min}``: messages per conversation, the prompt included.
    - ``tool_call_counts/{mean,max,min}``: calls of tools per conversation; ``tool_call_counts/malformed_ratio``: the
      share of all calls that were answered with an error.
    - ``env/number_of_actions/{mean,max,min}``: the policy's turns in searching conversations; ``env/finish_ratio``: the
      share that gave an answer; ``env/number_of_valid_action``, ``env/number_of_valid_search``: per conversation;
      ``env/ratio_of_valid_action``: valid of all turns, mean over conversations.
    - ``state_tokens/{total,coverage}``: tokens that the policy wrote, and their share of all response tokens.
    - ``agent/failed``: conversations that failed; the others' numbers are without them.
    - ``agent/<name>/mean``: any other number that loops and tools told.

    Args:
        trajectories: as the runner returned them.
    """
    good = [trajectory for trajectory in trajectories if trajectory.error is None]
    metrics = {"agent/failed": float(len(trajectories) - len(good))}
    metrics |= _spread("num_turns", [float(trajectory.num_turns) for trajectory in good])
    names = dict.fromkeys(name for trajectory in good for name in trajectory.metrics)
    for name in names:
        told = [trajectory for trajectory in good if name in trajectory.metrics]
        values = [trajectory.metrics[name] for trajectory in told]
        metrics |= _SPECIAL[name](told) if name in _SPECIAL else {f"agent/{name}/mean": float(np.mean(values))}
    return metrics | _state_tokens(good)


def _state_tokens(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    written = sum(sum(trajectory.response_mask) for trajectory in trajectories)
    total = sum(len(trajectory.response_mask) for trajectory in trajectories)
    return {"state_tokens/total": float(written), "state_tokens/coverage": written / total} if total else {}


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}/mean": float(np.mean(values)), f"{name}/max": max(values), f"{name}/min": min(values)}


def _of(told: Sequence[Trajectory], name: str) -> list[float]:
    return [trajectory.metrics[name] for trajectory in told]


def _mean_of(name: str, shown: str) -> Callable[[Sequence[Trajectory]], dict[str, float]]:
    return lambda told: {shown: float(np.mean(_of(told, name)))}


def _valid_actions(told: Sequence[Trajectory]) -> dict[str, float]:
    valid, actions = np.array(_of(told, VALID_ACTIONS)), np.array(_of(told, ACTIONS))
    return {
        "env/number_of_valid_action": float(valid.mean()),
        "env/ratio_of_valid_action": float((valid / np.maximum(actions, 1)).mean()),
    }


def _malformed(told: Sequence[Trajectory]) -> dict[str, float]:
    calls = sum(_of(told, "tool_call_counts"))
    return {"tool_call_counts/malformed_ratio": sum(_of(told, "malformed_calls")) / calls} if calls else {}


_SPECIAL: dict[str, Callable[[Sequence[Trajectory]], dict[str, float]]] = {
    "tool_call_counts": lambda told: _spread("tool_call_counts", _of(told, "tool_call_counts")),
    "malformed_calls": _malformed,
    ACTIONS: lambda told: _spread("env/number_of_actions", _of(told, ACTIONS)),
    VALID_ACTIONS: _valid_actions,
    VALID_SEARCHES: _mean_of(VALID_SEARCHES, "env/number_of_valid_search"),
    FINISHED: _mean_of(FINISHED, "env/finish_ratio"),
}
