"""Puts a finished folder in its place, also where an older one has that name: a reader finds the old or the new."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from pathlib import Path

from megarl.files import flush_path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>


def put_in_place(finished: Path, place: Path) -> None:
    """Gives a folder its name, and removes what had that name before.

    Where kernel and file system can exchange two names (Linux), a folder of that name is there at every instant.
    Elsewhere the old one has another name for an instant; :func:`restore_replaced` undoes a kill in it.

    Args:
        finished: the folder, flushed, on the file system of ``place``.
        place: where it belongs; a folder, a file, or nothing is there.

    Raises:
        OSError: renaming failed.
    """
    old: Path | None = None
    if not os.path.lexists(place):
        os.rename(finished, place)
    elif exchange(finished, place):
        old = finished
    else:
        old = replaced_name(place)
        _remove(old)
        os.rename(place, old)
        os.rename(finished, place)
    flush_path(place.parent)
    if old is not None:
        _remove(old)


def restore_replaced(place: Path) -> bool:
    """Brings back what a killed :func:`put_in_place` had moved aside, or removes it where the new one is in place.

    Returns:
        Whether something was brought back.

    Raises:
        OSError: renaming failed.
    """
    aside = replaced_name(place)
    if os.path.lexists(place) or not os.path.lexists(aside):
        _remove(aside)
        return False
    os.rename(aside, place)
    flush_path(place.parent)
    return True


def replaced_name(place: Path) -> Path:
    """The name under which what is being replaced waits where names cannot be exchanged."""
    return place.with_name(f".{place.name}.replaced")


def exchange(first: Path, second: Path) -> bool:
    """Swaps two names at once where kernel, C library and file system can; False where one cannot.

    Raises:
        OSError: they can, and it failed.
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
