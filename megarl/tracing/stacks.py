"""Watched processes: their tracing options, board and Python stacks, written inside and read from outside.

A watched process writes its stacks into an anonymous file on request, in one of two ways. A thread waits at a pipe and
writes the stacks of the other threads while it holds the GIL. If the GIL is never released, :data:`SIGNAL` makes
``faulthandler`` write them, in C and without the GIL. The signal is the last resort: it reads the frames of running
threads, and a thread that returns at the wrong moment crashes the process. A process that does not serve its stacks is
not signaled, which would kill it.

``py-spy dump`` gives the same stacks without preparation, but needs ptrace rights, which containers rarely grant.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from megarl.base.processes import child_pids, process_fields, read_kernel_file
from megarl.tracing.board import STACKS, Board, BoardContent, find_file, read_board
from megarl.tracing.profilers import ProfileOptions, RoleProfile
from megarl.tracing.tracer import TRACER

SIGNAL = signal.SIGUSR2
LONGEST_ANSWER_S = 2.0
"""Seconds for a process to write its stacks, for each of the two ways."""
_SETTLED_S = 0.05
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_STATES = {"R": "running", "S": "sleeping", "D": "in the kernel", "T": "stopped", "t": "traced", "Z": "dead"}
DEAD, STOPPED = "dead", "stopped"


@dataclass(frozen=True)
class TracingOptions:
    """Tracing options of a run; every process receives them at its start.

    Attributes:
        watched: show the current activity on a :class:`~megarl.tracing.board.Board`, and write stacks on request.
    """

    watched: bool = False
    timeline: bool = False
    profiles: dict[str, RoleProfile] = field(default_factory=dict)

    @property
    def active(self) -> bool:
        """Whether any option is on."""
        return self.watched or self.timeline or bool(self.profiles)

    def profile(self, role: str, rank: int) -> ProfileOptions | None:
        """Return the profiler options of a process; None = no profiler."""
        return self.profiles[role].of(rank) if role in self.profiles else None


def watch_process(options: TracingOptions) -> None:
    """Create the board of this process and serve its stacks, if the options say so (Linux)."""
    if options.watched and sys.platform.startswith("linux") and TRACER.board is None:
        TRACER.board = Board(TRACER.thread)
        serve_stacks()


def unwatch_process() -> None:
    """Stop recording and remove the board, in a process that outlives the run."""
    TRACER.recording = False
    TRACER.take()
    if TRACER.board is not None:
        TRACER.board.close()
        TRACER.board = None
    TRACER.stack.clear()


def serve_stacks() -> None:
    """Write the stacks of this process on request from now on; once per process, Linux only."""
    if find_file(os.getpid(), STACKS) is not None or not sys.platform.startswith("linux"):
        return
    receiver, sender = os.pipe()
    # The file's name has the descriptor of the pipe that a reader writes to, and the identifier of the main thread.
    handle = os.memfd_create(f"{STACKS}:{sender}:{threading.main_thread().ident}")
    # A reader truncates the file before its request, so writes must append.
    fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_APPEND)
    faulthandler.register(SIGNAL, file=handle, all_threads=True, chain=False)
    threading.Thread(target=_answer, args=(receiver, handle), name="stacks", daemon=True).start()


def _answer(receiver: int, handle: int) -> None:
    while os.read(receiver, 4096):
        os.write(handle, "\n".join(_stacks()).encode())


def _stacks() -> Iterator[str]:
    """Yield the lines that ``faulthandler`` would write, with thread names."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    writer = threading.get_ident()
    for ident, frame in sys._current_frames().items():
        if ident != writer:
            kind, name = ("Current thread" if ident == TRACER.thread else "Thread"), names.get(ident, "")
            yield f"{kind} 0x{ident:016x}{f' [{name}]' if name else ''} (most recent call first):"
            yield from _lines(frame)
            yield ""


