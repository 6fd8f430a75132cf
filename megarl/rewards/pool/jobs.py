"""Reward jobs, a stream that runs them as they arrive, and a runner in the driver; imports no torch."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from megarl.base.errors import RewardError
from megarl.rewards.calling import LoadedFunction, RewardTask, exception_outcome, serialize_task
from megarl.rewards.outcome import INFRASTRUCTURE, Outcome
from megarl.rewards.registry import FunctionTraits

FIRST_DELAY_S, LONGEST_DELAY_S = 0.2, 5.0


class RewardJob(NamedTuple):
    """A task for one of the runner's functions, given by its number."""

    function: int
    task: RewardTask


@dataclass
class RunCounts:
    """Retries and replacements while a batch was scored.

    Attributes:
        replaced: processes replaced because they hung or died.
    """

    retries: int = 0
    replaced: int = 0

    def plus(self, other: RunCounts) -> RunCounts:
        """Return the sums of both."""
        return RunCounts(self.retries + other.retries, self.replaced + other.replaced)


class StreamEnded(RewardError):
    """Nobody waits for the results of a stream."""


class RewardStream:
    """A queue of reward jobs that a thread runs on a pool, from the first submission on; thread-safe.

    Args:
        threads: one thread, which lives as long as the pool: the kernel ends a process with the thread that started it.
        run: runs the jobs of the stream; called in the thread.

    Attributes:
        wake_handle: descriptor that becomes readable when something has changed.
        counts: retries and replacements so far; the pool adds to them.
    """

    def __init__(self, threads: ThreadPoolExecutor, run: Callable[[RewardStream], None]) -> None:
        self.counts = RunCounts()
        self._reported = RunCounts()
        self._new: list[RewardJob] = []
        self._open: dict[int, Future[Outcome]] = {}
        self._submitted = 0
        self._lock = threading.Lock()
        self._has_ended = False
        self.wake_handle, self._waker = os.pipe()
        os.set_blocking(self.wake_handle, False)
        os.set_blocking(self._waker, False)
        self._run: Future[None] = threads.submit(run, self)
        self._run.add_done_callback(lambda _: self._fail_open())

    def submit(self, jobs: Sequence[RewardJob]) -> list[Future[Outcome]]:
        """Add jobs; return a future per outcome.

        A future fails with a ``RewardError`` if no process can be started, and with :class:`StreamEnded` after the end.
        """
        futures: list[Future[Outcome]] = [Future() for _ in jobs]
        for future in futures:
            future.set_running_or_notify_cancel()  # a job cannot be cancelled
        with self._lock:
            self._new += jobs
            self._open |= dict(enumerate(futures, self._submitted))
            self._submitted += len(jobs)
            self._wake()
        if self._run.done():
            self._fail_open()
        return futures

    def take_counts(self) -> RunCounts:
        """Return the retries and replacements since the last call."""
        retries, replaced = self.counts.retries, self.counts.replaced
        counts = RunCounts(retries - self._reported.retries, replaced - self._reported.replaced)
        self._reported = RunCounts(retries, replaced)
        return counts

    def end(self) -> None:
        """End the stream; processes that still run a job are killed. A no-op for an ended stream."""
        with self._lock:
            if self._waker < 0:
                return
            self._has_ended = True
            self._wake()
        with contextlib.suppress(Exception):  # the end itself, or an error that the futures have
            self._run.result()
        with self._lock:
            os.close(self._waker)
            os.close(self.wake_handle)
            self._waker = -1

    def take(self) -> list[RewardJob]:
        """Return the new jobs; called in the thread.

        Raises:
            StreamEnded: the results are not needed any more.
        """
        with contextlib.suppress(BlockingIOError):  # woken by something else
            os.read(self.wake_handle, 65536)
        if self._has_ended:
            raise StreamEnded("the reward processes have ended", code="reward.processes-ended")
        with self._lock:
            new, self._new = self._new, []
        return new

    def put(self, number: int, outcome: Outcome) -> None:
        """Record the outcome of a job, numbered in the order of :meth:`take`; called in the thread."""
        with self._lock:
            future = self._open.pop(number)
        future.set_result(outcome)

    def _fail_open(self) -> None:
        """Fail the unfinished jobs with the error that ended the run."""
        with self._lock:
            futures, self._open = list(self._open.values()), {}
        for future in futures:
            future.set_exception(
                self._run.exception() or StreamEnded("the reward processes have ended", code="reward.processes-ended")
            )

    def _wake(self) -> None:
        if self._waker >= 0:
            with contextlib.suppress(BlockingIOError):  # full of wake-ups
                os.write(self._waker, b".")


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
