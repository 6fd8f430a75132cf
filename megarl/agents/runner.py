"""Rollout of conversations by agent loops, and the batch columns and metrics of their trajectories.

Conversations run concurrently. A failed conversation ends alone: it is counted, and none of its tokens is trained on.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from megarl.agents.loop import AgentLoop
from megarl.agents.types import AgentError, Conversation, Generate, Trajectory
from megarl.data import DataProto, attention_mask_of, pad_left, pad_right

logger = logging.getLogger(__name__)

ACTIONS, VALID_ACTIONS = "env/actions", "env/valid_actions"
VALID_SEARCHES, FINISHED = "env/valid_searches", "env/finished"


async def run_all(
    conversations: Sequence[Conversation],
    loops: Mapping[str, AgentLoop],
    generate: Generate,
    concurrency: int = 4096,
    fatal: tuple[type[Exception], ...] = (),
    on_end: Callable[[int, Trajectory], None] | None = None,
) -> list[Trajectory]:
    """Run every conversation to its end.

    Args:
        conversations: conversations, started in this order.
        loops: agent loops by ``agent_name``.
        generate: generates the turns.
        concurrency: maximum number of concurrent conversations.
        fatal: exceptions that stop all conversations, such as the loss of all engines; the first one is raised.
        on_end: receives each trajectory as soon as it has ended, with the index of its conversation.

    Returns:
        One trajectory per conversation, in their order. A failed one has ``error`` set and a response mask of zeros.

    Raises:
        AgentError: a conversation names a missing loop, or every conversation failed.
    """
    missing = sorted({conversation.agent_name for conversation in conversations} - loops.keys())
    if missing:
        raise AgentError(f"agent_name names missing agent loops: {missing}; the loops are {sorted(loops)}")
    slots = asyncio.Semaphore(concurrency)

    async def run_in_slot(index: int, conversation: Conversation) -> Trajectory:
        async with slots:
            trajectory = await _run_one(conversation, loops[conversation.agent_name], generate, fatal)
        if on_end is not None:
            on_end(index, trajectory)
        return trajectory

    tasks = [asyncio.ensure_future(run_in_slot(*numbered)) for numbered in enumerate(conversations)]
    try:
        trajectories = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    _report_failures(trajectories)
    return trajectories


async def _run_one(
    conversation: Conversation, loop: AgentLoop, generate: Generate, fatal: tuple[type[Exception], ...]
) -> Trajectory:
    seconds = conversation.limits.seconds
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            trajectory = await loop.run(conversation, generate)
    except fatal:
        raise
    except Exception as error:
        cause = _describe(error)
        if isinstance(error, TimeoutError) and deadline.expired():
            cause = f"the conversation took longer than {seconds:g} s"
        return Trajectory(conversation.prompt_ids, [], [], [], "error", 1, error=cause)
    problem = _problem(trajectory, conversation)
    return trajectory.failed(problem) if problem else trajectory


def _problem(trajectory: Trajectory, conversation: Conversation) -> str | None:
    """Check a loop's trajectory; return the problem, or None."""
    length = len(trajectory.response_ids)
    for name in ("response_mask", "log_probs"):
        entries = len(getattr(trajectory, name))
        if entries != length:
            return f"agent loop {conversation.agent_name!r}: {entries} entries of {name} for {length} response tokens"
    if length > conversation.response_tokens:
        limit = conversation.response_tokens
        return f"agent loop {conversation.agent_name!r}: {length} response tokens, {limit} are allowed"
    return trajectory.error


def _describe(error: Exception) -> str:
    if isinstance(error, AgentError):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"


def _report_failures(trajectories: Sequence[Trajectory]) -> None:
    errors = [trajectory.error for trajectory in trajectories if trajectory.error is not None]
    if errors and len(errors) == len(trajectories):
        raise AgentError(f"all {len(errors)} conversations failed; the first: {errors[0]}")
    if errors:
        logger.warning("%d of %d conversations failed; the first: %s", len(errors), len(trajectories), errors[0])


