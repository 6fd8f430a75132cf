"""Durable files: ``fsync``, digests that detect changed or corrupt content, and writable folders."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

DIGEST_BYTES = 32
BLOCK_BYTES = 1 << 22
PRIVATE_UMASK = 0o077
"""Umask under which only the user can read new files and folders."""
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
