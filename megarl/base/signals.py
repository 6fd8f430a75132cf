"""Signals and interrupts: noted at any moment, raised where the main thread waits, with the exit code 128 plus number.

An exception that a signal handler raises at a random point can be lost: Python ignores exceptions of finalizers and
weakref callbacks. So handlers and watches only note a request, and every wait of the driver raises it, see
:func:`wait_slices`. Work that does not wait for :data:`PATIENCE_S` seconds is interrupted where it is, until the
exception is seen to unwind the stack.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn, TypeVar

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a scheduler's request to end, and a closed terminal."""

PATIENCE_S = 1.0
"""Seconds in which the main thread should reach a wait; then it is interrupted where it is, again and again."""
POLL_S = 0.2
"""Longest part of a wait that sees no interrupt."""

Handler = Callable[[int, FrameType | None], object]
_T = TypeVar("_T")


class _Interrupt:
    """The interrupt of the main thread: requested by a signal's handler or a watch, raised by a wait.

    Attributes:
        number: first signal that arrived in the outermost scope; 0 = none.
        is_pending: not yet seen to unwind the stack.
        requested: time of the request, or of the last attempt to raise, of ``time.monotonic``.
        error: the exception of the last attempt.
        held: number of open scopes of :func:`signals_ignored`.
        insists: a SIGUSR1 of :func:`_insist` is on its way.
    """

    def __init__(self) -> None:
        self.depth = self.held = 0
        self.insists = False
        self.reset()

    def reset(self) -> None:
        self.number, self.is_pending, self.requested = 0, False, 0.0
        self.error: BaseException | None = None

    def request(self, number: int = 0) -> None:
        self.number = self.number or number
        self.requested, self.error = time.monotonic(), None
        self.is_pending = True

    def raise_(self) -> None:
        """Raise a pending interrupt, unless an earlier attempt unwinds the stack."""
        if not self.is_pending or self.held:
            return
        if self.error is not None and _is_handled(self.error):
            self.is_pending = False
            return
        ends = self.number in (signal.SIGTERM, signal.SIGHUP)
        self.error = SystemExit(128 + self.number) if ends else KeyboardInterrupt()
        raise self.error


_INTERRUPT = _Interrupt()


def request_interrupt() -> None:
    """Interrupt the main thread with :class:`KeyboardInterrupt` at its next wait; called by the threads of watches.

    Needs an open scope of :func:`interruptible` in the main thread.
    """
    _INTERRUPT.request()


def withdraw_interrupt() -> None:
    """Withdraw an interrupt of :func:`request_interrupt` that was not raised; those of signals stay."""
    if not _INTERRUPT.number:
        _INTERRUPT.is_pending = False


def ending_signal() -> int:
    """Return the first signal that requested the end of this scope; 0 = none."""
    return _INTERRUPT.number


def check_interrupt() -> None:
    """Raise a pending interrupt: :class:`SystemExit` after SIGTERM and SIGHUP, else :class:`KeyboardInterrupt`.

    Has no effect outside the main thread.
    """
    if _INTERRUPT.is_pending and _in_main_thread():
        _INTERRUPT.raise_()


_BACKGROUND: list[Callable[[], None]] = []


@contextlib.contextmanager
def while_waiting(work: Callable[[], None]) -> Iterator[None]:
    """Call ``work`` every :data:`POLL_S` seconds while the main thread waits, within the context.

    It replaces a thread for objects of the main thread. ``work`` should be short; its own waits do not call it, nor do
    waits while an exception is handled: during a shutdown it would meet processes that have ended.
    """
    _BACKGROUND.append(work)
    try:
        yield
    finally:
        _BACKGROUND.remove(work)


def _run_background() -> None:
    if _BACKGROUND and _in_main_thread() and sys.exc_info()[1] is None:
        works = _BACKGROUND.copy()
        _BACKGROUND.clear()  # waits of the work itself
        try:
            for work in works:
                work()
        finally:
            _BACKGROUND[:] = works


