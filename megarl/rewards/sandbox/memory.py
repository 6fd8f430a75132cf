"""Memory of a sandbox: the sum over all processes of a program, read from ``/proc``."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from megarl.base.processes import child_pids, resident_bytes

_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)


def exceeds_memory(launcher: int, limit: int, own_processes: int = 3) -> bool:
    """Return whether a program with all its processes has more resident bytes than a limit.

    Pages that processes share after a fork count once. Files in anonymous memory (``memfd``) count while they are open.

    Args:
        launcher: process id of the launcher of the sandbox.
        limit: bytes.
        own_processes: processes of the launcher, each the only child of the one before; they do not count.
    """
    pids = _tree(launcher)[own_processes:]
    files = _anonymous_files(pids)
    if files + sum(map(resident_bytes, pids)) <= limit:  # an upper bound, much cheaper to read
        return False
    return files + sum(map(_proportional, pids)) > limit


def _tree(root: int) -> list[int]:
    """Return the ids of a process and its descendants; orphans belong to process 1 of their namespace."""
    pids = [root]
    for pid in pids:  # grows
        pids += child_pids(pid)
    return pids


def _anonymous_files(pids: list[int]) -> int:
    """Return the bytes of the open memory files of processes, each file once."""
    sizes: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # another user's process, or it has ended
            for entry in os.scandir(f"/proc/{pid}/fd"):
                if os.readlink(entry.path).startswith("/memfd:"):
                    status = os.stat(entry.path)
                    sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def _proportional(pid: int) -> int:
    """Return the resident bytes of a process, with shared pages divided among their users (PSS)."""
    try:
        match = _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_bytes())
    except OSError:  # another user's process, or it has ended
        match = None
    return int(match[1]) * 1024 if match else resident_bytes(pid)
