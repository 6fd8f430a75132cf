"""Python stacks and states of processes on this machine, whatever they hang in.

A process that never offered to tell its stacks (:mod:`megarl.tracing.stack_writer`) is asked for none: the signal would
end it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.tracing.board import STACKS, BoardContent, find_file, read_board
from megarl.tracing.stack_writer import SIGNAL

LONGEST_ANSWER_S = 2.0
"""For a process to tell its stacks, in each of the two ways."""
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


def take_reports(pids: Sequence[int], children_of: Sequence[int] | None = None) -> list[ProcessReport]:
    """What processes of this machine do; all are asked at once.

    Args:
        pids: of the processes.
        children_of: those whose children are told of; None = all.
    """
    asked = {pid: file for pid in pids if (file := _asked(pid)) is not None}
    told = _told(asked)
    told |= _told({pid: file for pid, file in asked.items() if not told[pid] and _signalled(pid)})
    parents = pids if children_of is None else children_of
    return [_report(pid, told.get(pid, ""), pid in parents) for pid in pids]


def _asked(pid: int) -> Path | None:
    """The file into which a process writes its stacks, having been asked to; None where it cannot, or never would."""
    file = find_file(pid, STACKS)
    if file is None or process_state(pid) in (DEAD, STOPPED):
        return None
    try:
        rope = re.match(rf"/memfd:{STACKS}:(\d+)", os.readlink(file))
        if rope is None:
            return None
        os.truncate(file, 0)
        handle = os.open(file.with_name(rope[1]), os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(handle, b"?")
        finally:
            os.close(handle)
    except OSError:
        return None
    return file


def _told(files: Mapping[int, Path]) -> dict[int, str]:
    """What processes have written, by their numbers; empty texts of those that have not in time."""
    deadline = time.monotonic() + LONGEST_ANSWER_S
    return {pid: _settled_text(file, deadline) for pid, file in files.items()}


def _signalled(pid: int) -> bool:
    """Asks a process whose threads cannot run by the signal, unless it would end it."""
    if not _catches(pid):
        return False
    try:
        os.kill(pid, SIGNAL)
    except OSError:
        return False
    return True


def process_state(pid: int) -> str:
    """What the system says of a process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return DEAD
    return _STATES.get(text.rpartition(")")[2].split()[0], "sleeping")


def main_frames(stacks: str) -> tuple[Frame, ...]:
    """The frames of the main thread, innermost first."""
    _, _, rest = stacks.partition("Current thread ")
    found = []
    for line in rest.splitlines()[1:]:
        match = _FRAME.match(line)
        if match is None:
            break
        found.append(Frame(match["file"], int(match["line"]), match["function"]))
    return tuple(found)


def _report(pid: int, stacks: str, with_children: bool) -> ProcessReport:
    children = [_child(child) for child in child_pids(pid)] if with_children else []
    board = read_board(pid)
    command = _command(pid) if board is None else ""
    frames = main_frames(stacks)
    return ProcessReport(pid, process_state(pid), board, stacks, frames, time.monotonic_ns(), command, tuple(children))


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
