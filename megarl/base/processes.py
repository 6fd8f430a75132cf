"""Reads of the process table and of ``/proc`` that succeed while processes end and signals arrive.

The kernel may give an empty record: of a process that is being reaped, and of a live one to a thread that a signal
interrupts. ``psutil`` raises IndexError for it, also from calls that read the records of all processes. So a record is
read again until it has content.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil

READ_ERRORS = (psutil.Error, IndexError, FileNotFoundError)
"""Errors when a process ends during a read, or another user owns it."""

_T = TypeVar("_T")
ATTEMPTS = 10
PAUSE_S = 0.01
"""Reads of an empty file, and the seconds between them."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended; a zombie has."""
    try:
        return _repeated(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    except psutil.AccessDenied:
        return False
    except READ_ERRORS:
        return True


def child_processes(process: psutil.Process | None = None) -> list[psutil.Process]:
    """List the children of a process (None: this one), zombies included; none if it has ended."""
    return _children(process, recursive=False)


def descendants(process: psutil.Process | None = None) -> list[psutil.Process]:
    """List the children of a process (None: this one) and their children; see :func:`child_processes`."""
    return _children(process, recursive=True)


def all_processes() -> Iterator[psutil.Process]:
    """Yield the processes of this machine."""
    for pid in psutil.pids():
        with contextlib.suppress(*READ_ERRORS):
            yield _repeated(partial(psutil.Process, pid))


def process_name(process: psutil.Process) -> str:
    """Return the name of a process; empty if it has ended."""
    with contextlib.suppress(*READ_ERRORS):
        return _repeated(lambda: str(process.name()))
    return ""


def command_line(process: psutil.Process) -> str:
    """Return the command line of a process; empty if it has ended."""
    with contextlib.suppress(*READ_ERRORS):
        return " ".join(process.cmdline())
    return ""


def process_group(process: psutil.Process) -> int | None:
    """Return a process's group ID; None if it has ended."""
    try:
        return os.getpgid(process.pid)
    except OSError:
        return None


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
    """Repeat a read while a record is empty."""
    for _ in range(ATTEMPTS):
        with contextlib.suppress(IndexError, FileNotFoundError):
            return read()
        time.sleep(PAUSE_S)
    return read()


def read_kernel_file(path: str) -> str:
    """Read a file below ``/proc`` as text; empty if it does not exist or may not be read.

    A thread that a signal interrupts can read zero bytes of a complete file, so an empty file is read again.
    """
    try:
        for _ in range(ATTEMPTS):
            text = Path(path).read_text(errors="replace", encoding="utf-8")
            if text:
                return text
            time.sleep(PAUSE_S)
    except OSError:
        pass
    return ""


def boot_id() -> str:
    """Return the ID of the kernel's last boot, different on every machine; empty if the system has none."""
    return read_kernel_file("/proc/sys/kernel/random/boot_id").strip()


def process_namespace() -> str:
    """Return the namespace of process IDs, different in two containers of a host; empty if the system has none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def process_fields(pid: int) -> list[str]:
    """Return the fields of ``/proc/<pid>/stat`` from the state on, the third; empty for a process that has ended."""
    return read_kernel_file(f"/proc/{pid}/stat").rpartition(")")[2].split()


def child_pids(pid: int) -> list[int]:
    """Return the child processes of a process; none if it has ended."""
    children: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # the thread has ended
                children += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="utf-8").split())
    return children


def open_files(pid: int) -> Iterator[tuple[str, str]]:
    """Yield the ``/proc`` path and the target of a process's open files.

    There are none if the process has ended or is another user's; a file that is closed meanwhile is left out.
    """
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{descriptor}"
            with contextlib.suppress(OSError):
                yield path, os.readlink(path)


def resident_bytes(pid: int | str = "self") -> int:
    """Return the resident memory of a process; 0 if it has ended, or the system does not report it."""
    numbers = read_kernel_file(f"/proc/{pid}/statm").split()
    return int(numbers[1]) * _PAGE_BYTES if numbers else 0
