"""The board of a process: its open spans and collectives, in memory that other processes can read.

A reader needs no cooperation: the process may hang, be stopped, or hold the GIL. A board is an anonymous file of a few
kilobytes. Its process writes through a memory mapping, in less than a microsecond. Any process of the same user on the
same machine reads it under ``/proc/<pid>/fd``. It disappears with its process. There is no lock: a reader may see a
slot during a write.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from megarl.base.processes import open_files

BOARD, STACKS = "megarl-board", "megarl-stacks"
"""Names of a process's anonymous files."""
_SLOT = struct.Struct("<qH118s")
_COUNT = struct.Struct("<qH118s")
_DEPTH, _THREAD = struct.Struct("<H"), struct.Struct("<Q")
_THREAD_AT = 8
SPANS, GROUPS = 30, 31
_SPANS_AT = 128
_GROUPS_AT = _SPANS_AT + SPANS * _SLOT.size
SIZE = _GROUPS_AT + GROUPS * _COUNT.size
_LISTED_RANKS = 8


@dataclass(frozen=True)
class OpenSpan:
    """An open span: name and start on the machine's monotonic clock."""

    name: str
    since_ns: int


@dataclass(frozen=True)
class GroupCount:
    """Progress of a process in the collectives of one group.

    Attributes:
        group: name and ranks, identical on all its ranks, such as ``tensor-model-parallel [0, 1]``.
    """

    group: str
    issued: int
    last: str


@dataclass(frozen=True)
class BoardContent:
    """Content of a board.

    Attributes:
        spans: open spans, outermost first.
        thread: identifier of the thread whose spans these are; 0 = unknown.
    """

    spans: Sequence[OpenSpan] = ()
    counts: Mapping[str, GroupCount] = field(default_factory=dict)
    thread: int = 0


class Board:
    """The board of this process; Linux only."""

    def __init__(self, thread: int | None) -> None:
        self._fd = os.memfd_create(BOARD)
        os.ftruncate(self._fd, SIZE)
        self._memory = mmap.mmap(self._fd, SIZE)
        self._depth = 0
        self._groups: dict[str, int] = {}
        self.follow(thread)

    def follow(self, thread: int | None) -> None:
        """Record the thread whose spans the board shows."""
        _THREAD.pack_into(self._memory, _THREAD_AT, thread or 0)

    def push(self, name: str, since_ns: int) -> None:
        """Add a span inside the open spans."""
        if self._depth < SPANS:
            text = name.encode()[:118]
            _SLOT.pack_into(self._memory, _SPANS_AT + self._depth * _SLOT.size, since_ns, len(text), text)
        self._depth += 1
        _DEPTH.pack_into(self._memory, 0, min(self._depth, SPANS))

    def pop(self) -> None:
        """Remove the innermost span."""
        self._depth -= 1
        _DEPTH.pack_into(self._memory, 0, min(self._depth, SPANS))

    def issue(self, group: str, name: str, count: int) -> None:
        """Record the ``count``-th collective of a group; groups beyond :data:`GROUPS` are ignored."""
        slot = self._groups.setdefault(group, len(self._groups))
        if slot < GROUPS:
            text = f"{group}|{name}".encode()[:118]
            _COUNT.pack_into(self._memory, _GROUPS_AT + slot * _COUNT.size, count, len(text), text)

    def close(self) -> None:
        """Free the memory."""
        self._memory.close()
        os.close(self._fd)


def find_file(pid: int, name: str) -> Path | None:
    """Find a process's anonymous file by its name before a colon; None if there is none."""
    prefixes = (f"/memfd:{name} ", f"/memfd:{name}:")
    return next((Path(path) for path, target in open_files(pid) if target.startswith(prefixes)), None)


def read_board(pid: int) -> BoardContent | None:
    """Read the board of a process on this machine; None if there is none."""
    file = find_file(pid, BOARD)
    if file is None:
        return None
    try:
        memory = file.read_bytes()
    except OSError:
        return None
    (depth,), (thread,) = _DEPTH.unpack_from(memory, 0), _THREAD.unpack_from(memory, _THREAD_AT)
    spans = []
    for slot in range(min(depth, SPANS)):
        since, length, text = _SLOT.unpack_from(memory, _SPANS_AT + slot * _SLOT.size)
        spans.append(OpenSpan(text[:length].decode(errors="replace"), since))
    groups = {}
    for slot in range(GROUPS):
        issued, length, text = _COUNT.unpack_from(memory, _GROUPS_AT + slot * _COUNT.size)
        group, _, last = text[:length].decode(errors="replace").rpartition("|")
        if issued:
            groups[group] = GroupCount(group, issued, last)
    return BoardContent(spans, groups, thread)


def describe_ranks(ranks: Sequence[int]) -> str:
    """Format the ranks of a group: ``[0, 2]``, or ``[0:64:8]`` for many ranks at equal distances."""
    steps = {after - before for before, after in pairwise(ranks)}
    if len(ranks) > _LISTED_RANKS and len(steps) == 1 and (step := steps.pop()) > 0:
        return f"[{ranks[0]}:{ranks[-1] + 1}:{step}]"
    return f"[{', '.join(map(str, ranks))}]"


def parse_ranks(text: str) -> tuple[int, ...]:
    """Parse the text of :func:`describe_ranks`."""
    inside = text.strip("[]")
    if ":" in inside:
        return tuple(range(*map(int, inside.split(":"))))
    return tuple(int(rank) for rank in inside.split(",") if rank.strip())
