"""A tracker in a subprocess: records go through a bounded queue, in order, with retries and back-off.

The driver only appends to a queue. A thread sends the records one by one to the tracker's process
(:mod:`megarl.tracking.tracker_worker`). Network errors and hangs are retried with growing pauses until they succeed;
a refused record is retried a few times. A full queue drops its oldest records. A failure is reported once, and at the
end the number of lost records.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import subprocess
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.base.child_process import ChildProcess
from megarl.tracking.tracker import RunInfo, Tracker
from megarl.tracking.tracker_worker import DONE, UNREACHABLE, CallResult

logger = logging.getLogger(__name__)

LONGEST_TEXT = 300
"""Characters of a reported failure; the tracker's log has the whole text."""


@dataclass(frozen=True)
class RetryPolicy:
    """Retries, pauses and limits of a subprocess tracker.

    Attributes:
        queued: capacity of the queue; a new record replaces the oldest.
        attempts: attempts to send a record that is refused or kills the process.
        first_pause_s: pause after the first failure; it doubles with each further failure.
        longest_pause_s: limit of the pause.
    """

    queued: int = 1000
    attempts: int = 4
    first_pause_s: float = 1.0
    longest_pause_s: float = 60.0


class TrackerError(Exception):
    """A failed call to a tracker's process.

    Attributes:
        retryable: the same call may succeed later, such as after a network error or a hang.
        lost: the process is unusable.
    """

    def __init__(self, message: str, *, retryable: bool = False, lost: bool = False):
        super().__init__(message)
        self.retryable, self.lost = retryable, lost


class TrackerProcess:
    """The process of a tracker.

    Args:
        log: file that its output is appended to; None = discard it.
        timeout_s: seconds for the tracker to finish if this process dies.
    """

    def __init__(self, log: Path | None, timeout_s: float) -> None:
        with contextlib.ExitStack() as stack:
            output: Any = subprocess.DEVNULL if log is None else stack.enter_context(log.open("ab"))
            self.child = ChildProcess("megarl.tracking.tracker_worker:main", timeout_s, output=output)

    def call(self, name: str, *args: Any, timeout_s: float) -> str:
        """Make a call (:class:`megarl.tracking.tracker_worker.TrackerCall`); return the text of its result.

        Raises:
            TrackerError: the call failed or timed out.
        """
        try:
            result = CallResult(*self.child.request((name, args), timeout_s))
        except TimeoutError:
            raise TrackerError(f"no reply to {name} within {timeout_s:.0f} s", retryable=True, lost=True) from None
        except EOFError as error:
            raise TrackerError(f"{error} in {name}", lost=True) from error
        if result.status != DONE:
            raise TrackerError(result.text, retryable=result.status == UNREACHABLE)
        return result.text


