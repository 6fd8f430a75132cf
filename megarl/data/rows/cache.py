"""Cache folder for artifacts of data files: memory-mappable rows, and lengths in tokens.

The name of an entry contains a digest of its inputs; the inputs of a file are path, size and modification time. An
entry is written under a temporary name and then renamed, so processes that write the same entry do not conflict.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from megarl.base.atomic_write import atomic_write
from megarl.base.errors import DataError

_VERSION = "1"
"""Format version of the entries; a new version invalidates all of them."""


class Cache:
    """A cache folder.

    Args:
        folder: None = ``megarl/data`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``.
    """

    def __init__(self, folder: str | None = None) -> None:
        root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        self.folder = Path(os.path.expandvars(folder) if folder else f"{root}/megarl/data").expanduser()

    def entry(self, name: str, content: str, suffix: str, write: Callable[[Path], None]) -> Path:
        """Return the file of an entry; write it first if it does not exist.

        Args:
            name: readable prefix of the file name; older entries with the same name are removed.
            content: fingerprint of the entry's inputs.

        Raises:
            DataError: the folder cannot be written.
        """
        path = self.folder / f"{name}-{digest(f'{_VERSION}|{content}')}{suffix}"
        if path.is_file():
            return path
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as temporary:
                write(temporary)
            for older in self.folder.glob(f"{name}-{'?' * 16}{suffix}"):
                if older != path:
                    older.unlink(missing_ok=True)
        except OSError as error:
            text = f"data.cache_dir: {self.folder} cannot be written ({error}); name a folder with enough free space"
            raise DataError(text, code="data.cache-unwritable") from error
        return path


def digest(text: str) -> str:
    """Digest of a text, 16 hexadecimal digits."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def file_identity(path: str) -> str:
    """Fingerprint a file's content: absolute path, size in bytes, modification time in ns."""
    status = Path(path).stat()
    return f"{os.path.abspath(path)}|{status.st_size}|{status.st_mtime_ns}"
