"""Memory limits of a program in a sandbox: by a cgroup (v2), else by the sum over its processes.

In a cgroup the kernel counts all processes of the program and kills them together. Without one, their memory is read
from ``/proc``.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import TracebackType

import psutil

from megarl.base.processes import child_pids, open_files, resident_bytes

_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)
_PREFIX = "megarl-sandbox-"
_REMOVE_S = 2.0
_numbers = itertools.count()


def exceeds_memory(launcher: int, limit: int, own_processes: int = 3) -> bool:
    """Return whether a program with all its processes has more resident bytes than a limit.

    Pages that processes share after a fork count once. Files in anonymous memory (``memfd``) count while they are open.

    Args:
        launcher: process id of the launcher of the sandbox.
        own_processes: processes of the launcher, each the only child of the one before; they do not count.
    """
    tree = [launcher]
    for pid in tree:  # grows by the descendants; orphans belong to process 1 of their namespace
        tree += child_pids(pid)
    pids = tree[own_processes:]
    files = _anonymous_files(pids)
    if files + sum(map(resident_bytes, pids)) <= limit:  # an upper bound, much cheaper to read
        return False
    return files + sum(map(_proportional, pids)) > limit


def _anonymous_files(pids: list[int]) -> int:
    """Return the bytes of the open memory files of processes, each file once."""
    sizes: dict[int, int] = {}
    for pid in pids:
        for path, target in open_files(pid):
            if target.startswith("/memfd:"):
                with contextlib.suppress(OSError):  # closed since it was listed
                    status = Path(path).stat()
                    sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def _proportional(pid: int) -> int:
    """Return the resident bytes of a process, with shared pages divided among their users (PSS)."""
    try:
        match = _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_bytes())
    except OSError:  # another user's process, or it has ended
        match = None
    return int(match[1]) * 1024 if match else resident_bytes(pid)


class MemoryCgroup:
    """A cgroup with a memory limit for one program; it is removed with its processes at the end.

    Args:
        parent: cgroup whose ``cgroup.subtree_control`` has ``memory``.
        limit: bytes of all processes, their files in memory, and their unreclaimed file cache.

    Raises:
        OSError: the cgroup cannot be made.
    """

    def __init__(self, parent: Path, limit: int) -> None:
        self.path = parent / f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        self.path.mkdir()
        try:
            (self.path / "memory.max").write_text(str(limit), encoding="utf-8")
            (self.path / "memory.oom.group").write_text("1", encoding="utf-8")
            with contextlib.suppress(OSError):  # a kernel without swap accounting
                (self.path / "memory.swap.max").write_text("0", encoding="utf-8")
        except OSError:
            self._remove()
            raise

    def __enter__(self) -> MemoryCgroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(OSError):  # older than Linux 5.14; the program has ended by itself
            (self.path / "cgroup.kill").write_text("1", encoding="utf-8")
        self._remove()

    def add(self, pid: int) -> None:
        """Move a process into the cgroup; its later children are born there.

        Raises:
            OSError: it may not be moved.
        """
        (self.path / "cgroup.procs").write_text(str(pid), encoding="utf-8")

    def exceeded(self) -> bool:
        """Return whether the kernel ended processes at the limit."""
        try:
            lines = (self.path / "memory.events").read_text(encoding="utf-8").splitlines()
        except OSError:
            return False
        events = dict(line.split() for line in lines)
        return int(events.get("oom_kill", 0)) > 0

    def _remove(self) -> None:
        """Remove the cgroup; a process that is being killed keeps it for a moment."""
        deadline = time.monotonic() + _REMOVE_S
        while True:
            try:
                return self.path.rmdir()
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    return None
            time.sleep(0.01)


@contextlib.contextmanager
def open_memory_cgroup(limit: int) -> Iterator[MemoryCgroup | None]:
    """Make a cgroup with a memory limit in bytes; None where this process may not."""
    parent = memory_parent()
    with contextlib.ExitStack() as stack:
        cgroup = None
        if isinstance(parent, Path):
            with contextlib.suppress(OSError):
                cgroup = stack.enter_context(MemoryCgroup(parent, limit))
        yield cgroup


def cgroup_problem() -> str | None:
    """Return the reason why programs get no cgroup of their own, or None."""
    parent = memory_parent()
    if isinstance(parent, str):
        return parent
    try:
        with MemoryCgroup(parent, 2**30):
            return None
    except OSError as error:
        return f"{parent}: {error.strerror}"


@cache
def memory_parent() -> Path | str:
    """Return the cgroup in which this process may limit memory, or the reason why there is none; found once."""
    parent = find_memory_parent(
        Path("/proc/self/cgroup").read_text(encoding="utf-8"), Path("/proc/self/mounts").read_text(encoding="utf-8")
    )
    if isinstance(parent, Path):
        _remove_stale(parent)
    return parent


def find_memory_parent(membership: str, mounts: str, user: int | None = None) -> Path | str:
    """Find the nearest cgroup v2 around this process that has ``memory`` delegated to its user.

    A cgroup with processes cannot also distribute memory to children, except the root. So a user's process, for example
    in a session of systemd, gets a sibling: the nearest ancestor that its user owns. For the machine's root every
    ancestor is writable, but they are systemd's; only the own cgroup counts.

    Args:
        membership: contents of ``/proc/self/cgroup``.
        mounts: contents of ``/proc/self/mounts``.
        user: user id; None = this process's.

    Returns:
        The folder, or the reason why there is none.
    """
    roots = [fields[1] for line in mounts.splitlines() if (fields := line.split())[2] == "cgroup2"]
    names = [line.removeprefix("0::/") for line in membership.splitlines() if line.startswith("0::/")]
    if not roots or not names:
        return "cgroup v2 is not mounted"
    user = os.geteuid() if user is None else user
    root = Path(roots[0])
    own = root / names[0]
    for folder in [own, *(own.parents if user else ())]:
        if folder == root.parent:
            break
        if _delegates_memory(folder, user):
            return folder
    return f"{own}: no memory in cgroup.subtree_control, or not writable; delegate it (systemd: Delegate=memory)"


def _delegates_memory(folder: Path, user: int) -> bool:
    try:
        controllers = (folder / "cgroup.subtree_control").read_text(encoding="utf-8").split()
        owned = folder.stat().st_uid == user
    except OSError:
        return False
    return (
        "memory" in controllers and owned and os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)
    )


def _remove_stale(parent: Path) -> None:
    """Remove the cgroups of processes that were killed; one with processes in it stays."""
    for path in parent.glob(f"{_PREFIX}*-*"):
        creator = path.name.removeprefix(_PREFIX).partition("-")[0]
        if creator.isdigit() and not psutil.pid_exists(int(creator)):
            with contextlib.suppress(OSError):
                path.rmdir()
