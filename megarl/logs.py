"""Log files of a run: ``<run folder>/logs/<role>-<rank>.log`` of each process, and ``driver.log``.

A line of Python's logging, and each that Python code prints, has time and level (``OUT`` and ``ERR`` for the standard
streams). What C and C++ code and child processes write comes through the same file descriptors, as it is. A process
that continues a run appends.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import logging
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

LOGS_FOLDER, DRIVER = "logs", "driver"
TAIL_LINES = 15
_TOLD = "told"
_C_LINE_BUFFERED = 1
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True)
class ProcessLogs:
    """Where the processes of a run write their logs.

    Attributes:
        folder: the folder, by an absolute path; on a node that does not share it, one of the same name is made there.
        level: of what is logged, as :mod:`logging` calls it.
    """

    folder: Path
    level: str = "INFO"

    def file(self, role: str, rank: int) -> Path:
        """Of one process."""
        return self.folder / f"{role}-{rank}.log"


class Stamp(logging.Formatter):
    """Lines as ``2026-11-22 14:03:11.208 WARNING megarl.trainer.roles: text``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
        self.default_msec_format = "%s.%03d"


def stamped(label: str, text: str) -> str:
    """A line that was not logged, in the same form."""
    now = time.time()
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    return f"{clock}.{int(now % 1 * 1000):03d} {label:<7} {text}"


class StreamOver(io.TextIOBase):
    """A text stream over another, which is asked for all but what is written.

    Args:
        stream: the one beneath.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the stream beneath."""
        return self._stream.encoding

    @property
    def buffer(self) -> Any:
        """Of the stream beneath: bytes go there as they are."""
        return self._stream.buffer

    def fileno(self) -> int:
        """Of the stream beneath."""
        return self._stream.fileno()

    def writable(self) -> bool:
        """Always."""
        return True

    def flush(self) -> None:
        """Flush the stream beneath."""
        self._stream.flush()


class StampedStream(StreamOver):
    """Puts time and label before each line.

    Args:
        stream: where to write, line-buffered.
        label: what stands in a level's place.
    """

    def __init__(self, stream: TextIO, label: str) -> None:
        super().__init__(stream)
        self._label = label
        self._at_start = True

    def write(self, text: str) -> int:
        """Write a piece of text, of one or several lines or a part of one."""
        for line in text.splitlines(keepends=True):
            self._stream.write(stamped(self._label, line) if self._at_start else line)
            self._at_start = line.endswith("\n")
        return len(text)


def take_output(file: Path, level: str, facts: str = "") -> Path:
    """Send all that this process writes from now on, C code and child processes included, to its log file.

    Where the folder cannot be written to, one below the system's folder for temporary files takes its place.

    Args:
        file: the log file; its folder is made.
        level: of what is logged.
        facts: to stand in the file's first line.

    Returns:
        The file.
    """
    path, note = _openable(file)
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        libc = ctypes.CDLL(None)  # else what printf wrote is lost when the process aborts
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _C_LINE_BUFFERED, 0)
    raw = io.FileIO(2, "w", closefd=False)
    plain = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True, write_through=True)
    sys.stdout, sys.stderr = StampedStream(plain, "OUT"), StampedStream(plain, "ERR")
    faulthandler.enable(plain, all_threads=True)
    configure_logging(level, [logging.StreamHandler(plain)])
    logging.getLogger(__name__).info("%s begins, pid %d%s%s", file.stem, os.getpid(), facts, note)
    return path


def _openable(path: Path) -> tuple[Path, str]:
    """The file or the one in its place, and a note on that."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        return path, ""
    except OSError as error:
        folder = Path(tempfile.gettempdir(), "megarl-logs", *path.parent.parts[-3:-1])
        folder.mkdir(parents=True, exist_ok=True)
        return folder / path.name, f"; its log is here since {path} cannot be written to: {error}"


def configure_logging(level: str, handlers: Iterable[logging.Handler]) -> None:
    """Log to these handlers alone, with time and level; other packages' DEBUG lines are left out.

    Args:
        level: of megarl's own lines.
        handlers: those without a formatter get that of log files.
    """
    root, number = logging.getLogger(), logging.getLevelNamesMapping()[level]
    for old in list(root.handlers):
        root.removeHandler(old)
    for handler in handlers:
        if handler.formatter is None:
            handler.setFormatter(Stamp())
        root.addHandler(handler)
    root.setLevel(max(number, logging.INFO))
    logging.getLogger("megarl").setLevel(number)
    logging.captureWarnings(True)


def log_of(descriptor: int) -> str:
    """File that this process's standard output (1) or error (2) goes to (Linux), or empty."""
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
    return target if os.path.isfile(target) else ""


def tail(path: Path | str, lines: int = TAIL_LINES) -> str:
    """The last lines of a log file; empty where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    # Ray marks whose log it is by lines that begin with a colon.
    return "\n".join(deque((line for line in text.splitlines() if line and not line.startswith(":")), lines))


TOLD: Mapping[str, Any] = {_TOLD: True}
"""``extra`` of a log line that the user is told otherwise, so that it goes to the file only."""


class TerminalHandler(logging.Handler):
    """Warnings and errors, for the user to see: on the standard error as it is at the time.

    What libraries warn their callers of (:mod:`warnings`) is in the log file only.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Print the line, unless the user has been told already."""
        if not getattr(record, _TOLD, False) and record.name != "py.warnings":
            # A console with a live view shows the line itself, and does not log it again.
            show = getattr(sys.stderr, "show_only", None)
            text = self.format(record)
            show(text) if show else print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def driver_log(folder: Path, level: str) -> Iterator[Path]:
    """``driver.log``, with what this process logs within the block; warnings and errors are printed as well.

    What ends the block goes into the log, with its traceback.

    Args:
        folder: of the run's logs; it is made.
        level: of what is logged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{DRIVER}.log"
    root = logging.getLogger()
    before = list(root.handlers), root.level
    file = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    configure_logging(level, [file, TerminalHandler()])
    logging.getLogger(__name__).info("%s begins, pid %d: %s", DRIVER, os.getpid(), " ".join(sys.argv))
    try:
        yield path
        logging.getLogger(__name__).info("%s ends", DRIVER)
    except BaseException as error:
        logging.getLogger(__name__).error("%s ends by %s", DRIVER, type(error).__name__, exc_info=True, extra=TOLD)
        raise
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
        logging.captureWarnings(False)
        file.close()
