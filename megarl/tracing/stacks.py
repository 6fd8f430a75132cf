"""Python stacks and states of processes on this machine, whatever they hang in.

A watched process lets ``faulthandler`` write the stacks of all its threads into an anonymous file when it gets
:data:`SIGNAL`: that is done in C, without Python's lock, and interrupts nothing. A process that never asked for it
is not sent the signal, which would end it.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.tracing.board import STACKS, BoardContent, find_file, read_board

SIGNAL = signal.SIGUSR2
LONGEST_DUMP_S = 2.0
_SETTLED_S = 0.05
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_STATES = {"R": "running", "S": "sleeping", "D": "in the kernel", "T": "stopped", "t": "traced", "Z": "dead"}
DEAD, STOPPED = "dead", "stopped"


@dataclass(frozen=True)
class Frame:
    """A line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        short = "/".join(self.file.split("/")[-3:])
        return f"{self.function} ({short}:{self.line})"


@dataclass(frozen=True)
class ProcessReport:
    """What a process does, as seen from outside.

    Attributes:
        pid: its number.
        state: ``running``, ``sleeping``, ``in the kernel``, ``stopped``, ``dead``.
        board: what it shows; None where it shows nothing.
        stacks: of all its threads, as text; empty where it told none.
        frames: of its main thread, the innermost first.
        taken_ns: when, on its machine's monotonic clock.
        command: of a process without a role, its command line.
        children: processes that it has started, and that have no role.
    """

    pid: int
    state: str
    board: BoardContent | None = None
    stacks: str = ""
    frames: tuple[Frame, ...] = ()
    taken_ns: int = 0
    command: str = ""
    children: tuple[ProcessReport, ...] = ()


def tell_stacks() -> None:
    """From here on this process writes its stacks when it gets :data:`SIGNAL`; once, and on Linux only."""
    if find_file(os.getpid(), STACKS) is not None or not sys.platform.startswith("linux"):
        return
    handle = os.memfd_create(STACKS)
    # A reader empties it before it asks; what is written next goes to its end.
    fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_APPEND)
    faulthandler.register(SIGNAL, file=handle, all_threads=True, chain=False)


def take_reports(pids: Sequence[int], children_of: Sequence[int] | None = None) -> list[ProcessReport]:
    """What processes of this machine do; all are asked at once.

    Args:
        pids: of the processes.
        children_of: those whose children are told of; None = all.
    """
    files = {pid: ask_for_stacks(pid) for pid in pids}
    deadline = time.monotonic() + LONGEST_DUMP_S
    parents = pids if children_of is None else children_of
    return [_report(pid, files[pid], deadline, pid in parents) for pid in pids]


def ask_for_stacks(pid: int) -> Path | None:
    """Has a process write its stacks; returns the file, None where it would not."""
    file = find_file(pid, STACKS)
    if file is None or not _catches(pid):
        return None
    try:
        os.truncate(file, 0)
        os.kill(pid, SIGNAL)
    except OSError:
        return None
    return file


def process_state(pid: int) -> str:
    """What the system says of a process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return DEAD
    return _STATES.get(text.rpartition(")")[2].split()[0], "sleeping")


def main_frames(stacks: str) -> tuple[Frame, ...]:
    """The frames of the thread that took the signal, which is the main one; innermost first."""
    _, _, rest = stacks.partition("Current thread ")
    found = []
    for line in rest.splitlines()[1:]:
        match = _FRAME.match(line)
        if match is None:
            break
        found.append(Frame(match["file"], int(match["line"]), match["function"]))
    return tuple(found)


def _report(pid: int, file: Path | None, deadline: float, with_children: bool) -> ProcessReport:
    state = process_state(pid)
    stacks = "" if file is None or state in (DEAD, STOPPED) else _settled_text(file, deadline)
    children = [_child(child) for child in child_pids(pid)] if with_children else []
    board = read_board(pid)
    command = _command(pid) if board is None else ""
    frames = main_frames(stacks)
    return ProcessReport(pid, state, board, stacks, frames, time.monotonic_ns(), command, tuple(children))


def _child(pid: int) -> ProcessReport:
    return ProcessReport(pid, process_state(pid), taken_ns=time.monotonic_ns(), command=_command(pid))


def _settled_text(file: Path, deadline: float) -> str:
    """What a file holds once nothing is added any more."""
    text = ""
    while time.monotonic() < deadline:
        try:
            now = file.read_text(errors="replace")
        except OSError:
            return text
        if now and now == text:
            return now
        text = now
        time.sleep(_SETTLED_S)
    return text


def _catches(pid: int) -> bool:
    """Whether a process has a handler for :data:`SIGNAL`."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (SIGNAL - 1) & 1)


def child_pids(pid: int) -> list[int]:
    """Processes that a process has started and not yet waited for."""
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except OSError:
        pass
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    except OSError:
        return ""
