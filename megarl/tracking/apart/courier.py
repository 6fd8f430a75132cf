"""Brings a run's records to a tracker in a process of its own, in order, whatever state that is in.

The driver only puts records into a queue. A thread takes them one by one to the tracker's process, and goes on to the
next when one has arrived. What fails because the network is down, or hangs, is tried again, less and less often, until
it succeeds; what is refused for what it is, some times only. The queue has a bound, beyond which the oldest records are
dropped. Failures are told once, and at the end what did not arrive is counted.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError
from megarl.tracking.apart.process import TrackerFailed, TrackerProcess
from megarl.tracking.tracker import RunInfo, Tracker

logger = logging.getLogger(__name__)

LONGEST_TEXT = 300
"""Characters of a failure that is told; the tracker's log has all of them."""


@dataclass(frozen=True)
class Patience:
    """How long and how often things are tried.

    Attributes:
        queued: records that wait at most; an older one is dropped for a new one.
        attempts: to deliver a record that is refused, or in which the process dies.
        first_pause_s: after a failure; each further pause is twice as long.
        longest_pause_s: between attempts.
        check_s: for the look at the set-up, which the start of the run waits for.
    """

    queued: int = 1000
    attempts: int = 4
    first_pause_s: float = 1.0
    longest_pause_s: float = 60.0
    check_s: float = 60.0


class Courier(Tracker):
    """A tracker like the others to those who log; use :meth:`wait_checked` before anything else.

    Args:
        name: of the tracker, as ``trainer.logger`` has it; its process looks for the class.
        run: what it is told; ``timeout_s`` limits each of its calls.
        tell: takes the lines that the user is to see.
        patience: how long and how often things are tried.
    """

    def __init__(
        self,
        name: str,
        run: RunInfo,
        tell: Callable[[str], None],
        patience: Patience | None = None,
    ) -> None:
        self.name = name
        self.run = dataclasses.replace(run, console=None)
        self.patience = patience or Patience()
        self.delivered = self.dropped = 0
        self.failure = ""  # with which the last row of failures began
        self._tell = tell
        self._failing = self._told = False
        self._leftover = ""
        self._records: deque[tuple[str, Any, int]] = deque()
        self._change = threading.Condition()
        self._deadline: float | None = None  # once the run is over
        self._checked = threading.Event()
        self._misconfigured: str | None = None
        self._process: TrackerProcess | None = None
        self._opened = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def wait_checked(self) -> None:
        """Wait for the tracker's look at its set-up.

        Raises:
            ConfigError: something is wrong with it.
        """
        self._checked.wait(self.patience.check_s)
        if self._misconfigured is not None:
            raise ConfigError(self._misconfigured)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Queue the metrics."""
        self._put(("log", dict(metrics), step))

    def log_samples(self, samples: Sequence[Mapping[str, Any]], step: int) -> None:
        """Queue the answers."""
        self._put(("log_samples", [dict(sample) for sample in samples], step))

    def begin_finish(self) -> None:
        """Say that no more comes, so that several can finish at the same time; the tracker's time runs from now."""
        with self._change:
            if self._deadline is None:
                self._deadline = time.monotonic() + self.run.timeout_s
                self._change.notify_all()

    def finish(self) -> None:
        """Wait until all is delivered, at most ``run.timeout_s`` seconds; then tell what was not."""
        self.begin_finish()
        assert self._deadline is not None
        self._thread.join(max(0.0, self._deadline - time.monotonic()) + 1.0)
        self._end_process()  # which also ends a thread that waits for it
        self._thread.join(1.0)
        self._drop_all()
        if self.dropped:
            total = self.delivered + self.dropped
            text = f"tracker {self.name}: {self.dropped} of {total} records did not arrive ({self.failure})"
            self._tell(f"{text}; metrics.jsonl has all metrics{self._advice()}")

    def _put(self, record: tuple[str, Any, int]) -> None:
        with self._change:
            if len(self._records) >= self.patience.queued:
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
            self._check()
            while self._misconfigured is None and (record := self._next()) is not None:
                self._deliver(record)
            self._finish_process()
        finally:
            self._checked.set()
            self._end_process()

    def _check(self) -> None:
        try:
            self._started().ask("check", self.name, timeout_s=self.patience.check_s)
        except TrackerFailed as failure:
            if failure.misconfigured:
                self._misconfigured = str(failure).removeprefix("ConfigError: ")
            else:
                self._note(failure)
        self._checked.set()

    def _next(self) -> tuple[str, Any, int] | None:
        """The next record, when there is one; None at the end."""
        with self._change:
            self._change.wait_for(lambda: bool(self._records) or self._deadline is not None)
            return self._records.popleft() if self._records else None

    def _deliver(self, record: tuple[str, Any, int]) -> None:
        """Bring one record there, or count it as dropped."""
        attempt, pause_s = 0, self.patience.first_pause_s
        while True:
            was_over = self._deadline is not None
            try:
                self._open_process().ask(record[0], *record[1:], timeout_s=self._time_left())
            except TrackerFailed as failure:
                self._note(failure)
                attempt += not failure.may_pass
                if attempt >= self.patience.attempts:
                    self._drop(1)
                    return
                if (
                    was_over and failure.may_pass
                ):  # it was tried since, and nothing suggests that the next would fare better
                    self._drop(1)
                    self._drop_all()
                    return
                with self._change:
                    self._change.wait_for(lambda: self._deadline is not None, pause_s)
                pause_s = min(2 * pause_s, self.patience.longest_pause_s)
            else:
                self._note_success()
                return

    def _open_process(self) -> TrackerProcess:
        process = self._started()
        if not self._opened:
            try:
                self._leftover = process.ask("open", self.name, self.run, timeout_s=self._time_left())
            except TrackerFailed as failure:
                # Until the tracker is open nothing can be a record's fault.
                failure.may_pass = failure.lost = True
                raise
            self._opened = True
        return process

    def _started(self) -> TrackerProcess:
        if self._process is None:
            log = self._log_file()
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._process = TrackerProcess(log, self.run.timeout_s)
            except OSError as error:
                raise TrackerFailed(f"its process cannot be started: {error}", may_pass=True) from error
            self._opened = False
        return self._process

    def _finish_process(self) -> None:
        if self._process is None or not self._opened:
            return
        try:
            self._process.ask("finish", timeout_s=self._time_left())
        except TrackerFailed as failure:
            self._tell(f"tracker {self.name}: it did not send all in time ({failure}){self._advice()}")

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()

    def _time_left(self) -> float:
        """Seconds that a call may take."""
        left = self.run.timeout_s if self._deadline is None else self._deadline - time.monotonic()
        return max(0.0, min(left, self.run.timeout_s))

    def _note(self, failure: TrackerFailed) -> None:
        logger.info("tracker %s: %s", self.name, failure)
        if failure.lost:
            self._end_process()
        if not self._failing:
            self.failure = textwrap.shorten(str(failure), LONGEST_TEXT, placeholder=" ...")
        if not self._told and self._deadline is None:
            self._told, log = True, self._log_file()
            self._tell(
                f"tracker {self.name} fails: {self.failure}\nThe run goes on, and what it misses is tried again"
                + (f"; more in {log}" if log else "")
            )
        self._failing = True

    def _note_success(self) -> None:
        self.delivered += 1
        if self._told:
            waiting, lost = len(self._records), f"; {self.dropped} records are lost" if self.dropped else ""
            self._tell(f"tracker {self.name} works again, {waiting} records are waiting{lost}")
        self._failing = self._told = False
