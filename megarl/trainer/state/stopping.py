"""Stop conditions of a run: a time limit, a scheduler's deadline, a SIGTERM, a SIGHUP, a Ctrl-C."""

from __future__ import annotations

import _thread
import logging
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from megarl.base.errors import ConfigError

EXPIRY_VARIABLES = (
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",  # elastic instances of Volcengine
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",  # capacity blocks of AWS
    "SLURM_JOB_END_TIME",
)
"""Environment variables with the UNIX time, in seconds, at which the machine or job ends."""

CTRL_C, SIGTERM, SIGHUP = "Ctrl-C", "SIGTERM", "SIGHUP"
RAY_LOST, KILLED = "a lost process of Ray", "the driver or a process of Ray was killed"
_REASONS = {signal.SIGTERM: SIGTERM, signal.SIGHUP: SIGHUP, signal.SIGINT: CTRL_C}
FIRST_SAVE_S = 60.0
"""Assumed seconds of a save before the first."""
STEPS_REMEMBERED = 10

logger = logging.getLogger(__name__)


class Deadline(NamedTuple):
    """A time by which the run must be saved.

    Attributes:
        at: time of ``time.monotonic``, in seconds: corrections of the machine's clock do not move it.
    """

    at: float
    name: str


def find_deadlines(
    max_wall_seconds: float | None,
    now: float,
    unix_now: float,
    environment: Mapping[str, str],
    started: float | None = None,
) -> list[Deadline]:
    """List the deadlines of a run.

    Args:
        now: time of ``time.monotonic``.
        unix_now: UNIX time at the same moment, in seconds.
        started: time at which the run started, of ``time.monotonic``; None = now.

    Raises:
        ConfigError: one of :data:`EXPIRY_VARIABLES` is not a time.
    """
    deadlines = []
    if max_wall_seconds is not None:
        start = now if started is None else started
        deadlines.append(Deadline(start + max_wall_seconds, f"trainer.max_wall_seconds={max_wall_seconds:g}"))
    for name in EXPIRY_VARIABLES:
        text = environment.get(name, "").strip()
        if not text:
            continue
        try:
            at = float(text)
        except ValueError:
            at = math.nan
        if not math.isfinite(at):
            raise ConfigError(
                f"environment variable {name}={text!r} is not a UNIX time in seconds; correct or unset it",
                code="launch.job-end-time",
            )
        if at <= unix_now:
            logger.warning("%s=%s is in the past and has no effect", name, text)
        else:
            deadlines.append(Deadline(now + at - unix_now, name))
    return deadlines


class StopCondition:
    """Decides after each step whether the run must end: by a deadline, a signal or a request.

    Args:
        deadlines: times by which the last save must be complete.
        spare_s: margin before a deadline, in seconds.

    Attributes:
        reason: reason to end; None to continue.
    """

    def __init__(
        self, deadlines: Sequence[Deadline] = (), spare_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.reason: str | None = None
        self._deadline = min(deadlines, default=None)
        self._spare_s = spare_s
        self._clock = clock
        self._requested: str | None = None
        self._step_seconds: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._last = clock()

    @property
    def requested(self) -> str | None:
        """Source of a request to end after the current step; None without one."""
        return self._requested

    def request(self, reason: str) -> None:
        """Request the end of the run after the current step."""
        self._requested = reason

    def begin(self) -> None:
        """Start the timing of steps."""
        self._last = self._clock()
        self.reason = self._requested

    def step_done(self, save_s: float | None) -> str | None:
        """Decide whether another step and a save after it fit before the deadline.

        Args:
            save_s: seconds of the slowest save; None before the first save.

        Returns:
            :attr:`reason`.
        """
        now = self._clock()
        self._step_seconds.append(now - self._last)
        self._last = now
        self.reason = self._requested
        if self.reason is None and self._deadline is not None:
            left = self._deadline.at - now
            needed = max(self._step_seconds) + (FIRST_SAVE_S if save_s is None else save_s) + self._spare_s
            if left < needed:
                self.reason = (
                    f"{self._deadline.name}: {max(left, 0):.0f} s are left, another step could take {needed:.0f}"
                )
        return self.reason


@contextmanager
def ends_on_signals(stop: StopCondition, notify: Callable[[str], None] = logger.warning) -> Iterator[None]:
    """End the run after the current step at a first SIGTERM, SIGHUP or Ctrl-C; at once after a second.

    A SIGHUP after the first signal changes nothing: a closed terminal sends several.

    Has no effect outside the main thread, since Python handles no signals there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous: dict[int, Any] = {number: signal.getsignal(number) for number in _REASONS}
    handled = [number for number, handler in previous.items() if handler is not signal.SIG_IGN]

    def restore(numbers: Sequence[int]) -> None:
        for number in numbers:
            if signal.getsignal(number) is handle:
                signal.signal(number, previous[number])

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_lost_terminal()
            if stop.requested is not None:
                return
        reason = _REASONS[signal.Signals(number)]
        stop.request(reason)
        restore([other for other in handled if other != signal.SIGHUP])
        following = SIGTERM if reason == SIGHUP else f"another {reason}"
        text = f"{reason}: the run ends after the current step and saves; {following} ends it at once"
        # Not in this handler, which may interrupt a print that holds a lock. Nor by a Thread, whose start takes a lock.
        _thread.start_new_thread(notify, (text,))

    for number in handled:
        signal.signal(number, handle)
    try:
        yield
    finally:
        restore(handled)


def _leave_lost_terminal() -> None:
    """Redirect standard output and error to ``/dev/null`` where their terminal is closed.

    A write to a closed terminal raises, and would end the run before its save.
    """
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")  # changes nothing; a closed terminal refuses it
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)


def process_deadlines(max_wall_seconds: float | None, started: float) -> list[Deadline]:
    """List the deadlines of this process from now on; see :func:`find_deadlines`."""
    return find_deadlines(max_wall_seconds, time.monotonic(), time.time(), os.environ, started)
