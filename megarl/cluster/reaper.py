"""The token of a local Ray, and the reaper: a process that ends the Ray of a killed driver.

Ray's agents poll for their raylet and live for up to a minute after it. The reaper waits for the end of a pipe that the
driver holds, so it notices any death of the driver at once. It recognizes the processes of its Ray by its own process
group, which they join when they start, and by a mark in their environment. Ray's agents overwrite their environment;
workers leave the group. A cluster that the driver joined has none of them: there the reaper only reports.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from megarl.base.files import private_folder
from megarl.base.processes import READ_ERRORS, all_processes, command_line

MARK = "MEGARL_LOCAL_RAY"
"""Environment variable of all processes of a local Ray: its token file. Other clients of this Ray do not have it."""
_LAST_WORDS = "last_words"
_GRACE_S = 3.0
_LIMIT_S = 60.0
_PREFIX = "ray-token-"


class Reaper:
    """Child process that acts when this process has died."""

    def __init__(self, token_file: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(token_file)],
            stdin=subprocess.PIPE,  # its end tells the reaper that this process is gone
            stdout=subprocess.DEVNULL,  # the last words of the driver go to its standard error
            process_group=0,  # Ctrl-C in a terminal is for the driver
        )

    @property
    def pid(self) -> int:
        """Process ID, and ID of the process group that Ray's processes join."""
        return self._process.pid

    def close(self) -> None:
        """End the reaper; Ray's processes have ended."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def end_ray(token_file: Path, group: int | None) -> None:
    """End all processes of a local Ray and their descendants: SIGTERM first, SIGKILL after a few seconds."""
    deadline = time.monotonic() + _LIMIT_S
    kill_at = time.monotonic() + _GRACE_S
    requested: set[psutil.Process] = set()
    while (alive := processes_of(token_file, group)) and time.monotonic() < deadline:
        for process in alive:
            with contextlib.suppress(*READ_ERRORS):
                if time.monotonic() > kill_at:
                    process.kill()
                elif process not in requested:
                    process.terminate()
        requested.update(alive)
        time.sleep(0.2)


def processes_of(token_file: Path, group: int | None) -> list[psutil.Process]:
    """Find the live processes of a local Ray, and their descendants.

    Args:
        group: process group of its reaper, which is not in the result; None: unknown.
    """
    children: dict[int, list[psutil.Process]] = {}
    waiting: list[psutil.Process] = []
    for process in all_processes():
        with contextlib.suppress(*READ_ERRORS, OSError):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            children.setdefault(process.ppid(), []).append(process)
            if os.getpgid(process.pid) == group or process.environ().get(MARK) == str(token_file):
                waiting.append(process)
    result: set[psutil.Process] = set()
    while waiting:
        process = waiting.pop()
        if process not in result and process.pid not in (os.getpid(), group):
            result.add(process)
            waiting += children.get(process.pid, [])
    return list(result)


def owner_file(token_file: Path) -> Path:
    """Return the file with Ray's session folder and the driver's process ID, which the driver locks."""
    return token_file.with_name("owner")


def session_folders(token_file: Path) -> list[Path]:
    """List the session folders of the local Ray with a token; those older than the token are of another process."""
    try:
        sessions, driver = json.loads(owner_file(token_file).read_text(encoding="utf-8"))
        since = token_file.stat().st_mtime
        found = sorted(Path(sessions).glob(f"session_*_{int(driver)}"))
        return [path for path in found if _modified(path) >= since and path.lstat().st_uid == os.geteuid()]
    except (OSError, ValueError, TypeError):
        return []


def delete_files(token_file: Path) -> None:
    """Delete a token's folder, and its Ray's session folders that no process names in its command line."""
    folders = session_folders(token_file)
    commands = "\n".join(map(command_line, all_processes())) if folders else ""
    for folder in folders:
        if folder.name not in commands:
            shutil.rmtree(folder, ignore_errors=True)
        latest = folder.parent / "session_latest"
        with contextlib.suppress(OSError):
            if latest.is_symlink() and not latest.exists():
                latest.unlink()
    shutil.rmtree(token_file.parent, ignore_errors=True)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def write_last_words(token_file: Path, sentence: str | None, files: Mapping[str, str]) -> None:
    """Write what the reaper does for a driver that dies without a word.

    Ray ends a driver within its own calls when the raylet has died, and the kernel ends one for lack of memory.

    Args:
        sentence: for the console; None: the work is complete, and nothing is said.
    """
    words = token_file.with_name(_LAST_WORDS)
    if sentence is None:
        words.unlink(missing_ok=True)
        return
    draft = words.with_suffix(".draft")
    draft.write_text(json.dumps([sentence, dict(files)]), encoding="utf-8")
    draft.replace(words)


def _speak_last_words(token_file: Path) -> None:
    with contextlib.suppress(OSError):  # it died before its first step; a full disk, a closed terminal
        sentence, files = json.loads(token_file.with_name(_LAST_WORDS).read_text(encoding="utf-8"))
        print(sentence, file=sys.stderr, flush=True)
        for path, text in files.items():
            draft = Path(f"{path}.draft")
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)


def main(token_file: Path) -> None:
    """Wait for the death of the driver, speak its last words, then end its Ray and delete its files."""
    sys.stdin.buffer.read()
    _speak_last_words(token_file)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # who reads the driver's output sees its end
    end_ray(token_file, os.getpgrp())
    delete_files(token_file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))


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
