"""Clock of a run: wall time since its command was entered, including imports and checks."""

from __future__ import annotations

import time

import psutil

_started: float | None = None


def start_run_clock() -> None:
    """Start the clock: for the first run of a process at the start of the process, for a later one of a sweep now."""
    global _started
    _started = psutil.Process().create_time() if _started is None else time.time()


def run_started() -> float:
    """Return the UNIX time at which the run started; now without a started clock."""
    return time.time() if _started is None else _started
