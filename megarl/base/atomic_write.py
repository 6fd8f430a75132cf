"""Atomic writes of files and folders: readers see the old content or the new content, never a mixture."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from megarl.base.files import flush_path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>


@contextlib.contextmanager
def atomic_write(path: Path, *, flush: bool = False, temporary: Path | None = None) -> Iterator[Path]:
    """Yield a temporary file path in the same folder; rename it to ``path`` at the end of the block.

    If the block raises, the temporary file is removed and ``path`` keeps its content.

    Args:
        flush: write file and folder through to the disk (``fsync``).

    Raises:
        OSError: writing or renaming fails.
    """
    temporary = temporary or path.with_name(f".{path.name}.tmp-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        yield temporary
        if flush:
            flush_path(temporary)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if flush:
        flush_path(path.parent)


def atomic_write_text(path: Path, text: str, *, flush: bool = False) -> None:
    """Write a UTF-8 text file atomically.

    Raises:
        OSError: writing or renaming fails.
    """
    with atomic_write(path, flush=flush) as temporary:
        temporary.write_text(text, encoding="utf-8")


def replace_folder(finished: Path, path: Path) -> None:
    """Rename a finished folder to ``path``, and remove the folder or file that had this name.

    If kernel and file system can exchange two names (Linux), a folder of this name exists at every instant. Otherwise
    the old folder is renamed for an instant; :func:`restore_replaced_folder` repairs a kill at this instant.

    Args:
        finished: the folder, flushed, on the file system of ``path``.
        path: its final name; a folder, a file, or nothing exists there.

    Raises:
        OSError: renaming fails.
    """
    old: Path | None = None
    if not os.path.lexists(path):
        finished.rename(path)
    elif exchange_paths(finished, path):
        old = finished
    else:
        old = _replaced_name(path)
        _remove(old)
        path.rename(old)
        finished.rename(path)
    flush_path(path.parent)
    if old is not None:
        _remove(old)


def restore_replaced_folder(path: Path) -> bool:
    """Restore the old folder after a killed :func:`replace_folder`, or remove it if the new folder exists.

    Returns:
        Whether a folder was restored.

    Raises:
        OSError: renaming fails.
    """
    old = _replaced_name(path)
    if os.path.lexists(path) or not os.path.lexists(old):
        _remove(old)
        return False
    old.rename(path)
    flush_path(path.parent)
    return True


def _replaced_name(path: Path) -> Path:
    """Return the temporary name of the old folder on file systems that cannot exchange names."""
    return path.with_name(f".{path.name}.replaced")


def exchange_paths(first: Path, second: Path) -> bool:
    """Exchange two names atomically (``renameat2``); False if kernel, C library or file system cannot.

    Raises:
        OSError: the exchange is supported, and failed.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    arguments = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    if renameat2(*arguments) == 0:
        return True
    if ctypes.get_errno() in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), os.fspath(second))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
