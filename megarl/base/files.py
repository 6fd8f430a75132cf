"""Files and folders on disk: ``fsync``, digests that detect corrupt content, writable and private folders."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from megarl.base.errors import ResourceError

DIGEST_BYTES = 32
BLOCK_BYTES = 1 << 22
PRIVATE_UMASK = 0o077
"""Umask under which only the user can read new files and folders."""
LONGEST_ROOT = 32
"""Bytes of the path above :func:`private_folder`: a socket's address has at most 107, and Ray's need 70 below it."""
WRITABLE = "name a folder that this user may write to"
"""Remedy for a folder with a :func:`write_error`."""


class FileEntry(NamedTuple):
    """Size in bytes and hexadecimal BLAKE2b-256 digest of one file."""

    size: int
    digest: str


@contextmanager
def private_files(enable: bool = True) -> Iterator[None]:
    """Create files and folders readable by this user only, within the block, also in processes started in it."""
    before = os.umask(PRIVATE_UMASK) if enable else None
    try:
        yield
    finally:
        if before is not None:
            os.umask(before)


def read_entry(path: Path, flush: bool = False) -> FileEntry:
    """Compute size and digest of a file by reading all of it.

    Raises:
        OSError: reading or flushing fails.
    """
    digest, size = hashlib.blake2b(digest_size=DIGEST_BYTES), 0
    with path.open("rb") as file:
        if flush:
            flush_file(file.fileno())
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return FileEntry(size, digest.hexdigest())


def flush_path(path: Path) -> None:
    """Flush a file's content, or the entries of a folder, to the disk (``fsync``)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flush_file(descriptor)
    finally:
        os.close(descriptor)


def flush_file(descriptor: int) -> None:
    """Flush a file descriptor to the disk; skipped on file systems without ``fsync``, such as mounted object stores."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def nearest_folder(path: Path) -> Path:
    """Return the folder, or its nearest parent that exists.

    Raises:
        NotADirectoryError: a parent is a file.
        FileNotFoundError: no parent exists.
    """
    for candidate in (path.absolute(), *path.absolute().parents):
        if candidate.is_dir():
            return candidate
        if candidate.exists():
            raise NotADirectoryError(errno.ENOTDIR, f"{candidate} is a file", str(path))
    raise FileNotFoundError(errno.ENOENT, "no parent folder exists", str(path))


def write_error(folder: Path) -> str:
    """Describe why a folder cannot be written or created; empty if it can."""
    try:
        with tempfile.TemporaryFile(dir=nearest_folder(folder)) as file:
            file.write(b"\0")
    except OSError as error:
        return error.strerror or str(error)
    return ""


def private_folder(root: str | None = None) -> Path:
    """Create the folder of this user, with mode 0700, if it does not exist.

    Its name is known to all users, so one that exists counts only as a real folder of this user, closed to others.

    Args:
        root: folder to contain it; None: the folder for temporary files, or ``/tmp`` if its path is too long.

    Raises:
        ResourceError: another user has made it, it is open to others or no folder, or ``root`` is too long.
    """
    above = root or tempfile.gettempdir()
    if len(os.fsencode(above)) > LONGEST_ROOT:
        if root is not None:
            text = f"{root} is too long for the addresses of sockets: give at most {LONGEST_ROOT} bytes"
            raise ResourceError(text, code="disk.socket-path-length")
        above = "/tmp"
    folder, user = Path(above, f"megarl-{os.geteuid()}"), os.geteuid()
    remedy = "remove it, or set TMPDIR to a folder of your own"
    try:
        with suppress(FileExistsError):
            folder.mkdir(0o700)
        state = folder.lstat()
    except OSError as error:
        text = f"{folder}, for private files, cannot be created: {error}; {remedy}"
        raise ResourceError(text, code="disk.private-folder-create") from error
    if not stat.S_ISDIR(state.st_mode):
        raise ResourceError(f"{folder}, for private files, is no folder; {remedy}", code="disk.private-folder-type")
    if state.st_uid != user:
        text = f"{folder}, for private files, belongs to user {state.st_uid}, not {user}; {remedy}"
        raise ResourceError(text, code="disk.private-folder-owner")
    if stat.S_IMODE(state.st_mode) & 0o077:
        mode = f"{stat.S_IMODE(state.st_mode):o}"
        text = f"{folder}, for private files, is open to other users (mode {mode}); {remedy}"
        raise ResourceError(text, code="disk.private-folder-mode")
    return folder
