"""Beginning and ending to watch a process."""

from __future__ import annotations

import sys

from megarl.tracing.board import Board
from megarl.tracing.options import TracingOptions
from megarl.tracing.stack_writer import tell_stacks
from megarl.tracing.tracer import TRACER


def watch_process(options: TracingOptions) -> None:
    """Show on a board what this process does, and tell stacks when asked, as the options say."""
    if options.watched and sys.platform.startswith("linux") and TRACER.board is None:
        TRACER.board = Board()
        tell_stacks()


def unwatch_process() -> None:
    """Stop recording and take the board away; for a process that outlives the run."""
    TRACER.recording = False
    TRACER.take()
    if TRACER.board is not None:
        TRACER.board.close()
        TRACER.board = None
    TRACER.stack.clear()
