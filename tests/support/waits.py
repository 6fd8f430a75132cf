"""Waits of tests for other threads and processes, with a limit that a busy machine meets."""

from __future__ import annotations

import time
from collections.abc import Callable

from megarl.base.processes import process_fields

LIMIT_S = 180.0


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds; fail at the limit."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s"
        time.sleep(0.02)


def wait_for_end(pid: int) -> None:
    """Wait until a process has ended, whether or not its parent has noticed it."""
    wait_until(lambda: process_fields(pid)[:1] in ([], ["Z"], ["X"]))
