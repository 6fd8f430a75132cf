"""Clock of a run: seconds since its command was entered, including imports and checks.

Times are those of ``time.monotonic``, which a correction of the machine's clock does not move.
"""

from __future__ import annotations

import time

import psutil

_started: float | None = None


def start_run_clock() -> None:
    """Start the clock at the process's start, or, for a later run of a sweep, now."""
    global _started
    age = time.time() - psutil.Process().create_time() if _started is None else 0.0
    _started = time.monotonic() - age


def run_started() -> float:
    """Return the time at which the run started, on the clock of ``time.monotonic``; now without a started clock."""
    return time.monotonic() if _started is None else _started
