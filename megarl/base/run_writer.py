"""Writer of a run's files other than checkpoints: a full disk delays a write, and never ends the run.

A failed write is reported once, kept in memory and repeated with the next one, so the files are complete again as soon
as there is space. The memory is bounded; the largest waiting file is dropped first, and named.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from megarl.base.atomic_write import atomic_write
from megarl.base.formatting import count_noun

WAITING_BYTES = 64 << 20

logger = logging.getLogger(__name__)


class _Waiting:
    """Content of one file that waits to be written."""

    def __init__(self) -> None:
        self.whole: bytes | None = None  # replaces the file
        self.lines: list[bytes] = []  # is appended after it

    @property
    def size(self) -> int:
        return len(self.whole or b"") + sum(map(len, self.lines))


class RunWriter:
    """Writes files of a run; an ``OSError`` of any kind is reported, counted and retried, and never raised.

    Args:
        limit_bytes: largest content that waits in memory.

    Attributes:
        failures: failed writes, repetitions included.
        dropped: files with content that was dropped.
        refused_output: characters for standard output or error that a full disk refused.
    """

    def __init__(self, limit_bytes: int = WAITING_BYTES, report: Callable[[str], None] | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.failures = 0
        self.dropped = 0
        self.refused_output = 0
        self._report = report or logger.warning
        self._waiting: dict[Path, _Waiting] = {}
        self._is_failing = False
        self._lock = threading.RLock()  # the log of a report is a file of the run, too

    def append(self, path: Path, text: str | bytes) -> None:
        """Append to a file: all of the text, or for now nothing; creates file and folder."""
        with self._lock:
            self._waiting.setdefault(path, _Waiting()).lines.append(_encoded(text))
            messages = self._write_waiting()
        self._say(messages)

    def replace(self, path: Path, text: str | bytes) -> None:
        """Write a file atomically; earlier content that still waits for it is obsolete."""
        with self._lock:
            self._waiting.pop(path, None)
            self._waiting[path] = waiting = _Waiting()
            waiting.whole = _encoded(text)
            messages = self._write_waiting()
        self._say(messages)

    def is_waiting(self, path: Path) -> bool:
        """Return whether content of the file waits to be written."""
        return path in self._waiting

    def forget(self, path: Path) -> None:
        """Discard content that waits for a file."""
        with self._lock:
            self._waiting.pop(path, None)

    def retry(self) -> None:
        """Write everything that waits, if there is space."""
        with self._lock:
            messages = self._write_waiting()
        self._say(messages)

    def reset(self) -> None:
        """Begin to count anew, for a new run in this process."""
        self.failures = self.dropped = self.refused_output = 0

    def metrics(self) -> dict[str, float]:
        """Return ``run_files/{failed_writes,waiting,dropped}``; empty as long as no write failed."""
        if not self.failures:
            return {}
        counts = {"failed_writes": self.failures, "waiting": len(self._waiting), "dropped": self.dropped}
        return {f"run_files/{name}": float(count) for name, count in counts.items()}

    def close(self) -> None:
        """Write everything that waits; name the files that cannot be completed, and discard their content."""
        self.retry()
        with self._lock:
            lost = sorted(map(str, self._waiting))
            self._waiting.clear()
            self._is_failing = False
        if lost:
            self._report(f"{count_noun(len(lost), 'file')} of the run stay incomplete: {', '.join(lost)}")

    def _write_waiting(self) -> list[str]:
        """Write all files that can be written; returns messages, of which only changes make one."""
        error: tuple[Path, OSError] | None = None
        for path in list(self._waiting):
            try:
                _write(path, self._waiting[path])
                del self._waiting[path]
            except OSError as reason:
                self.failures += 1
                error = (path, reason)
        messages = []
        if error is not None and not self._is_failing:
            messages.append(
                f"{error[0]} cannot be written ({error[1].strerror or error[1]}); the run continues, and writes its "
                "files when it can. Checkpoints need space, too"
            )
        if error is None and self._is_failing:
            messages.append("the files of the run are written again; nothing waits")
        self._is_failing = error is not None
        return messages + self._limit()

    def _limit(self) -> list[str]:
        messages = []
        while sum(waiting.size for waiting in self._waiting.values()) > self.limit_bytes:
            path = max(self._waiting, key=lambda path: self._waiting[path].size)
            size = self._waiting.pop(path).size
            self.dropped += 1
            messages.append(f"{path}: {size:,} bytes that waited for space are dropped")
        return messages

    def _say(self, messages: list[str]) -> None:
        for message in messages:
            self._report(message)


RUN_WRITER = RunWriter()
"""The writer of this process."""


def _encoded(text: str | bytes) -> bytes:
    # "backslashreplace": broken output of a model may contain lone surrogates, which UTF-8 cannot encode
    return text if isinstance(text, bytes) else text.encode("utf-8", "backslashreplace")


def _write(path: Path, waiting: _Waiting) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if waiting.whole is not None:
        with atomic_write(path) as temporary:
            temporary.write_bytes(waiting.whole)
        waiting.whole = None
    if waiting.lines:
        _append(path, b"".join(waiting.lines))


def _append(path: Path, content: bytes) -> None:
    """Append all of the content, or restore the size of the file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        before, view = os.fstat(descriptor).st_size, memoryview(content)
        try:
            while view:
                view = view[os.write(descriptor, view) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)
