"""Folder of this user for sockets, tokens and Ray's files, which other users of the machine cannot enter."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from megarl.base.errors import ResourceError

_LONGEST_ROOT = 32
"""Bytes of the path above the folder: the address of a socket has at most 107, and Ray's need 70 below the folder."""


def private_folder(root: str | None = None) -> Path:
    """Create the folder of this user, with mode 0700, if it does not exist.

    Its name is known to all users, so one that exists counts only as a real folder of this user, closed to others.

    Args:
        root: folder to contain it; None: the folder for temporary files, or ``/tmp`` if its path is too long.

    Raises:
        ResourceError: another user has made it, it is open to others or no folder, or ``root`` is too long.
    """
    above = root or tempfile.gettempdir()
    if len(os.fsencode(above)) > _LONGEST_ROOT:
        if root is not None:
            text = f"{root} is too long for the addresses of sockets: give at most {_LONGEST_ROOT} bytes"
            raise ResourceError(text, code="disk.socket-path-length")
        above = "/tmp"
    folder, user = Path(above, f"megarl-{os.geteuid()}"), os.geteuid()
    remedy = "remove it, or set TMPDIR to a folder of your own"
    try:
        with contextlib.suppress(FileExistsError):
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
