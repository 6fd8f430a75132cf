"""Signals that end a job before its processes run: no traceback, exit code 128 plus the signal's number."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a scheduler's request to end, and a closed terminal."""

Handler = Callable[[int, FrameType | None], object]


def exit_at_once_on_signals() -> None:
    """End this process at once on Ctrl-C, SIGTERM or SIGHUP, for the imports of a command.

    An exception in the middle of an import shows a traceback, or breaks the library that is being imported.
    """
    _install(_exit_at_once, ENDING_SIGNALS)


@contextlib.contextmanager
def signals_exit_at_once() -> Iterator[None]:
    """Scope of :func:`exit_at_once_on_signals`, for imports after a job has opened files."""
    with _handled(_exit_at_once, ENDING_SIGNALS):
        yield


@contextlib.contextmanager
def signals_exit_in_order() -> Iterator[None]:
    """Scope in which SIGTERM and SIGHUP raise :class:`SystemExit`, and Ctrl-C raises :class:`KeyboardInterrupt`."""
    with _handled(_raise_exit, (signal.SIGTERM, signal.SIGHUP)), _handled(_raise_interrupt, (signal.SIGINT,)):
        yield


@contextlib.contextmanager
def signals_held(numbers: Sequence[int]) -> Iterator[None]:
    """Hold signals back until the end of the block; a second one ends this process at once.

    SIGTERM and SIGHUP are blocked for this thread too, so that they miss handlers that a library installs in the block.
    Threads of other libraries may still receive them, so a handler notes the signals there.
    """
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if arrived:
            os._exit(128 + number)
        arrived.append(number)

    try:
        with _handled(note, numbers):
            previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP}.intersection(numbers))
            try:
                yield
            finally:
                blocked = signal.sigpending() & set(numbers) if _in_main_thread() else set()
                for number in blocked:
                    signal.sigwait({number})
                arrived += blocked
                signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    finally:
        if arrived:
            signal.raise_signal(arrived[0])


def _exit_at_once(number: int, frame: FrameType | None) -> NoReturn:
    with contextlib.suppress(Exception):  # a closed terminal, or a print that the signal interrupted
        os.write(2, b"interrupted\n" if number == signal.SIGINT else b"")
        sys.stdout.flush()
    os._exit(128 + number)


def _raise_exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _raise_interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _install(handler: Handler, numbers: Sequence[int]) -> dict[int, object]:
    """Replace the handlers of signals that are not ignored (``nohup``); returns the previous ones."""
    if not _in_main_thread():
        return {}
    numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in numbers}


@contextlib.contextmanager
def _handled(handler: Handler, numbers: Sequence[int]) -> Iterator[None]:
    previous = _install(handler, numbers)
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)  # type: ignore[arg-type]


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