def _lines(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        code = frame.f_code
        yield f'  File "{code.co_filename}", line {frame.f_lineno or 0} in {code.co_name}'
        frame = frame.f_back


@dataclass(frozen=True)
class Frame:
    """A frame of a Python stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        short = "/".join(self.file.split("/")[-3:])
        return f"{self.function} ({short}:{self.line})"


@dataclass(frozen=True)
class ProcessReport:
    """State of a process, as observed from outside.

    Attributes:
        state: ``running``, ``sleeping``, ``in the kernel``, ``stopped``, ``dead``.
        stacks: stacks of all its threads, as text; empty if it wrote none.
        frames: frames of its followed thread (:meth:`Tracer.follow_thread`), innermost first.
        taken_ns: time of the observation on the machine's monotonic clock.
    """

    pid: int
    state: str
    board: BoardContent | None = None
    stacks: str = ""
    frames: tuple[Frame, ...] = ()
    taken_ns: int = 0
    command: str = ""
    children: tuple[ProcessReport, ...] = ()


def take_reports(pids: Sequence[int], children_of: Sequence[int] | None = None) -> list[ProcessReport]:
    """Observe processes of this machine; all requests are sent before the first reply is awaited.

    Args:
        children_of: processes whose children are included; None = all.
    """
    files = {pid: file for pid in pids if (file := _request_stacks(pid)) is not None}
    stacks = _read_stacks(files)
    stacks |= _read_stacks({pid: file for pid, file in files.items() if not stacks[pid] and _send_signal(pid)})
    parents = pids if children_of is None else children_of
    return [_report(pid, stacks.get(pid, ""), pid in parents) for pid in pids]


def _request_stacks(pid: int) -> Path | None:
    """Request the stacks of a process; return the file for them, or None if the process cannot write."""
    file = find_file(pid, STACKS)
    if file is None or process_state(pid) in (DEAD, STOPPED):
        return None
    try:
        sender, _ = _served(file)
        os.truncate(file, 0)
        handle = os.open(file.with_name(sender), os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(handle, b"?")
        finally:
            os.close(handle)
    except OSError:
        return None
    return file


def _served(file: Path) -> tuple[str, int]:
    """Return the request pipe's descriptor and the main thread's identifier of a process that serves its stacks."""
    match = re.match(rf"/memfd:{STACKS}:(\d+):(\d+)", os.readlink(file))
    if match is None:
        raise OSError(f"{file} belongs to another version of megarl")
    return match[1], int(match[2])


def _main_thread(pid: int) -> int:
    file = find_file(pid, STACKS)
    with contextlib.suppress(OSError):
        return _served(file)[1] if file else 0
    return 0


def _read_stacks(files: Mapping[int, Path]) -> dict[int, str]:
    """Read the stacks of processes by process ID; empty for a process that did not write in time."""
    texts, waiting = dict.fromkeys(files, ""), dict(files)
    deadline = time.monotonic() + LONGEST_ANSWER_S
    while waiting:
        is_last = time.monotonic() >= deadline
        for pid, file in list(waiting.items()):
            if _is_complete(file, texts, pid):
                del waiting[pid]
        if is_last:
            break
        time.sleep(_SETTLED_S)
    return texts


def _send_signal(pid: int) -> bool:
    """Send :data:`SIGNAL` to a process whose threads cannot run, unless the signal would kill it."""
    if not _catches(pid):
        return False
    try:
        os.kill(pid, SIGNAL)
    except OSError:
        return False
    return True


def process_state(pid: int) -> str:
    """Return the state of a process, as the kernel reports it."""
    fields = process_fields(pid)
    return _STATES.get(fields[0], "sleeping") if fields else DEAD


def thread_frames(stacks: str, thread: int) -> tuple[Frame, ...]:
    """Parse the frames of a thread, innermost first; 0 = the current thread."""
    _, _, rest = stacks.partition(f"hread 0x{thread:016x} " if thread else "Current thread ")
    frames = []
    for line in rest.splitlines()[1:]:
        match = _FRAME.match(line)
        if match is None:
            break
        frames.append(Frame(match["file"], int(match["line"]), match["function"]))
    return tuple(frames)


def _report(pid: int, stacks: str, with_children: bool) -> ProcessReport:
    children = [
        ProcessReport(child, process_state(child), taken_ns=time.monotonic_ns(), command=_command(child))
        for child in (child_pids(pid) if with_children else ())
    ]
    board = read_board(pid)
    command = _command(pid) if board is None else ""
    frames = thread_frames(stacks, board.thread if board is not None else _main_thread(pid))
    return ProcessReport(pid, process_state(pid), board, stacks, frames, time.monotonic_ns(), command, tuple(children))


def _is_complete(file: Path, texts: dict[int, str], pid: int) -> bool:
    """Read the stacks of a process into ``texts``; return whether they are as before, or the process has ended."""
    before = texts[pid]
    try:
        texts[pid] = file.read_text(errors="replace", encoding="utf-8")
    except OSError:
        return True
    return texts[pid] == before != ""


def _catches(pid: int) -> bool:
    """Whether a process handles :data:`SIGNAL`."""
    status = read_kernel_file(f"/proc/{pid}/status")
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (SIGNAL - 1) & 1)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    except OSError:
        return ""
