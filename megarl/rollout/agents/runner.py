"""Leads many conversations at once; one that fails ends alone, is counted, and is trained on nowhere."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Mapping, Sequence

from megarl.rollout.agents.loop import AgentError, AgentLoop, Conversation, Generate, Trajectory

logger = logging.getLogger(__name__)


async def run_all(
    conversations: Sequence[Conversation],
    loops: Mapping[str, AgentLoop],
    generate: Generate,
    concurrency: int = 4096,
    fatal: tuple[type[Exception], ...] = (),
) -> list[Trajectory]:
    """Leads every conversation to its end.

    Args:
        conversations: to be led, all at once as far as ``concurrency`` allows, begun in this order.
        loops: by the name that conversations give.
        generate: where the loops ask for turns.
        concurrency: conversations under way at a time.
        fatal: exceptions that end everything, such as the loss of all engines: the first is raised.

    Returns:
        One trajectory per conversation, in their order; one that failed has ``error`` set and nothing to train on.

    Raises:
        AgentError: a conversation names a loop that is not there, or every conversation failed.
    """
    missing = sorted({conversation.agent_name for conversation in conversations} - loops.keys())
    if missing:
        raise AgentError(f"agent_name names loops that are not there: {missing}; there are {sorted(loops)}")
    slots = asyncio.Semaphore(concurrency)

    async def lead(conversation: Conversation) -> Trajectory:
        async with slots:
            return await _lead_one(conversation, loops[conversation.agent_name], generate, fatal)

    tasks = [asyncio.ensure_future(lead(conversation)) for conversation in conversations]
    try:
        trajectories = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    _tell_failures(trajectories)
    return trajectories


async def _lead_one(
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
        if isinstance(error, TimeoutError) and deadline.expired():
            return _lost(conversation, f"the conversation took longer than {seconds:g} s")
        return _lost(conversation, _describe(error))
    complaint = _complaint(trajectory, conversation)
    return trajectory.failed(complaint) if complaint else trajectory


def _lost(conversation: Conversation, error: str) -> Trajectory:
    """A conversation of which nothing but its prompt is left."""
    return Trajectory(conversation.prompt_ids, [], [], [], "error", 1, error=error)


def _complaint(trajectory: Trajectory, conversation: Conversation) -> str | None:
    """What is wrong with what a loop returned, or None."""
    length = len(trajectory.response_ids)
    for name in ("response_mask", "log_probs"):
        if len(getattr(trajectory, name)) != length:
            found = len(getattr(trajectory, name))
            return f"agent loop {conversation.agent_name!r}: {found} entries of {name} for {length} response tokens"
    if length > conversation.response_tokens:
        limit = conversation.response_tokens
        return f"agent loop {conversation.agent_name!r}: {length} response tokens, {limit} are allowed"
    return trajectory.error


def _describe(error: Exception) -> str:
    if isinstance(error, AgentError):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"


def _tell_failures(trajectories: Sequence[Trajectory]) -> None:
    errors = [trajectory.error for trajectory in trajectories if trajectory.error is not None]
    if errors and len(errors) == len(trajectories):
        raise AgentError(f"all {len(errors)} conversations failed; the first: {errors[0]}")
    if errors:
        logger.warning("%d of %d conversations failed; the first: %s", len(errors), len(trajectories), errors[0])
