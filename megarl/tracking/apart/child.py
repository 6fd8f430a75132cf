"""The process of one tracker: it does what the driver sends, in that order, and says how each call went."""

from __future__ import annotations

import os
import queue
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

from megarl.errors import ConfigError
from megarl.tracking.tracker import RunInfo, Tracker, find_tracker

DONE, MISCONFIGURED, UNREACHABLE, REFUSED = "done", "misconfigured", "unreachable", "refused"


class Call(NamedTuple):
    """What the driver asks for: ``check``, ``open``, or a method of the tracker, with its arguments."""

    name: str
    args: tuple[Any, ...] = ()


class Answer(NamedTuple):
    """How it went.

    Attributes:
        status: ``DONE``; ``MISCONFIGURED``, as the check says; ``UNREACHABLE``, which may pass; or ``REFUSED``,
            which is this call's own fault as far as one can tell.
        text: the error; of ``open`` that is done, see :meth:`Tracker.leftover`.
    """

    status: str
    text: str = ""


def main(handle: int, timeout_s: float) -> None:
    """Serve the driver until it hangs up, which ends the tracker in order; ends the process.

    Args:
        handle: file descriptor of the connection to the driver.
        timeout_s: for the tracker to send what is outstanding when the driver is gone.
    """
    os.set_inheritable(handle, False)
    connection = Connection(handle)
    calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, calls, timeout_s), daemon=True).start()
    desk = Desk()
    while (call := calls.get()) is not None:
        answer = desk.answer(call)
        try:
            connection.send(tuple(answer))
        except OSError:
            break
        if call.name == "finish":
            break
    desk.close()
    os._exit(0)  # what a package does at a process's exit may hang, too


def _read(connection: Connection, calls: queue.SimpleQueue[Call | None], timeout_s: float) -> None:
    """Takes calls in also while one hangs, so that it is noticed when the driver has gone."""
    try:
        while True:
            calls.put(Call(*connection.recv()))
    except (EOFError, OSError):
        calls.put(None)
    time.sleep(timeout_s)
    os._exit(1)


class Desk:
    """Turns calls into those of a tracker."""

    def __init__(self) -> None:
        self.tracker: Tracker | None = None

    def answer(self, call: Call) -> Answer:
        """Do it; a failure is an answer, too, and is printed whole."""
        try:
            return Answer(DONE, self._method(call.name)(*call.args) or "")
        except (Exception, SystemExit) as error:
            print(time.strftime("%Y-%m-%d %H:%M:%S"), "failed:", call.name, flush=True)
            traceback.print_exc()
            return Answer(_status(error), f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """End the tracker in order, where it has not been."""
        if self.tracker is not None:
            self.answer(Call("finish"))

    def _method(self, name: str) -> Callable[..., Any]:
        own: dict[str, Callable[..., Any]] = {"check": self._check, "open": self._open, "finish": self._finish}
        if name in own:
            return own[name]
        assert self.tracker is not None, "open() comes first"
        method: Callable[..., Any] = getattr(self.tracker, name)
        return method

    def _check(self, name: str) -> None:
        kind = cast(type[Tracker], find_tracker(name))
        try:
            kind.check()
        except ImportError as error:
            raise ConfigError(f"the package {kind.package!r} cannot be imported: {error}") from error

    def _open(self, name: str, run: RunInfo) -> str:
        self.tracker = find_tracker(name)(run)
        return self.tracker.leftover()

    def _finish(self) -> None:
        if self.tracker is not None:
            self.tracker.finish()
            self.tracker = None


def _status(error: BaseException) -> str:
    if isinstance(error, ConfigError):
        return MISCONFIGURED
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, OSError):  # those of requests, of sockets and of files
            return UNREACHABLE
        chain = chain.__cause__ or chain.__context__
    return REFUSED
