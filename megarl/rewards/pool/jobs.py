"""Jobs of reward functions, and their scoring as they arrive while the driver does other work; imports no torch."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from megarl.base.signals import wait_for
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


Results = tuple[list[Outcome], RunCounts]


class JobSource(Protocol):
    """Jobs that arrive while others run.

    Attributes:
        wake_handle: descriptor that becomes readable when something has changed.
    """

    wake_handle: int

    def take(self) -> tuple[list[RewardJob], bool]:
        """Return the new jobs, and whether no more will come.

        Raises:
            StreamCancelled: the results are not needed any more.
        """


class StreamCancelled(Exception):
    """Nobody waits for the results of a stream."""


class RewardStream:
    """A queue of reward jobs that a thread runs on a pool, from the first submission on.

    Args:
        threads: one thread, which lives as long as the pool: the kernel ends a process with the thread that started it.
        run: runs the jobs of a source; called in the thread.
    """

    def __init__(self, threads: ThreadPoolExecutor, run: Callable[[JobSource], Results]) -> None:
        self._new: list[RewardJob] = []
        self._lock = threading.Lock()
        self._ends = self._is_cancelled = False
        self.wake_handle, self._waker = os.pipe()
        os.set_blocking(self.wake_handle, False)
        os.set_blocking(self._waker, False)
        self._results: Future[Results] = threads.submit(run, self)

    def submit(self, jobs: Sequence[RewardJob]) -> None:
        """Add jobs; results have the order of submission."""
        with self._lock:
            self._new += jobs
        self._wake()

    def finish(self) -> Results:
        """Wait for all jobs; return their outcomes in the order of submission.

        Raises:
            RewardError: see :meth:`megarl.rewards.pool.runner.Runner.run`.
        """
        self._ends = True
        return self._end()

    def cancel(self) -> None:
        """Abandon all jobs; the processes that run them are replaced. A no-op after :meth:`finish`."""
        if self._waker >= 0:
            self._is_cancelled = True
            with contextlib.suppress(Exception):  # nobody waits for the results; the cancellation itself is one
                self._end()

    def take(self) -> tuple[list[RewardJob], bool]:
        """Return the next tasks; see :class:`JobSource`; called in the thread."""
        with contextlib.suppress(BlockingIOError):  # woken by something else
            os.read(self.wake_handle, 65536)
        if self._is_cancelled:
            raise StreamCancelled
        ends = self._ends  # before the jobs: none follows the end
        with self._lock:
            new, self._new = self._new, []
        return new, ends

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full of wake-ups
            os.write(self._waker, b".")

    def _end(self) -> Results:
        try:
            self._wake()
            return wait_for(self._results)
        finally:
            os.close(self._waker)
            os.close(self.wake_handle)
            self._waker = -1
