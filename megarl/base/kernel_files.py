"""Reads of files below ``/proc``, which Linux may deliver empty once although their process lives."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

ATTEMPTS = 10
PAUSE_S = 0.01
"""Number of reads of a file that is empty, and the seconds between them."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def read_kernel_file(path: str) -> str:
    """Read a file below ``/proc`` as text; empty if it does not exist or may not be read.

    A thread that a signal interrupts can read zero bytes of a complete file, so an empty file is read again.
    """
    try:
        for _ in range(ATTEMPTS):
            text = Path(path).read_text(errors="replace")
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
                children += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return children


def resident_bytes(pid: int | str = "self") -> int:
    """Return the resident memory of a process; 0 if it has ended, or the system does not report it."""
    numbers = read_kernel_file(f"/proc/{pid}/statm").split()
    return int(numbers[1]) * _PAGE_BYTES if numbers else 0
