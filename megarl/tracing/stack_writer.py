"""A watched process's side of telling its Python stacks: it writes them into an anonymous file when it is asked.

It is asked in two ways. A thread waits at a pipe, the bell, and writes the stacks of the others while it holds Python's
lock, so that they stand still. Where that lock is never given up, the thread cannot answer; then :data:`SIGNAL` has
``faulthandler`` write them, in C and without the lock. That is for this case alone: it reads the frames of threads that
run while it does, and ends the process where one of them returns at the wrong moment.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from megarl.tracing.board import STACKS, find_file

SIGNAL = signal.SIGUSR2


def tell_stacks() -> None:
    """From here on this process tells its stacks when it is asked; once, and on Linux only."""
    if find_file(os.getpid(), STACKS) is not None or not sys.platform.startswith("linux"):
        return
    bell, rope = os.pipe()
    # The name of the file says how to ring: by writing to this process's descriptor of that number.
    handle = os.memfd_create(f"{STACKS}:{rope}")
    # A reader empties it before it asks; what is written next goes to its end.
    fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_APPEND)
    faulthandler.register(SIGNAL, file=handle, all_threads=True, chain=False)
    threading.Thread(target=_answer, args=(bell, handle), name="stacks", daemon=True).start()


def _answer(bell: int, handle: int) -> None:
    while os.read(bell, 4096):
        os.write(handle, "\n".join(_stacks()).encode())


def _stacks() -> Iterator[str]:
    """The lines that ``faulthandler`` would write, and the names of threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own, main = threading.get_ident(), threading.main_thread().ident
    for ident, frame in sys._current_frames().items():
        if ident != own:
            kind, name = ("Current thread" if ident == main else "Thread"), names.get(ident, "")
            yield f"{kind} 0x{ident:016x}{f' [{name}]' if name else ''} (most recent call first):"
            yield from _lines(frame)
            yield ""


def _lines(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        code = frame.f_code
        yield f'  File "{code.co_filename}", line {frame.f_lineno or 0} in {code.co_name}'
        frame = frame.f_back
