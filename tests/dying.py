"""Processes that die by SIGKILL at a chosen change to the disk."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "ctypes.dlopen")


def run_and_die(changes: int, act: Callable[[], object]) -> bool:
    """Runs ``act`` in a forked process, where the n-th change to the file system is preceded by SIGKILL.

    Returns:
        Whether it died; otherwise it ended well.
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
    left = [changes]

    def count(event: str, args: tuple) -> None:
        writing = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_CREAT)
        if writing or event in CHANGES:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
