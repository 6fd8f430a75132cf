"""Processes that are killed before a chosen change to the file system."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "ctypes.dlopen")


def run_and_die(changes: int, act: Callable[[], object]) -> bool:
    """Run ``act`` in a forked process that is killed (SIGKILL) after ``changes`` changes to the file system.

    Returns:
        Whether it was killed; False if it succeeded.
    """
    child = os.fork()
    if child == 0:
        _die_after(changes)
        try:
            act()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        return False
    assert os.WTERMSIG(status) == signal.SIGKILL
    return True


def _die_after(changes: int) -> None:
    remaining = changes

    def count(event: str, args: tuple[Any, ...]) -> None:
        nonlocal remaining
        writing = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_CREAT)
        if writing or event in CHANGES:
            remaining -= 1
            if remaining < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
