"""Ending a run in good order before something else ends it: a time limit, a scheduler's deadline, a SIGTERM."""

from __future__ import annotations

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

from megarl.errors import ConfigError

EXPIRY_VARIABLES = (
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",  # elastic instances of Volcengine
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",  # capacity blocks of AWS
    "SLURM_JOB_END_TIME",
)
"""Environment variables with the UNIX time, in seconds, at which the machine or job is taken away."""

FIRST_SAVE_S = 60.0
"""How long a save is taken to last before one was timed."""
STEPS_REMEMBERED = 10

logger = logging.getLogger(__name__)


class Deadline(NamedTuple):
    """A moment by which everything must be saved.

    Attributes:
        at: UNIX time in seconds.
        name: who set it.
    """

    at: float
    name: str


def find_deadlines(max_wall_seconds: float | None, now: float, environment: Mapping[str, str]) -> list[Deadline]:
    """The deadlines of a run that starts now.

    Args:
        max_wall_seconds: ``trainer.max_wall_seconds``.
        now: UNIX time in seconds.
        environment: environment variables.

    Raises:
        ConfigError: one of :data:`EXPIRY_VARIABLES` is not a time.
    """
    found = []
    if max_wall_seconds is not None:
        found.append(Deadline(now + max_wall_seconds, f"trainer.max_wall_seconds={max_wall_seconds:g}"))
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
                f"environment variable {name}={text!r} is not a UNIX time in seconds; correct or unset it"
            )
        if at <= now:
            logger.warning("%s=%s is in the past and has no effect", name, text)
        else:
            found.append(Deadline(at, name))
    return found


class Stop:
    """Whether a run has to end after the step that it has just done.

    Args:
        deadlines: by which it has to have saved.
        spare_s: seconds to spare before a deadline.
        clock: UNIX time in seconds.

    Attributes:
        reason: why it ends; None while it goes on.
    """

    def __init__(
        self, deadlines: Sequence[Deadline] = (), spare_s: float = 0.0, clock: Callable[[], float] = time.time
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
        """What asked the run to end before its deadline; it does after the step under way."""
        return self._requested

    def request(self, reason: str) -> None:
        """Ask the run to end after the step under way."""
        self._requested = reason

    def begin(self) -> None:
        """Steps begin now: from here on they are timed."""
        self._last = self._clock()
        self.reason = self._requested

    def step_done(self, save_s: float | None) -> str | None:
        """Decides whether another step may follow: whether it and a save after it end before the deadline.

        Args:
            save_s: seconds that the slowest save took; None where none was timed.

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
def ends_on_sigterm(stop: Stop) -> Iterator[None]:
    """Scope in which a first SIGTERM asks the run to end in good order; a second one does what it did before.

    Without effect outside the main thread, where Python handles no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: Any = signal.getsignal(signal.SIGTERM)

    def ask(number: int, frame: FrameType | None) -> None:
        stop.request("SIGTERM")
        signal.signal(signal.SIGTERM, before)

    signal.signal(signal.SIGTERM, ask)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is ask:
            signal.signal(signal.SIGTERM, before)


def own_deadlines(max_wall_seconds: float | None) -> list[Deadline]:
    """:func:`find_deadlines` of this process, from now on."""
    return find_deadlines(max_wall_seconds, time.time(), os.environ)
