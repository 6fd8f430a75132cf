"""Durable files: ``fsync``, and digests that detect changed or corrupt content."""

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
    """Compute size and digest of a file by reading all of it.

    Args:
        path: the file.
        flush: flush the file to the disk first.

    Raises:
        OSError: reading or flushing fails.
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
