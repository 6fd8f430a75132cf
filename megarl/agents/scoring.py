"""Rewards of samples as their conversations end: an agent runner calls reward functions in processes of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megarl.agents.types import Trajectory
from megarl.base.child_process import ChildEnvironment
from megarl.base.errors import RewardError
from megarl.rewards.outcome import Outcome
from megarl.rewards.pool import RunCounts
from megarl.rewards.scorer import Scorer, ScorerSpec
from megarl.rewards.tasks import TaskBuilder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SampleScorer:
    """Scores single samples in a pool of reward processes, which start at once.

    Args:
        spec: reward functions and number of processes; none of the functions takes batches.
        runner: number of the agent runner, for the names of log files.
        environment: of the driver; None = as this process.
    """

    def __init__(
        self,
        spec: ScorerSpec,
        tokenizer: PreTrainedTokenizerBase,
        runner: int = 0,
        environment: ChildEnvironment | None = None,
    ) -> None:
        self._pool = spec.pool(runner, environment)
        self._scorer = Scorer(spec.terms, self._pool)
        self._tasks = TaskBuilder(tokenizer, self._scorer.wants_prompt)
        stream = self._pool.stream()
        assert stream is not None, "a function takes batches"
        self._stream = stream

    async def score(self, columns: Mapping[str, Any], trajectory: Trajectory) -> Outcome | None:
        """Score a sample.

        Returns:
            The outcome. None for a failed conversation or an empty response, and for a row that cannot be scored: the
            reward manager reports these.

        Raises:
            RewardError: no process for functions can be started.
        """
        if trajectory.error is not None or not len(trajectory.response_ids):
            return None
        try:
            facts = {**columns, **trajectory.fields}
            task = self._tasks.build("", facts, trajectory.prompt_ids, trajectory.response_ids)
            jobs = self._scorer.jobs(task)
        except (RewardError, KeyError):
            return None
        futures = [asyncio.wrap_future(future) for future in self._stream.submit(jobs)]
        return self._scorer.outcome_of(await asyncio.gather(*futures))

    def take_counts(self) -> RunCounts:
        """Return retries and replaced processes since the last call."""
        return self._stream.take_counts()

    def close(self) -> None:
        """End the processes."""
        self._pool.close()
