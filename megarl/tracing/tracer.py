"""The tracer of a process: spans, counters and instants, for the timeline and for the board.

There is one tracer per process. Code of all rooms calls the functions of this module. Without recording and without a
board, each costs one function call.

``torch.profiler`` and HTA record operators of one process over a few steps. This timeline covers all processes of a run
on one clock, cheaply enough for every step; its file opens in the same viewers.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from megarl.base.formatting import MIB
from megarl.base.processes import resident_bytes
from megarl.tracing.board import Board

PHASE = "phase"
"""Category of a step's phases, in the driver."""
MISSING_EVENTS = "left out"
"""Category of the instants that report missing events."""
MOST_EVENTS = 500_000
"""Largest number of events between two collections; further events are counted and dropped."""


class Event(NamedTuple):
    """One event of the timeline.

    Attributes:
        kind: ``X`` a span, ``C`` a counter, ``i`` an instant, as in Chrome's trace format.
        category: kind of work, such as ``verb`` or ``communication``.
        start_ns: start on the machine's monotonic clock.
        duration_ns: duration of a span; otherwise 0.
        lane: thread or other lane of the process; empty = the followed thread.
    """

    kind: str
    name: str
    category: str
    start_ns: int
    duration_ns: int
    lane: str
    args: dict[str, Any]


def missing_events(description: str) -> Event:
    """Create an instant that reports missing events up to now."""
    return Event("i", f"events left out: {description}", MISSING_EVENTS, time.monotonic_ns(), 0, "", {})


class Tracer:
    """Events of this process since the last collection, and the open spans of one thread, first its main thread.

    Attributes:
        watcher: called with the name of a span at its start, and with None at its end; for NVTX.
        board: board that shows the spans of the followed thread; None = no board.
        thread: identifier of the followed thread, see :meth:`follow_thread`.
        moved_ns: time of the last progress: start or end of a span of that thread, or a call of :meth:`progress`.
        waited_ns: nanoseconds in collectives since the start of the process, counted while the tracer is active.
    """

    def __init__(self) -> None:
        self.recording = False
        self.board: Board | None = None
        self.watcher: Callable[[str | None], None] | None = None
        self.stack: list[tuple[str, str, int]] = []
        self.moved_ns = time.monotonic_ns()
        self.completed: set[str] = set()
        self.dropped = 0
        self.waited_ns = 0
        self._events: list[Event] = []
        self.thread = threading.main_thread().ident

    @property
    def active(self) -> bool:
        """Whether a span has any effect."""
        return self.recording or self.board is not None or self.watcher is not None

    def enter(self, name: str, category: str, shown: str) -> int:
        """Begin a span; return its start. ``shown`` is its text on the board."""
        now = time.monotonic_ns()
        if threading.get_ident() == self.thread:
            self.stack.append((name, category, now))
            self.moved_ns = now
            if self.board is not None:
                self.board.push(shown, now)
            if self.watcher is not None:
                self.watcher(shown)
        return now

    def leave(
        self, name: str, category: str, start_ns: int, args: dict[str, Any], shortest_ns: int = 0, lane: str = ""
    ) -> None:
        """End the span that began at ``start_ns``; spans shorter than ``shortest_ns`` are dropped."""
        now = time.monotonic_ns()
        followed = threading.get_ident() == self.thread
        if followed and self.stack:
            self._remove((name, category, start_ns))
            self.moved_ns = now
            if category == PHASE:
                self.completed.add(name)
            if self.watcher is not None:
                self.watcher(None)
        if self.recording and now - start_ns >= shortest_ns:
            lane = lane or ("" if followed else threading.current_thread().name)
            self.keep(Event("X", name, category, start_ns, now - start_ns, lane, args))

    def _remove(self, entry: tuple[str, str, int]) -> None:
        """Take a span off the stack and the board; spans of simultaneous phases end in any order."""
        index = len(self.stack) - 1
        if self.stack[index] != entry and entry in self.stack:
            index = self.stack.index(entry)
        del self.stack[index]
        if self.board is not None:
            inner = self.stack[index:]
            for _ in range(len(inner) + 1):
                self.board.pop()
            for name, _, start_ns in inner:
                self.board.push(name, start_ns)

    def follow_thread(self) -> None:
        """Show the spans of the calling thread on the board from now on.

        For processes whose work moves between threads, at a time when no span is open.
        """
        if not self.stack:
            self.thread = threading.get_ident()
            if self.board is not None:
                self.board.follow(self.thread)

    def progress(self) -> None:
        """Record progress within a span, such as a finished request: the watchdog's time starts again."""
        self.moved_ns = time.monotonic_ns()

    def keep(self, event: Event) -> None:
        """Keep an event, up to the limit."""
        if len(self._events) < MOST_EVENTS:
            self._events.append(event)
        else:
            self.dropped += 1

    def take(self) -> list[Event]:
        """Return and clear the events since the last call."""
        events, self._events = self._events, []
        if self.dropped:
            events.append(missing_events(f"{self.dropped} more than {MOST_EVENTS} between two collections"))
            self.dropped = 0
        return events


TRACER = Tracer()
"""The tracer of this process."""


class _Span(AbstractContextManager[None]):
    """Context manager of one span."""

    __slots__ = ("_args", "_category", "_lane", "_name", "_start")

    def __init__(self, name: str, category: str, args: dict[str, Any], lane: str = "") -> None:
        self._name, self._category, self._args, self._lane = name, category, args, lane

    def __enter__(self) -> None:
        shown = self._name
        if self._args:
            shown += " " + " ".join(f"{key}={value}" for key, value in self._args.items())
        self._start = TRACER.enter(self._name, self._category, shown)

    def __exit__(self, *_: object) -> None:
        TRACER.leave(self._name, self._category, self._start, self._args, lane=self._lane)


_NO_SPAN: AbstractContextManager[None] = nullcontext()


def span(name: str, category: str = "", **args: Any) -> AbstractContextManager[None]:
    """Record the block as a span; ``args`` are shown with it."""
    return _Span(name, category, args) if TRACER.active else _NO_SPAN


def lane_span(name: str, category: str, lane: str) -> AbstractContextManager[None]:
    """Record the block as a span in a separate lane, for work during other spans of this thread."""
    return _Span(name, category, {}, lane) if TRACER.active else _NO_SPAN


def counter(name: str, lane: str = "", /, **values: float) -> None:
    """Record current values, shown as curves under ``name``."""
    if TRACER.recording:
        TRACER.keep(Event("C", name, "", time.monotonic_ns(), 0, lane, dict(values)))


def past_span(name: str, category: str, start_ns: int, lane: str, **args: Any) -> None:
    """Record a span that began at ``start_ns`` and ends now, in a lane."""
    if TRACER.recording:
        TRACER.keep(Event("X", name, category, start_ns, time.monotonic_ns() - start_ns, lane, args))


def count_memory() -> None:
    """Record this process's memory in MiB: host, and torch's on its GPU."""
    if not TRACER.recording:
        return
    values: dict[str, float] = {"host": resident_bytes() / MIB}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        values["device allocated"] = torch.cuda.memory_allocated() / MIB
        values["device reserved"] = torch.cuda.memory_reserved() / MIB
    counter("memory MiB", "", **{name: round(value, 1) for name, value in values.items()})