def wait_slices(timeout_s: float | None = None) -> Iterator[float]:
    """Yield short waiting times up to a total, at least one; raise a pending interrupt before each.

    The work of :func:`while_waiting` runs after each but the last.

    Args:
        timeout_s: total in seconds; None = no limit.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    left = POLL_S
    while left > 0:
        check_interrupt()
        if deadline is not None:
            left = min(POLL_S, deadline - time.monotonic())
        yield max(0.0, left)
        if deadline is None or time.monotonic() < deadline:
            _run_background()


def wait_for(future: concurrent.futures.Future[_T], timeout_s: float | None = None) -> _T:
    """Return the result of a future; an interrupt ends the wait.

    Raises:
        TimeoutError: ``timeout_s`` seconds have passed.
    """
    for slice_s in wait_slices(timeout_s):
        if concurrent.futures.wait([future], slice_s).done:
            return future.result()
    raise TimeoutError(f"no result within {timeout_s:g} s")


def sleep(seconds: float) -> None:
    """Sleep; an interrupt ends it."""
    for slice_s in wait_slices(seconds):
        time.sleep(slice_s)


def exit_at_once_on_signals() -> None:
    """End this process at once on Ctrl-C, SIGTERM or SIGHUP, for the imports of a command.

    An exception in the middle of an import shows a traceback, or breaks the library that is being imported.
    """
    _install(_exit_at_once, ENDING_SIGNALS)


@contextlib.contextmanager
def signals_exit_at_once() -> Iterator[None]:
    """Apply :func:`exit_at_once_on_signals` within the context, for imports after a job has opened files."""
    with _handled(_exit_at_once, ENDING_SIGNALS):
        yield


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let :func:`request_interrupt` end the main thread's work within the context, also outside its waits.

    Scopes may be nested. An interrupt that was never raised is raised at the normal end of the outermost one.
    """
    if not _in_main_thread():
        yield
        return
    previous = signal.getsignal(signal.SIGUSR1)

    def insist(number: int, frame: FrameType | None) -> None:
        is_own, _INTERRUPT.insists = _INTERRUPT.insists, False
        if is_own or _INTERRUPT.is_pending:
            _INTERRUPT.raise_()
        elif callable(previous):
            previous(number, frame)
        elif previous is signal.SIG_DFL:
            signal.signal(number, previous)
            os.kill(os.getpid(), number)

    closed, thread = threading.Event(), None
    with _handled(insist, (signal.SIGUSR1,)):
        if not _INTERRUPT.depth:
            thread = threading.Thread(target=_insist, args=(closed,), name="interrupts", daemon=True)
            thread.start()
        _INTERRUPT.depth += 1
        try:
            yield
            if _INTERRUPT.depth == 1 and _INTERRUPT.error is None:
                check_interrupt()
        finally:
            closed.set()
            _INTERRUPT.held += 1
            try:
                if thread is not None:
                    thread.join()  # a SIGUSR1 after the end of the handler would end this process
            finally:
                _INTERRUPT.held -= 1
                _INTERRUPT.depth -= 1
                if not _INTERRUPT.depth:
                    _INTERRUPT.reset()


@contextlib.contextmanager
def signals_exit_in_order() -> Iterator[None]:
    """Let SIGTERM, SIGHUP and Ctrl-C end the work at its next wait, within the context.

    SIGTERM and SIGHUP raise :class:`SystemExit`, Ctrl-C raises :class:`KeyboardInterrupt`.
    """
    with interruptible(), _handled(_note, ENDING_SIGNALS):
        yield


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore signals and pending interrupts within the context, during a shutdown."""
    with _handled(signal.SIG_IGN, ENDING_SIGNALS):
        _INTERRUPT.held += _in_main_thread()
        try:
            yield
        finally:
            _INTERRUPT.held -= _in_main_thread()


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


def _note(number: int, frame: FrameType | None) -> None:
    again = _INTERRUPT.number
    _INTERRUPT.request(number)
    if again:
        _INTERRUPT.raise_()


def _insist(closed: threading.Event) -> None:
    """Interrupt the main thread where it is, if it has not reached a wait for :data:`PATIENCE_S` seconds."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)  # the main thread may hold them back
    main = threading.main_thread().ident or 0
    while not closed.wait(POLL_S):
        if _INTERRUPT.is_pending and time.monotonic() - _INTERRUPT.requested > PATIENCE_S:
            _INTERRUPT.requested = time.monotonic()
            _INTERRUPT.insists = True
            signal.pthread_kill(main, signal.SIGUSR1)


def _is_handled(error: BaseException) -> bool:
    """Whether an exception unwinds the stack: the main thread handles it, or an exception that followed from it."""
    seen, rest = set(), [sys.exc_info()[1]]
    while rest:
        handled = rest.pop()
        if handled is error:
            return True
        if handled is not None and id(handled) not in seen:
            seen.add(id(handled))
            rest += [handled.__context__, handled.__cause__]
    return False


def _install(handler: Handler | signal.Handlers, numbers: Sequence[int]) -> dict[int, object]:
    """Replace the handlers of signals that are not ignored (``nohup``); returns the previous ones."""
    if not _in_main_thread():
        return {}
    numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in numbers}


@contextlib.contextmanager
def _handled(handler: Handler | signal.Handlers, numbers: Sequence[int]) -> Iterator[None]:
    previous = _install(handler, numbers)
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)  # type: ignore[arg-type]


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
