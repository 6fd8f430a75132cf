"""Jobs of reward functions, and a stream that runs them as they arrive; imports no torch."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from megarl.base.errors import RewardError
from megarl.rewards.calling import RewardTask
from megarl.rewards.outcome import Outcome


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
        """Add jobs; return a future of the outcome of each.

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
