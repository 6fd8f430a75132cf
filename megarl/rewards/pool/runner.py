"""The interface of runners of reward functions, and the runner in the driver; imports no torch."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from megarl.rewards.calling import LoadedFunction, RewardTask, exception_outcome, serialize_task
from megarl.rewards.outcome import INFRASTRUCTURE, Outcome
from megarl.rewards.pool.jobs import RewardJob, RunCounts
from megarl.rewards.registry import FunctionTraits

FIRST_DELAY_S, LONGEST_DELAY_S = 0.2, 5.0


class Runner(Protocol):
    """Runs reward functions over tasks."""

    @property
    def traits(self) -> Sequence[FunctionTraits]:
        """Calling convention of each function."""

    def run(self, jobs: Sequence[RewardJob]) -> tuple[list[Outcome], RunCounts]:
        """Return the outcome of each job, in order; infrastructure failures are retried first.

        Raises:
            RewardError: no process can be started.
        """

    def start(self) -> None:
        """Start processes without waiting for them; otherwise the first run starts them."""

    def close(self) -> None:
        """End all processes."""


class InDriverRunner:
    """Calls functions in this process, without protection: a call that hangs or exits stops the run."""

    def __init__(
        self, functions: Iterable[LoadedFunction], max_retries: int = 0, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.functions = list(functions)
        self.max_retries = max_retries
        self._sleep = sleep

    @property
    def traits(self) -> Sequence[FunctionTraits]:
        """Calling convention of each function."""
        return [function.traits for function in self.functions]

    def start(self) -> None:
        """Do nothing: there is no process to start."""

    def close(self) -> None:
        """Do nothing: there is no process to end."""

    def run(self, jobs: Sequence[RewardJob]) -> tuple[list[Outcome], RunCounts]:
        """Return the outcome of each job, in order."""
        outcomes: dict[int, Outcome] = {}
        counts, open_jobs = RunCounts(), list(range(len(jobs)))
        for attempt in range(self.max_retries + 1):
            if attempt:
                self._sleep(retry_delay_s(attempt))
                counts.retries += len(open_jobs)
            self._run(jobs, open_jobs, outcomes)
            open_jobs = [index for index in open_jobs if outcomes[index].kind == INFRASTRUCTURE]
            if not open_jobs:
                break
        return [outcomes[index] for index in range(len(jobs))], counts

    def _run(self, jobs: Sequence[RewardJob], open_jobs: Sequence[int], outcomes: dict[int, Outcome]) -> None:
        for number, function in enumerate(self.functions):
            tasks: dict[int, RewardTask] = {}
            for index in open_jobs:
                if jobs[index].function == number:
                    serialized = serialize_task(jobs[index].task)
                    if isinstance(serialized, Outcome):
                        outcomes[index] = serialized
                    else:
                        tasks[index] = pickle.loads(serialized)  # noqa: S301 - pickled by this process

            def report(at: int, outcome: Outcome, indices: Sequence[int] = tuple(tasks)) -> None:
                outcomes[indices[at]] = outcome

            try:
                if tasks:
                    function.run(list(tasks.values()), report)
            except MemoryError as error:
                for index in tasks:
                    if index not in outcomes or outcomes[index].kind == INFRASTRUCTURE:
                        outcomes[index] = exception_outcome(error)


def retry_delay_s(attempts: int) -> float:
    """Return the seconds to wait after a number of failed attempts (exponential backoff)."""
    return min(FIRST_DELAY_S * 2.0 ** (attempts - 1), LONGEST_DELAY_S)
