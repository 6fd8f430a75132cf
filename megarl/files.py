"""Files that have to outlive a power cut, and digests that tell whether one is still what was written."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import NamedTuple

DIGEST_BYTES = 32
BLOCK_BYTES = 1 << 22


class FileEntry(NamedTuple):
    """Size in bytes and hexadecimal BLAKE2b-256 digest of one file."""

    size: int
    digest: str


def read_entry(path: Path, flush: bool = False) -> FileEntry:
    """Size and digest of a file, by reading all of it.

    Args:
        path: the file.
        flush: first make sure that it is on the disk.

    Raises:
        OSError: it cannot be read or flushed.
    """
    digest, size = hashlib.blake2b(digest_size=DIGEST_BYTES), 0
    with open(path, "rb") as file:
        if flush:
            flush_file(file.fileno())
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return FileEntry(size, digest.hexdigest())


def flush_path(path: Path) -> None:
    """Makes a file's content, or creations and renames in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flush_file(descriptor)
    finally:
        os.close(descriptor)


def flush_file(descriptor: int) -> None:
    """``fsync``, which object stores mounted as folders do not have: there it is skipped."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
