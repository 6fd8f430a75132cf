"""Tracing options of a run's processes, and the start and end of watching a process."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from megarl.tracing.board import Board
from megarl.tracing.profilers import ProfileOptions, RoleProfile
from megarl.tracing.stacks import serve_stacks
from megarl.tracing.tracer import TRACER


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
