"""Folder lock: one run at a time writes into a folder, also on network file systems.

The lock is a file that its holder has locked with ``flock``, with a record of the holder as JSON. The kernel releases
``flock`` with the process, so a killed run leaves no lock. Some network file systems have no ``flock``, or one that
each host sees alone. The holder therefore also renews the file's time stamp every few seconds. A record of another host
counts until the stamp has not changed for a minute.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from megarl.base.errors import ConfigError
from megarl.base.json_text import parse_json
from megarl.base.processes import boot_id, process_fields, process_namespace

HEARTBEAT_S = 5.0
SILENT_S = 60.0
"""A holder on another host is dead if it has not renewed its time stamp for so long."""
_SETTLE_S = 1.0  # without flock, the last of two writers of a record holds the lock
_RECORD_BYTES = 1 << 16
_NO_FLOCK = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LockHolder:
    """Process that holds a folder lock, as in the lock file."""

    run: str
    """Name of the run."""
    folder: str
    """Folder of the run's files."""
    host: str = field(default_factory=platform.node)
    pid: int = field(default_factory=os.getpid)
    since: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    kernel: str = field(default_factory=boot_id)
    """Boot ID: processes of one kernel see each other's ``flock``."""
    process_ids: str = field(default_factory=process_namespace)
    """Namespace of process IDs: different in two containers of one host."""
    started: str = field(default_factory=lambda: _start_time(os.getpid()))
    """Start of the process in kernel ticks: distinguishes it from a later process with its ID."""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def describe(self) -> str:
        """Describe the holder in one line."""
        return f"{self.run} in {self.folder}, process {self.pid} on {self.host}, since {self.since}"

    def shares_kernel(self) -> bool:
        """Return whether the holder runs, or ran, on this machine since its last boot."""
        return bool(self.kernel) and self.kernel == boot_id()

    def shares_process_ids(self) -> bool:
        """Return whether :meth:`is_dead` can tell."""
        return self.shares_kernel() and self.process_ids == process_namespace()

    def is_dead(self) -> bool:
        """Return whether the process of a holder on this machine has ended."""
        return _start_time(self.pid) != self.started


@contextlib.contextmanager
def folder_lock(
    file: Path, own: LockHolder, remedy: str, describe: Callable[[LockHolder], str] = LockHolder.describe
) -> Iterator[None]:
    """Hold the lock of a folder within the block, and remove its file at the end.

    Raises:
        ConfigError: another process holds the lock, or the file cannot be written; names folder and holder.
    """
    try:
        descriptor = _acquire(file, own, lambda holder: _held(file, holder, describe, remedy))
    except OSError as error:
        text = f"{file}, the lock of the folder, cannot be written: {error}"
        raise ConfigError(text, code="disk.lock-not-writable") from error
    stop = threading.Event()
    heart = threading.Thread(target=_renew, args=(descriptor, stop), name="folder lock", daemon=True)
    heart.start()
    try:
        yield
    finally:
        stop.set()
        heart.join()
        _DESCRIPTORS.discard(descriptor)
        if (holder := read_holder(file)) is not None and holder.token == own.token:
            with contextlib.suppress(OSError):
                file.unlink()
        os.close(descriptor)


def read_holder(file: Path) -> LockHolder | None:
    """Read the holder of a lock file; None without one, or if the record is damaged."""
    try:
        with file.open("rb") as stream:
            return LockHolder(**parse_json(stream.read(_RECORD_BYTES)))
    except (OSError, ValueError, TypeError):
        return None


def _acquire(file: Path, own: LockHolder, rejection: Callable[[LockHolder | None], str]) -> int:
    """Lock a file and write the record; returns its descriptor."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            locked = _flock(descriptor)
            holder = read_holder(file)
            if locked is False or (holder is not None and _lives(file, holder, flock=bool(locked))):
                raise ConfigError(rejection(holder), code="disk.folder-in-use")
            if not _is_same(descriptor, file):
                os.close(descriptor)  # the holder has just removed the file
                continue
            _write_record(file, descriptor, own)
            if locked is None:
                time.sleep(_SETTLE_S)
                if (latest := read_holder(file)) is not None and latest.token != own.token:
                    raise ConfigError(rejection(latest), code="disk.folder-in-use")
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            raise
        _DESCRIPTORS.add(descriptor)
        return descriptor


def _flock(descriptor: int) -> bool | None:
    """Lock a file: True; False if another process has locked it; None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        return None
    return True


def _lives(file: Path, holder: LockHolder, *, flock: bool) -> bool:
    """Whether the holder in a record is alive, although its file is not locked as seen from here."""
    if flock and holder.shares_kernel():
        return False
    if holder.shares_process_ids():
        return not holder.is_dead()
    return _beats(file, holder)


def _beats(file: Path, holder: LockHolder) -> bool:
    """Whether the time stamp of a lock file changes within ``SILENT_S``; clocks of two hosts are not compared."""
    first = file.stat().st_mtime_ns
    logger.warning("waiting up to %.0f s for a sign of life of the holder of %s: %s", SILENT_S, file, holder.describe())
    deadline = time.monotonic() + SILENT_S
    while time.monotonic() < deadline:
        time.sleep(min(0.5, SILENT_S / 10))
        try:
            # Opening the file makes NFS read its attributes again.
            with file.open("rb") as stream:
                if os.fstat(stream.fileno()).st_mtime_ns != first:
                    return True
        except FileNotFoundError:
            return False
    return False


def _held(file: Path, holder: LockHolder | None, describe: Callable[[LockHolder], str], remedy: str) -> str:
    if holder is None:
        return f"{file.parent} is in use by another process, which has locked {file}. {remedy}"
    text = f"{file.parent} is in use by another run: {describe(holder)} ({file}). "
    if holder.shares_process_ids() and holder.is_dead():
        return f"{text}That process has ended, but one that it started still holds the lock: end it. {remedy}"
    return f"{text}{remedy}"


def _is_same(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _write_record(file: Path, descriptor: int, own: LockHolder) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(own), indent=1).encode(), 0)
    except OSError as error:  # a full disk: flock holds without a record
        logger.warning("%s could not be written, so others cannot read who holds the lock: %s", file, error)


def _renew(descriptor: int, stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT_S):
        with contextlib.suppress(OSError):
            os.utime(descriptor)


_DESCRIPTORS: set[int] = set()


def _close_in_child() -> None:
    """Close the locks of the parent in a forked process, which would keep them after the parent's death."""
    while _DESCRIPTORS:
        with contextlib.suppress(OSError):
            os.close(_DESCRIPTORS.pop())


os.register_at_fork(after_in_child=_close_in_child)


def _start_time(pid: int) -> str:
    """Start of a process, in kernel ticks since boot; empty if it does not run."""
    fields = process_fields(pid)
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""
