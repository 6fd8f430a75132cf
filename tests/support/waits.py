"""Waits of tests for other threads and processes, with a limit that a busy machine meets."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TypeVar

from megarl.base.processes import process_fields

T = TypeVar("T")
LIMIT_S = 180.0


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds; fail at the limit."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s"
        time.sleep(0.02)


def wait_while(
    lives: Callable[[], bool], condition: Callable[[], T], output: Callable[[], str], limit_s: float = LIMIT_S
) -> T:
    """Wait until a condition holds, and return its value; fail if a process ends before, or at the limit."""
    deadline = time.monotonic() + limit_s
    while True:
        is_alive = lives()  # first: the process may fulfil the condition and end at once
        if value := condition():
            return value
        assert is_alive, f"it ended before:\n{output()}"
        assert time.monotonic() < deadline, f"not within {limit_s:g} s:\n{output()}"
        time.sleep(0.1)


def wait_for_text(
    lives: Callable[[], bool], pattern: str, output: Callable[[], str], limit_s: float = LIMIT_S
) -> re.Match[str]:
    """Wait until a process has printed a match of a regular expression, and return it."""
    match = wait_while(lives, lambda: re.search(pattern, output()), output, limit_s)
    assert match is not None
    return match


def wait_for_end(pid: int) -> None:
    """Wait until a process has ended, whether or not its parent has noticed it."""
    wait_until(lambda: process_fields(pid)[:1] in ([], ["Z"], ["X"]))
