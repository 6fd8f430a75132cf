"""Spans, counters and moments of one process, for the timeline and for whoever asks what it is doing.

There is one tracer per process. Rooms call the functions of this module; while nothing is recorded and nobody watches,
each costs a function call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, NamedTuple

from megarl.tracing.board import Board

PHASE = "phase"
"""Category of a run's phases, in the driver."""
LEFT_OUT = "left out"
"""Category of moments that say which events are missing, and why."""
MOST_EVENTS = 500_000
"""Kept between two collections; what comes then is counted and told."""


class Event(NamedTuple):
    """One line of the timeline.

    Attributes:
        kind: ``X`` a span, ``C`` a counter, ``i`` a moment, as in Chrome's trace format.
        name: what.
        category: kind of work, such as ``verb`` or ``communication``.
        start_ns: on the machine's monotonic clock.
        duration_ns: of a span; 0 otherwise.
        lane: thread or place within the process; empty: its main thread.
        args: what else is shown.
    """

    kind: str
    name: str
    category: str
    start_ns: int
    duration_ns: int
    lane: str
    args: dict[str, Any]


def left_out(what: str) -> Event:
    """Says that the timeline lacks events up to now, and which or why."""
    return Event("i", f"events left out: {what}", LEFT_OUT, time.monotonic_ns(), 0, "", {})


class Tracer:
    """The events of this process since they were last taken, and what is under way in its main thread.

    Attributes:
        recording: whether events are kept.
        watcher: called with a span's name as it begins, and with None as it ends; for NVTX.
        board: where spans of the main thread are shown; None = nowhere.
        waited_ns: spent in collectives since the process began; counted while there is anything to tell.
    """

    def __init__(self) -> None:
        self.recording = False
        self.board: Board | None = None
        self.watcher: Callable[[str | None], None] | None = None
        self.stack: list[tuple[str, str, int]] = []
        self.moved_ns = time.monotonic_ns()
        self.dropped = 0
        self.waited_ns = 0
        self._events: list[Event] = []
        self._main = threading.main_thread().ident

    @property
    def active(self) -> bool:
        """Whether a span has any effect."""
        return self.recording or self.board is not None or self.watcher is not None

    def enter(self, name: str, category: str, shown: str) -> int:
        """A span begins; returns its start. ``shown`` is what the board says of it."""
        now = time.monotonic_ns()
        if threading.get_ident() == self._main:
            self.stack.append((name, category, now))
            self.moved_ns = now
            if self.board is not None:
                self.board.push(shown, now)
            if self.watcher is not None:
                self.watcher(shown)
        return now

    def leave(self, name: str, category: str, start_ns: int, args: dict[str, Any], shortest_ns: int = 0) -> None:
        """The span that began at ``start_ns`` ends; a shorter one than ``shortest_ns`` is not kept."""
        now = time.monotonic_ns()
        main = threading.get_ident() == self._main
        if main and self.stack:
            self.stack.pop()
            self.moved_ns = now
            if self.board is not None:
                self.board.pop()
            if self.watcher is not None:
                self.watcher(None)
        if self.recording and now - start_ns >= shortest_ns:
            lane = "" if main else threading.current_thread().name
            self.keep(Event("X", name, category, start_ns, now - start_ns, lane, args))

    def keep(self, event: Event) -> None:
        """Keep an event, if there is room."""
        if len(self._events) < MOST_EVENTS:
            self._events.append(event)
        else:
            self.dropped += 1

    def take(self) -> list[Event]:
        """The events since the last call, which are forgotten here."""
        events, self._events = self._events, []
        if self.dropped:
            events.append(left_out(f"{self.dropped} more than {MOST_EVENTS} between two collections"))
            self.dropped = 0
        return events


TRACER = Tracer()
"""This process's."""


class _Span(AbstractContextManager[None]):
    """One span; made anew for each."""

    __slots__ = ("_args", "_category", "_name", "_start")

    def __init__(self, name: str, category: str, args: dict[str, Any]) -> None:
        self._name, self._category, self._args = name, category, args

    def __enter__(self) -> None:
        shown = self._name
        if self._args:
            shown += " " + " ".join(f"{key}={value}" for key, value in self._args.items())
        self._start = TRACER.enter(self._name, self._category, shown)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        TRACER.leave(self._name, self._category, self._start, self._args)


_NOTHING: AbstractContextManager[None] = nullcontext()


def span(name: str, category: str = "", **args: Any) -> AbstractContextManager[None]:
    """Scope that is shown as a bar; ``args`` are shown beside it."""
    return _Span(name, category, args) if TRACER.active else _NOTHING


def counter(name: str, lane: str = "", /, **values: float) -> None:
    """Numbers as they are from now on, shown as curves under ``name``."""
    if TRACER.recording:
        TRACER.keep(Event("C", name, "", time.monotonic_ns(), 0, lane, dict(values)))


def past_span(name: str, category: str, start_ns: int, lane: str, **args: Any) -> None:
    """A bar that began at ``start_ns`` and ends now, in a lane of its own."""
    if TRACER.recording:
        TRACER.keep(Event("X", name, category, start_ns, time.monotonic_ns() - start_ns, lane, args))
