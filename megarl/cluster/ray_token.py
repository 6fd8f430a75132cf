"""Token authentication of a Ray that a run starts: a random token in a private file."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
import tempfile
from pathlib import Path

from megarl.base.files import private_folder
from megarl.cluster.reaper import MARK, delete_files, owner_file, processes_of, session_folders

_PREFIX = "ray-token-"


class ClusterToken:
    """Token of one local Ray: processes without it can neither join the cluster nor query it.

    Ray by itself depends on the user's shell (``RAY_AUTH_MODE=disabled``), and shares one token between all clusters
    of a user, in ``~/.ray/auth_token``, which other users can read.

    Args:
        sessions: Ray's folder of sessions; :meth:`close` deletes the session folders of this Ray there.
    """

    def __init__(self, sessions: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=private_folder()))
        self.file = self._folder / "token"
        self.file.touch(0o600)
        self.file.write_text(secrets.token_hex(32), encoding="utf-8")
        draft = self._folder / "draft"
        draft.write_text(json.dumps([sessions, os.getpid()]), encoding="utf-8")
        self._lock = _lock(draft)  # until this process ends, see delete_stale_tokens
        draft.rename(owner_file(self.file))

    def environment(self, protects: bool = True) -> dict[str, str | None]:
        """Return the environment variables of Ray's processes; None = unset.

        Args:
            protects: whether Ray demands the token; otherwise it only marks Ray's processes.
        """
        marked: dict[str, str | None] = {MARK: str(self.file)}
        protected = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": None, "RAY_AUTH_TOKEN_PATH": str(self.file)}
        return marked | protected if protects else marked

    def session_folders(self) -> list[Path]:
        """List the session folders of this Ray, with its logs."""
        return session_folders(self.file)

    def close(self) -> None:
        """Delete the token and Ray's session folders, once Ray has ended."""
        delete_files(self.file)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def delete_stale_tokens() -> None:
    """Delete tokens and session folders of drivers on this machine that were killed together with their reaper.

    A token counts as stale if its driver no longer locks it and no process of its Ray lives.
    """
    for folder in private_folder().glob(f"{_PREFIX}*"):
        token_file = folder / "token"
        lock = _lock(owner_file(token_file))
        if lock is None:
            continue  # in use, or of another user
        try:
            if not processes_of(token_file, None):
                delete_files(token_file)
        finally:
            os.close(lock)


def _lock(file: Path) -> int | None:
    """Lock a file; returns its descriptor, or None without a regular file or if another process has locked it."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{file} is no file")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
