"""What a process is doing, in memory that others can read while it hangs, is stopped, or holds Python's lock.

A board is an anonymous file of a few kilobytes. Its process writes into it through a mapping, which costs less than a
microsecond; whoever runs as the same user on the same machine reads it under ``/proc/<pid>/fd``. It goes with its
process. Nothing is locked: a reader may see a slot while it is written, and shows it as it is.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BOARD, STACKS = "megarl-board", "megarl-stacks"
"""Names of a process's anonymous files."""
_SLOT = struct.Struct("<qH118s")
_COUNT = struct.Struct("<qH118s")
_DEPTH = struct.Struct("<H")
SPANS, GROUPS = 30, 31
_SPANS_AT = 128
_GROUPS_AT = _SPANS_AT + SPANS * _SLOT.size
SIZE = _GROUPS_AT + GROUPS * _COUNT.size


@dataclass(frozen=True)
class OpenSpan:
    """Something under way: its name, and since when on the machine's monotonic clock."""

    name: str
    since_ns: int


@dataclass(frozen=True)
class GroupCount:
    """How far a process is in the collectives of one group.

    Attributes:
        group: its name and ranks, the same on all of them, such as ``tensor-model-parallel [0, 1]``.
        issued: collectives that this process has begun.
        last: name of the last one.
    """

    group: str
    issued: int
    last: str


@dataclass(frozen=True)
class BoardContent:
    """What a board shows: spans from the outermost to the innermost, and counts by group."""

    spans: Sequence[OpenSpan] = ()
    groups: Mapping[str, GroupCount] | None = None

    @property
    def counts(self) -> Mapping[str, GroupCount]:
        """Counts by group."""
        return self.groups or {}


class Board:
    """This process's own; Linux only."""

    def __init__(self) -> None:
        self._fd = os.memfd_create(BOARD)
        os.ftruncate(self._fd, SIZE)
        self._memory = mmap.mmap(self._fd, SIZE)
        self._depth = 0
        self._groups: dict[str, int] = {}

    def push(self, name: str, since_ns: int) -> None:
        """Something begins inside of what is under way."""
        if self._depth < SPANS:
            text = name.encode()[:118]
            _SLOT.pack_into(self._memory, _SPANS_AT + self._depth * _SLOT.size, since_ns, len(text), text)
        self._depth += 1
        _DEPTH.pack_into(self._memory, 0, min(self._depth, SPANS))

    def pop(self) -> None:
        """The innermost has ended."""
        self._depth -= 1
        _DEPTH.pack_into(self._memory, 0, min(self._depth, SPANS))

    def issue(self, group: str, name: str, count: int) -> None:
        """The collective ``name``, the ``count``-th of its group, begins; groups beyond :data:`GROUPS` are left out."""
        slot = self._groups.setdefault(group, len(self._groups))
        if slot < GROUPS:
            text = f"{group}|{name}".encode()[:118]
            _COUNT.pack_into(self._memory, _GROUPS_AT + slot * _COUNT.size, count, len(text), text)

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()
        os.close(self._fd)


def find_file(pid: int, name: str) -> Path | None:
    """A process's anonymous file by its name, up to a colon in it; None where it has none, or is gone."""
    beginnings = (f"/memfd:{name} ", f"/memfd:{name}:")
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(entry).startswith(beginnings):
                return entry
    except OSError:
        pass
    return None


def read_board(pid: int) -> BoardContent | None:
    """What the board of a process on this machine shows; None where it has none, or is gone."""
    file = find_file(pid, BOARD)
    if file is None:
        return None
    try:
        memory = file.read_bytes()
    except OSError:
        return None
    (depth,) = _DEPTH.unpack_from(memory, 0)
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
    return BoardContent(spans, groups)
