"""Log files of a run: ``<run folder>/logs/<role>-<rank>.log`` per process, and ``driver.log``.

Lines of Python's logging and of ``print`` start with time and level (``OUT`` and ``ERR`` for the standard streams).
Output of C and C++ code and of child processes goes through the same file descriptors, unchanged. A resumed run
appends.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from megarl.base.files import private_folder
from megarl.base.redaction import redact_text
from megarl.base.run_writer import RUN_WRITER

LOGS_FOLDER, DRIVER = "logs", "driver"
TAIL_LINES = 15
_SHOWN_KEY = "already_shown"
_C_LINE_BUFFERED = 1
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True)
class ProcessLogs:
    """Log folder and log level of a run's processes.

    Attributes:
        folder: absolute path; a node without this shared folder creates a local folder of the same name.
        level: name of the lowest logged level, as in :mod:`logging`.
        umask: of the processes, for all files that they write; None = as they start.
    """

    folder: Path
    level: str = "INFO"
    umask: int | None = None

    def file(self, role: str, rank: int) -> Path:
        """Log file of a process."""
        return self.folder / f"{role}-{rank}.log"


class LogFormatter(logging.Formatter):
    """Formats lines as ``2026-11-22 14:03:11.208 WARNING megarl.samples.replicas: text``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
        self.default_msec_format = "%s.%03d"

    def format(self, record: logging.LogRecord) -> str:
        """Format the line, without secrets."""
        return redact_text(super().format(record))


def _timestamped_line(label: str, text: str) -> str:
    """Format a line of other output like a log line."""
    now = time.time()
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    return f"{clock}.{int(now % 1 * 1000):03d} {label:<7} {text}"


class WrappedStream(io.TextIOBase):
    """Base class of a text stream that wraps another stream and intercepts writes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of the wrapped stream."""
        return self._stream.encoding

    @property
    def buffer(self) -> Any:
        """Binary buffer of the wrapped stream; bytes are not intercepted."""
        return self._stream.buffer

    def fileno(self) -> int:
        """Return the file descriptor of the wrapped stream."""
        return self._stream.fileno()

    def writable(self) -> bool:
        """Return whether the stream supports writing: always."""
        return True

    def flush(self) -> None:
        """Flush the wrapped stream."""
        self._stream.flush()


class SteadyStream(WrappedStream):
    """Never raises: text that a full disk refuses waits in the stream's buffer, and beyond it is lost and counted.

    The count is :attr:`megarl.base.run_writer.RunWriter.refused_output`.
    """

    def write(self, text: str) -> int:
        """Write as much as the disk takes."""
        try:
            self._stream.write(text)
        except OSError:
            RUN_WRITER.refused_output += len(text)
        return len(text)

    def flush(self) -> None:
        """Write the buffered text, as far as the disk takes it."""
        with contextlib.suppress(OSError):
            self._stream.flush()


@contextlib.contextmanager
def steady_output() -> Iterator[None]:
    """Ignore failed writes to standard output and error within the context, unless it is a terminal.

    At the end, text that the disk still refuses is discarded: the interpreter would fail on it at its exit.
    """
    before = sys.stdout, sys.stderr
    files = [stream for stream in before if not stream.isatty()]
    sys.stdout, sys.stderr = (SteadyStream(stream) if stream in files else stream for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in files:
            try:
                stream.flush()
            except OSError:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)


class TimestampedStream(SteadyStream):
    """Prefixes each line with time and label."""

    def __init__(self, stream: TextIO, label: str) -> None:
        super().__init__(stream)
        self._label = label
        self._at_start = True
        self._lost = 0

    def write(self, text: str) -> int:
        """Write text of complete or partial lines; a full disk loses text, and does not end the process."""
        for line in redact_text(text).splitlines(keepends=True):
            try:
                if self._lost:
                    note = f"{self._lost:,} characters of output are missing here: the disk was full\n"
                    self._stream.write(_timestamped_line(self._label, note))
                    self._lost = 0
                self._stream.write(_timestamped_line(self._label, line) if self._at_start else line)
            except OSError:
                self._lost += len(line)
            self._at_start = line.endswith("\n")
        return len(text)


