"""A tracker in a subprocess: records go through a bounded queue, in order, with retries and back-off.

The driver only appends to a queue. A thread sends the records one by one to the tracker's process (:func:`main`).
Network errors and hangs are retried with growing pauses until they succeed; a refused record is retried a few times. A
full queue drops its oldest records. A failure is reported once, and at the end the number of lost records.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import re
import subprocess
import textwrap
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megarl.base.child_process import ChildProcess, open_connection
from megarl.tracking.tracker import TRACKERS, RunInfo, Tracker

logger = logging.getLogger(__name__)

LONGEST_TEXT = 300
"""Characters of a reported failure; the tracker's log has the whole text."""
_DONE, _UNREACHABLE, _REFUSED = "done", "unreachable", "refused"
"""Results of a call. ``_UNREACHABLE``: an I/O error that a retry may cure; ``_REFUSED``: the fault of the record."""


class TrackerError(Exception):
    """A failed call to a tracker's process.

    Attributes:
        retryable: the same call may succeed later, such as after a network error or a hang.
        lost: the process is unusable.
    """

    def __init__(self, message: str, *, retryable: bool = False, lost: bool = False):
        super().__init__(message)
        self.retryable, self.lost = retryable, lost


class SubprocessTracker(Tracker):
    """Runs a tracker in a subprocess; its setup has passed :func:`megarl.tracking.check_trackers`.

    Attributes:
        attempts: attempts to send a record that is refused or kills the process.
        pauses_s: first and longest pause after a failure; the pause doubles with each failure.
    """

    attempts = 4
    pauses_s = 1.0, 60.0

    def __init__(self, name: str, run: RunInfo, report: Callable[[str], None], capacity: int = 1000) -> None:
        self.name = name
        self.run = dataclasses.replace(run, console=None)
        self.delivered = self.dropped = 0
        self.failure = ""  # the first failure of the latest series
        self._report = report
        self._failing = self._reported = False
        self._advice = ""
        self._records: deque[tuple[str, Any, int]] = deque(maxlen=capacity)
        self._change = threading.Condition()
        self._deadline: float | None = None  # set at the end of the run
        self._process: ChildProcess | None = None
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
            self._report(f"{text}; metrics.jsonl has all metrics{self._advice}")

    def _put(self, record: tuple[str, Any, int]) -> None:
        with self._change:
            self.dropped += len(self._records) == self._records.maxlen
            self._records.append(record)
            self._change.notify_all()

    def _drop_all(self) -> None:
        with self._change:
            self.dropped += len(self._records)
            self._records.clear()

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
        attempt, (pause_s, longest_pause_s) = 0, self.pauses_s
        while True:
            was_over = self._deadline is not None
            try:
                self._open()
                self._call(*record, timeout_s=self._time_left())
            except TrackerError as failure:
                self._note(failure)
                attempt += not failure.retryable
                is_unreachable = was_over and failure.retryable  # the run is over, and the next record would fail, too
                if attempt >= self.attempts or is_unreachable:
                    with self._change:
                        self.dropped += 1
                    if is_unreachable:
                        self._drop_all()
                    return
                with self._change:
                    self._change.wait_for(lambda: self._deadline is not None, pause_s)
                pause_s = min(2 * pause_s, longest_pause_s)
            else:
                self._note_success()
                return

    def _open(self) -> None:
        """Start the process and open the tracker in it, if necessary; a failure is not the fault of a record."""
        try:
            if self._process is None:
                self._opened = False
                with contextlib.ExitStack() as stack:
                    output: Any = subprocess.DEVNULL
                    if (log := self._log_file()) is not None:
                        log.parent.mkdir(parents=True, exist_ok=True)
                        output = stack.enter_context(log.open("ab"))
                    self._process = ChildProcess(f"{__name__}:main", self.run.timeout_s, output=output)
            if not self._opened:
                text = self._call("open", self.name, self.run, timeout_s=self._time_left())
                self._advice = f"; {text}" if text else ""
                self._opened = True
        except OSError as error:
            raise TrackerError(f"its process cannot be started: {error}", retryable=True) from error
        except TrackerError as failure:
            failure.retryable = failure.lost = True
            raise

    def _call(self, name: str, *args: Any, timeout_s: float) -> str:
        """Call a method of the tracker in its process; return the text of the result.

        Raises:
            TrackerError: the call failed or timed out.
        """
        process = self._process
        if process is None:  # :meth:`finish` has ended it
            raise TrackerError("its process ended", lost=True)
        try:
            status, text = process.request((name, *args), timeout_s)
        except TimeoutError:
            raise TrackerError(f"no reply to {name} within {timeout_s:.0f} s", retryable=True, lost=True) from None
        except EOFError as error:
            raise TrackerError(f"{error} in {name}", lost=True) from error
        if status != _DONE:
            raise TrackerError(text, retryable=status == _UNREACHABLE)
        return str(text)

    def _finish_process(self) -> None:
        if self._process is None or not self._opened:
            return
        try:
            self._call("finish", timeout_s=self._time_left())
        except TrackerError as failure:
            self._report(f"tracker {self.name}: it did not send all records in time ({failure}){self._advice}")

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()

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


def main(handle: int, timeout_s: float) -> None:
    """Execute the driver's calls in order until it closes the connection, finish the tracker, and exit the process.

    Args:
        handle: file descriptor of the connection to the driver.
        timeout_s: seconds for the tracker to finish if the driver is gone.
    """
    connection = open_connection(handle)
    calls: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, calls, timeout_s), daemon=True).start()
    tracker: Tracker | None = None
    name = ""
    while name != "finish":
        name, *args = calls.get() or ("finish",)  # None: the driver is gone
        result = _DONE, ""
        try:
            if name == "open":
                tracker = TRACKERS.find(args[0])(args[1])
                result = _DONE, tracker.leftover()
            elif tracker is not None:
                getattr(tracker, name)(*args)
        except (Exception, SystemExit) as error:
            print(time.strftime("%Y-%m-%d %H:%M:%S"), "failed:", name, flush=True)
            traceback.print_exc()
            result = _UNREACHABLE if _has_io_error(error) else _REFUSED, f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            connection.send(result)
    os._exit(0)  # exit handlers of a package may hang


def _read(connection: Connection, calls: queue.SimpleQueue[tuple[Any, ...] | None], timeout_s: float) -> None:
    """Receive calls in a thread, so that the end of the driver is noticed during a call that hangs."""
    try:
        while True:
            calls.put(connection.recv())
    except (EOFError, OSError):
        calls.put(None)
    time.sleep(timeout_s)
    os._exit(1)


def _has_io_error(error: BaseException | None) -> bool:
    """Whether the chain of causes has an ``OSError``, which includes the errors of requests, sockets and files."""
    while error is not None:
        if isinstance(error, OSError):
            return True
        error = error.__cause__ or error.__context__
    return False
