"""The process of a subprocess tracker: it executes the driver's calls in order and replies with their results."""

from __future__ import annotations

import os
import queue
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from megarl.base.child_process import open_connection
from megarl.tracking.tracker import TRACKERS, RunInfo, Tracker

DONE, UNREACHABLE, REFUSED = "done", "unreachable", "refused"


class TrackerCall(NamedTuple):
    """A call from the driver: ``open``, or a method of the tracker, with its arguments."""

    name: str
    args: tuple[Any, ...] = ()


class CallResult(NamedTuple):
    """Result of a call.

    Attributes:
        status: ``DONE``; ``UNREACHABLE``: an I/O error that a retry may cure; ``REFUSED``: any other error, taken as
            the fault of the record.
        text: the error; for a successful ``open``, the text of :meth:`Tracker.leftover`.
    """

    status: str
    text: str = ""


def main(handle: int, timeout_s: float) -> None:
    """Serve the driver until it closes the connection, finish the tracker, and exit the process.

    Args:
        handle: file descriptor of the connection to the driver.
        timeout_s: seconds for the tracker to finish if the driver is gone.
    """
    connection = open_connection(handle)
    calls: queue.SimpleQueue[TrackerCall | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, calls, timeout_s), daemon=True).start()
    worker = TrackerWorker()
    while (call := calls.get()) is not None:
        result = worker.execute(call)
        try:
            connection.send(tuple(result))
        except OSError:
            break
        if call.name == "finish":
            break
    worker.close()
    os._exit(0)  # exit handlers of a package may hang


def _read(connection: Connection, calls: queue.SimpleQueue[TrackerCall | None], timeout_s: float) -> None:
    """Receive calls in a thread, so that the end of the driver is noticed during a call that hangs."""
    try:
        while True:
            calls.put(TrackerCall(*connection.recv()))
    except (EOFError, OSError):
        calls.put(None)
    time.sleep(timeout_s)
    os._exit(1)


class TrackerWorker:
    """Executes calls on a tracker."""

    def __init__(self) -> None:
        self.tracker: Tracker | None = None

    def execute(self, call: TrackerCall) -> CallResult:
        """Execute a call; an exception becomes a result, and its traceback is printed."""
        try:
            return CallResult(DONE, self._method(call.name)(*call.args) or "")
        except (Exception, SystemExit) as error:
            print(time.strftime("%Y-%m-%d %H:%M:%S"), "failed:", call.name, flush=True)
            traceback.print_exc()
            return CallResult(_status(error), f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Finish the tracker, unless it is finished."""
        if self.tracker is not None:
            self.execute(TrackerCall("finish"))

    def _method(self, name: str) -> Callable[..., Any]:
        methods: dict[str, Callable[..., Any]] = {"open": self._open, "finish": self._finish}
        if name in methods:
            return methods[name]
        assert self.tracker is not None, "open() comes first"
        method: Callable[..., Any] = getattr(self.tracker, name)
        return method

    def _open(self, name: str, run: RunInfo) -> str:
        self.tracker = TRACKERS.find(name)(run)
        return self.tracker.leftover()

    def _finish(self) -> None:
        if self.tracker is not None:
            self.tracker.finish()
            self.tracker = None


def _status(error: BaseException) -> str:
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, OSError):  # includes the errors of requests, sockets and files
            return UNREACHABLE
        chain = chain.__cause__ or chain.__context__
    return REFUSED