def trajectories_to_batch(
    trajectories: Sequence[Trajectory], pad_token_id: int, *, state_masking: bool = True
) -> DataProto:
    """Convert trajectories into a batch, one row per trajectory, in their order.

    ``attention_mask`` covers every token, including the environment's. ``response_mask`` marks the tokens to train on
    and may have holes. A failed trajectory keeps its row with a mask of zeros. An empty response gets one padding
    token, since a row needs at least one.

    Args:
        trajectories: result of :func:`run_all`.
        pad_token_id: padding token.
        state_masking: exclude the environment's tokens from losses, KL, advantages and entropy; False trains on them as
            on the policy's tokens.

    Returns:
        ``prompts [b, P]``, ``responses``, ``response_mask``, ``generated_mask``, ``rollout_log_probs`` (0.0 for the
        environment's tokens) ``[b, R]`` and ``attention_mask [b, P+R]``; the columns ``num_turns``, ``weight_version``,
        ``agent_error`` (None: no failure) and one column per name in ``fields``.
    """
    prompts = [list(trajectory.prompt_ids) or [pad_token_id] for trajectory in trajectories]
    responses = [list(trajectory.response_ids) or [pad_token_id] for trajectory in trajectories]
    masks = [_train_mask(trajectory, state_masking) for trajectory in trajectories]
    tensors = {
        "prompts": pad_left(prompts, pad_token_id),
        "responses": pad_right(responses, pad_token_id),
        "response_mask": pad_right(masks),
        "generated_mask": pad_right([list(trajectory.generated_mask) or [0] for trajectory in trajectories]),
        "rollout_log_probs": pad_right(
            [list(trajectory.log_probs) or [0.0] for trajectory in trajectories], dtype=torch.float32
        ),
    }
    tensors["attention_mask"] = attention_mask_of(
        list(map(len, prompts)),
        list(map(len, responses)),
        tensors["prompts"].shape[1],
        tensors["responses"].shape[1],
    )
    names = dict.fromkeys(name for trajectory in trajectories for name in trajectory.fields)
    columns = {name: [trajectory.fields.get(name) for trajectory in trajectories] for name in names}
    columns["num_turns"] = [trajectory.num_turns for trajectory in trajectories]
    columns["weight_version"] = [trajectory.weight_version for trajectory in trajectories]
    columns["agent_error"] = [trajectory.error for trajectory in trajectories]
    return DataProto.from_dict(tensors, columns)


def _train_mask(trajectory: Trajectory, state_masking: bool) -> list[int]:
    length = len(trajectory.response_ids)
    if trajectory.error is not None or not length:
        return [0] * max(length, 1)
    return list(trajectory.generated_mask) if state_masking else [1] * length


def trajectory_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute the metrics of a batch of trajectories, under the names of verl and Search-R1.

    - ``num_turns/{mean,max,min}``: messages per conversation, including the prompt.
    - ``tool_call_counts/{mean,max,min}``: tool calls per conversation; ``tool_call_counts/malformed_ratio``: share of
      all calls that were answered with an error.
    - ``env/number_of_actions/{mean,max,min}``: turns of the policy per searching conversation; ``env/finish_ratio``:
      share of conversations with an answer; ``env/number_of_valid_action``, ``env/number_of_valid_search``: per
      conversation; ``env/ratio_of_valid_action``: share of valid turns, mean over conversations.
    - ``state_tokens/{total,coverage}``: generated tokens, and their share of all response tokens.
    - ``agent/failed``: failed conversations; they are excluded from all other metrics.
    - ``agent/<name>/mean``: any other number reported by loops and tools.

    Args:
        trajectories: result of :func:`run_all`.
    """
    succeeded = [trajectory for trajectory in trajectories if trajectory.error is None]
    metrics = {"agent/failed": float(len(trajectories) - len(succeeded))}
    metrics |= _mean_max_min("num_turns", [float(trajectory.num_turns) for trajectory in succeeded])
    names = dict.fromkeys(name for trajectory in succeeded for name in trajectory.metrics)
    for name in names:
        rows = [trajectory.metrics for trajectory in succeeded if name in trajectory.metrics]
        metrics |= _SPECIAL[name](rows) if name in _SPECIAL else {f"agent/{name}/mean": _mean(rows, name)}
    return metrics | _state_tokens(succeeded)


_Rows = Sequence[Mapping[str, float]]


def _state_tokens(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    generated = sum(sum(trajectory.response_mask) for trajectory in trajectories)
    total = sum(len(trajectory.response_mask) for trajectory in trajectories)
    return {"state_tokens/total": float(generated), "state_tokens/coverage": generated / total} if total else {}


def _mean_max_min(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}/mean": float(np.mean(values)), f"{name}/max": max(values), f"{name}/min": min(values)}


def _values(rows: _Rows, name: str) -> list[float]:
    return [row[name] for row in rows]


def _mean(rows: _Rows, name: str) -> float:
    return float(np.mean(_values(rows, name)))


def _valid_actions(rows: _Rows) -> dict[str, float]:
    valid, actions = np.array(_values(rows, VALID_ACTIONS)), np.array(_values(rows, ACTIONS))
    return {
        "env/number_of_valid_action": float(valid.mean()),
        "env/ratio_of_valid_action": float((valid / np.maximum(actions, 1)).mean()),
    }


def _malformed(rows: _Rows) -> dict[str, float]:
    calls = sum(_values(rows, "tool_call_counts"))
    return {"tool_call_counts/malformed_ratio": sum(_values(rows, "malformed_calls")) / calls} if calls else {}


_SPECIAL: dict[str, Callable[[_Rows], dict[str, float]]] = {
    "tool_call_counts": lambda rows: _mean_max_min("tool_call_counts", _values(rows, "tool_call_counts")),
    "malformed_calls": _malformed,
    ACTIONS: lambda rows: _mean_max_min("env/number_of_actions", _values(rows, ACTIONS)),
    VALID_ACTIONS: _valid_actions,
    VALID_SEARCHES: lambda rows: {"env/number_of_valid_search": _mean(rows, VALID_SEARCHES)},
    FINISHED: lambda rows: {"env/finish_ratio": _mean(rows, FINISHED)},
}
