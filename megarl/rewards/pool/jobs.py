"""Jobs of reward functions, and their scoring as they arrive while the driver does other work; imports no torch."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from megarl.base.signals import wait_for, wait_slices
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
        retries: attempts after an infrastructure failure.
        replaced: processes replaced because they hung or died.
    """

    retries: int = 0
    replaced: int = 0

    def plus(self, other: RunCounts) -> RunCounts:
        """Return the sums of both."""
        return RunCounts(self.retries + other.retries, self.replaced + other.replaced)


class JobSource(Protocol):
    """Jobs that arrive while others run.

    Attributes:
        wake_handle: descriptor that becomes readable when something has changed.
        counts: retries and replacements so far; the runner adds to them.
    """

    wake_handle: int
    counts: RunCounts

    def take(self) -> tuple[list[RewardJob], bool]:
        """Return the new jobs, and whether no more will come.

        Raises:
            StreamCancelled: the results are not needed any more.
        """

    def put(self, number: int, outcome: Outcome) -> None:
        """Receive the outcome of a job; jobs are numbered in the order of :meth:`take`."""


class StreamCancelled(Exception):
    """Nobody waits for the results of a stream."""


class RewardStream:
    """A queue of reward jobs that a thread runs on a pool, from the first submission on.

    Args:
        threads: one thread, which lives as long as the pool: the kernel ends a process with the thread that started it.
        run: runs the jobs of a source; called in the thread.
    """

    def __init__(self, threads: ThreadPoolExecutor, run: Callable[[JobSource], None]) -> None:
        self.counts = RunCounts()
        self._reported = RunCounts()
        self._new: list[RewardJob] = []
        self._outcomes: dict[int, Outcome] = {}
        self._submitted = self._ended = 0
        self._changed = threading.Condition()
        self._ends = self._is_cancelled = False
        self.wake_handle, self._waker = os.pipe()
        os.set_blocking(self.wake_handle, False)
        os.set_blocking(self._waker, False)
        self._run: Future[None] = threads.submit(run, self)
        self._run.add_done_callback(lambda run: self._notify())

    def submit(self, jobs: Sequence[RewardJob]) -> range:
        """Add jobs; return their numbers for :meth:`results`."""
        with self._changed:
            self._new += jobs
            self._submitted += len(jobs)
            numbers = range(self._submitted - len(jobs), self._submitted)
        self._wake()
        return numbers

    def results(self, numbers: Sequence[int]) -> list[Outcome]:
        """Wait for jobs, also of an ended stream; return their outcomes and forget them.

        Raises:
            RewardError: see :meth:`megarl.rewards.pool.runner.Runner.run`.
            KeyError: a job is unknown, or its outcome was returned before.
        """
        for slice_s in wait_slices():
            with self._changed:
                if self._changed.wait_for(lambda: self._have(numbers) or self._run.done(), slice_s):
                    break
        if not self._have(numbers):
            self._run.result()  # raises the error that ended the run
        with self._changed:
            return [self._outcomes.pop(number) for number in numbers]

    def take_counts(self) -> RunCounts:
        """Return the retries and replacements since the last call."""
        retries, replaced = self.counts.retries, self.counts.replaced
        counts = RunCounts(retries - self._reported.retries, replaced - self._reported.replaced)
        self._reported = RunCounts(retries, replaced)
        return counts

    def finish(self) -> None:
        """Wait for all jobs, and end the stream; the pool then serves other calls. A no-op for an ended stream.

        Raises:
            RewardError: see :meth:`megarl.rewards.pool.runner.Runner.run`.
        """
        if self._waker >= 0:
            self._ends = True
            self._end()

    def cancel(self) -> None:
        """End the stream without waiting; processes that still run a job are replaced. A no-op for an ended stream."""
        if self._waker >= 0:
            self._is_cancelled = self._ended < self._submitted
            self._ends = True
            with contextlib.suppress(Exception):  # nobody waits for the results; the cancellation itself is one
                self._end()

    def take(self) -> tuple[list[RewardJob], bool]:
        """Return the next tasks; see :class:`JobSource`; called in the thread."""
        with contextlib.suppress(BlockingIOError):  # woken by something else
            os.read(self.wake_handle, 65536)
        if self._is_cancelled:
            raise StreamCancelled
        ends = self._ends  # before the jobs: none follows the end
        with self._changed:
            new, self._new = self._new, []
        return new, ends

    def put(self, number: int, outcome: Outcome) -> None:
        """Record the outcome of a job; see :class:`JobSource`; called in the thread."""
        with self._changed:
            self._outcomes[number] = outcome
            self._ended += 1
            self._changed.notify_all()

    def _have(self, numbers: Sequence[int]) -> bool:
        return all(number in self._outcomes for number in numbers)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full of wake-ups
            os.write(self._waker, b".")

    def _end(self) -> None:
        try:
            self._wake()
            wait_for(self._run)
        finally:
            os.close(self._waker)
            os.close(self.wake_handle)
            self._waker = -1