class SubprocessTracker(Tracker):
    """Runs a tracker in a subprocess; its setup has passed :func:`megarl.tracking.check_trackers`.

    Args:
        name: entry of ``trainer.logger``; the subprocess imports the class.
        run: description of the run; ``timeout_s`` limits each call.
    """

    def __init__(
        self,
        name: str,
        run: RunInfo,
        report: Callable[[str], None],
        policy: RetryPolicy | None = None,
    ) -> None:
        self.name = name
        self.run = dataclasses.replace(run, console=None)
        self.policy = policy or RetryPolicy()
        self.delivered = self.dropped = 0
        self.failure = ""  # the first failure of the latest series
        self._report = report
        self._failing = self._reported = False
        self._leftover = ""
        self._records: deque[tuple[str, Any, int]] = deque()
        self._change = threading.Condition()
        self._deadline: float | None = None  # set at the end of the run
        self._process: TrackerProcess | None = None
        self._opened = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Queue the metrics."""
        self._put(("log", dict(metrics), step))

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Queue the samples."""
        self._put(("log_samples", [dict(sample) for sample in samples], step))

    def begin_finish(self) -> None:
        """Announce the end of the run, so that several trackers finish concurrently; starts the final deadline."""
        with self._change:
            if self._deadline is None:
                self._deadline = time.monotonic() + self.run.timeout_s
                self._change.notify_all()

    def finish(self) -> None:
        """Wait until all records are sent, at most ``run.timeout_s`` seconds; report lost records."""
        self.begin_finish()
        assert self._deadline is not None
        self._thread.join(max(0.0, self._deadline - time.monotonic()) + 1.0)
        self._end_process()  # this also ends a thread that waits for a reply
        self._thread.join(1.0)
        self._drop_all()
        if self.dropped:
            total = self.delivered + self.dropped
            text = f"tracker {self.name}: {self.dropped} of {total} records did not arrive ({self.failure})"
            self._report(f"{text}; metrics.jsonl has all metrics{self._advice()}")

    def _put(self, record: tuple[str, Any, int]) -> None:
        with self._change:
            if len(self._records) >= self.policy.queued:
                self._records.popleft()
                self._drop(1)
            self._records.append(record)
            self._change.notify_all()

    def _drop(self, count: int) -> None:
        with self._change:
            self.dropped += count

    def _drop_all(self) -> None:
        with self._change:
            self._drop(len(self._records))
            self._records.clear()

    def _advice(self) -> str:
        return f"; {self._leftover}" if self._leftover else ""

    def _log_file(self) -> Path | None:
        label = re.split(r"[.:]", self.name)[-1]
        return self.run.logs / f"tracker-{label}.log" if self.run.logs else None

    def _work(self) -> None:
        try:
            while (record := self._next()) is not None:
                self._deliver(record)
            self._finish_process()
        finally:
            self._end_process()

    def _next(self) -> tuple[str, Any, int] | None:
        """Wait for the next record; None at the end of the run."""
        with self._change:
            self._change.wait_for(lambda: bool(self._records) or self._deadline is not None)
            return self._records.popleft() if self._records else None

    def _deliver(self, record: tuple[str, Any, int]) -> None:
        """Send a record, with retries, or count it as dropped."""
        attempt, pause_s = 0, self.policy.first_pause_s
        while True:
            was_over = self._deadline is not None
            try:
                self._open_process().call(record[0], *record[1:], timeout_s=self._time_left())
            except TrackerError as failure:
                self._note(failure)
                attempt += not failure.retryable
                if attempt >= self.policy.attempts:
                    self._drop(1)
                    return
                if was_over and failure.retryable:  # the run is over, and the next record would fail likewise
                    self._drop(1)
                    self._drop_all()
                    return
                with self._change:
                    self._change.wait_for(lambda: self._deadline is not None, pause_s)
                pause_s = min(2 * pause_s, self.policy.longest_pause_s)
            else:
                self._note_success()
                return

    def _open_process(self) -> TrackerProcess:
        process = self._started()
        if not self._opened:
            try:
                self._leftover = process.call("open", self.name, self.run, timeout_s=self._time_left())
            except TrackerError as failure:
                # Before the tracker is open, no failure is the fault of a record.
                failure.retryable = failure.lost = True
                raise
            self._opened = True
        return process

    def _started(self) -> TrackerProcess:
        if self._process is None:
            log = self._log_file()
            try:
                if log is not None:
                    log.parent.mkdir(parents=True, exist_ok=True)
                self._process = TrackerProcess(log, self.run.timeout_s)
            except OSError as error:
                raise TrackerError(f"its process cannot be started: {error}", retryable=True) from error
            self._opened = False
        return self._process

    def _finish_process(self) -> None:
        if self._process is None or not self._opened:
            return
        try:
            self._process.call("finish", timeout_s=self._time_left())
        except TrackerError as failure:
            self._report(f"tracker {self.name}: it did not send all records in time ({failure}){self._advice()}")

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.child.kill()

    def _time_left(self) -> float:
        left = self.run.timeout_s if self._deadline is None else self._deadline - time.monotonic()
        return max(0.0, min(left, self.run.timeout_s))

    def _note(self, failure: TrackerError) -> None:
        logger.info("tracker %s: %s", self.name, failure)
        if failure.lost:
            self._end_process()
        if not self._failing:
            self.failure = textwrap.shorten(str(failure), LONGEST_TEXT, placeholder=" ...")
        if not self._reported and self._deadline is None:
            self._reported, log = True, self._log_file()
            self._report(
                f"tracker {self.name} fails: {self.failure}\nThe run continues, and failed records are retried"
                + (f"; details in {log}" if log else "")
            )
        self._failing = True

    def _note_success(self) -> None:
        self.delivered += 1
        if self._reported:
            waiting, lost = len(self._records), f"; {self.dropped} records are lost" if self.dropped else ""
            self._report(f"tracker {self.name} works again, {waiting} records are waiting{lost}")
        self._failing = self._reported = False
