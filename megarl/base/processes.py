"""Reads of the process table that succeed while processes end.

The kernel may give an empty record of a process that is being reaped. ``psutil`` raises IndexError for it, also from
calls that read the records of all processes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import psutil

READ_ERRORS = (psutil.Error, IndexError, FileNotFoundError)
"""Errors of reads of a process that ends meanwhile, or that another user owns."""
_ATTEMPTS = 50
_PAUSE_S = 0.02

_T = TypeVar("_T")


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.AccessDenied:
        return False
    except READ_ERRORS:
        return True


def child_processes(process: psutil.Process | None = None) -> list[psutil.Process]:
    """List the children of a process, zombies included; none if it has ended.

    Args:
        process: None = this process.
    """
    return _children(process, recursive=False)


def descendants(process: psutil.Process | None = None) -> list[psutil.Process]:
    """List the children of a process and their children, zombies included; none if it has ended.

    Args:
        process: None = this process.
    """
    return _children(process, recursive=True)


def all_processes() -> Iterator[psutil.Process]:
    """Yield the processes of this machine."""
    for pid in psutil.pids():
        with contextlib.suppress(*READ_ERRORS):
            yield psutil.Process(pid)


def command_line(process: psutil.Process) -> str:
    """Return the command line of a process; empty if it has ended."""
    with contextlib.suppress(*READ_ERRORS):
        return " ".join(process.cmdline())
    return ""


def wait_for_ends(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait for the ends of processes, and reap those that are children.

    Returns:
        The processes that are still alive.
    """
    deadline = time.monotonic() + timeout_s
    return _repeated(lambda: list(psutil.wait_procs(processes, max(0.0, deadline - time.monotonic()))[1]))


def _children(process: psutil.Process | None, recursive: bool) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        owner = process or psutil.Process()
        return _repeated(lambda: list(owner.children(recursive=recursive)))
    return []


def _repeated(read: Callable[[], _T]) -> _T:
    """Repeat a read until no record is empty; a record is empty for some milliseconds."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(IndexError, FileNotFoundError):
            return read()
        time.sleep(_PAUSE_S)
    return read()