def redirect_output(file: Path, level: str, facts: str = "") -> Path:
    """Redirect all output of this process to its log file, including C code and child processes.

    If the folder is not writable, a folder under the system's temporary folder is used.

    Returns:
        The log file in use.
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
        libc = ctypes.CDLL(None)  # otherwise output of printf is lost when the process aborts
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _C_LINE_BUFFERED, 0)
    raw = io.FileIO(2, "w", closefd=False)
    plain = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True, write_through=True)
    sys.stdout, sys.stderr = TimestampedStream(plain, "OUT"), TimestampedStream(plain, "ERR")
    faulthandler.enable(plain, all_threads=True)
    _configure_logging(level, [logging.StreamHandler(plain)])
    logging.getLogger(__name__).info("%s begins, pid %d%s%s", file.stem, os.getpid(), facts, note)
    return path


def _openable(path: Path) -> tuple[Path, str]:
    """Return the file, or a writable replacement and a note about it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        return path, ""
    except OSError as error:
        folder = Path(private_folder(), "logs", *path.parent.parts[-3:-1])
        folder.mkdir(parents=True, exist_ok=True)
        return folder / path.name, f"; the log is in this folder because {path} is not writable: {error}"


def _configure_logging(level: str, handlers: Iterable[logging.Handler]) -> None:
    """Make these the only log handlers; DEBUG lines of other packages are dropped.

    Args:
        handlers: handlers; the default formatter is that of log files.
    """
    root, number = logging.getLogger(), logging.getLevelNamesMapping()[level]
    for old in list(root.handlers):
        root.removeHandler(old)
    for handler in handlers:
        if handler.formatter is None:
            handler.setFormatter(LogFormatter())
        root.addHandler(handler)
    root.setLevel(max(number, logging.INFO))
    logging.getLogger("megarl").setLevel(number)
    logging.captureWarnings(True)


def output_log(descriptor: int) -> str:
    """Return the file that receives this process's standard output (1) or error (2) (Linux); empty if none."""
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
    return target if Path(target).is_file() else ""


def tail(path: Path | str, lines: int = TAIL_LINES) -> str:
    """Return the last lines of a log file; empty if the file is missing."""
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    # Lines that start with a colon are Ray's markers of the log's origin.
    return "\n".join(deque((line for line in text.splitlines() if line and not line.startswith(":")), lines))


ALREADY_SHOWN: Mapping[str, Any] = {_SHOWN_KEY: True}
"""``extra`` of a log line that the user has seen already; it goes to the log file only."""


class _TerminalHandler(logging.Handler):
    """Prints warnings and errors to the current standard error.

    Warnings of libraries (:mod:`warnings`) are in the log file only.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Print the line, unless the user has seen it already."""
        if not getattr(record, _SHOWN_KEY, False) and record.name != "py.warnings":
            # A console with a live view prints the line without logging it again.
            show = getattr(sys.stderr, "show_only", None)
            text = redact_text(self.format(record))
            with contextlib.suppress(OSError):  # a terminal redirected to a file on a full disk
                show(text) if show else print(text, file=sys.stderr, flush=True)


class _RunLogHandler(logging.Handler):
    """Appends lines to a log file; a full disk delays them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Append the line."""
        RUN_WRITER.append(self.path, self.format(record) + "\n")


@contextlib.contextmanager
def driver_log(folder: Path, level: str) -> Iterator[Path]:
    """Log to ``driver.log`` within the block, and print warnings and errors; yields the file.

    An exception that ends the block is logged with its traceback.
    """
    path = folder / f"{DRIVER}.log"
    root = logging.getLogger()
    before = list(root.handlers), root.level
    file = _RunLogHandler(path)
    _configure_logging(level, [file, _TerminalHandler()])
    logging.getLogger(__name__).info("%s begins, pid %d: %s", DRIVER, os.getpid(), " ".join(sys.argv))
    try:
        yield path
        logging.getLogger(__name__).info("%s ends", DRIVER)
    except BaseException as error:
        logging.getLogger(__name__).error(
            "%s ends by %s", DRIVER, type(error).__name__, exc_info=True, extra=ALREADY_SHOWN
        )
        raise
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
        logging.captureWarnings(False)
        file.close()
