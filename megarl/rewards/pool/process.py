"""One process of the pool, seen from the driver; imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from megarl.errors import RewardError
from megarl.rewards.calling import FunctionSpec, Task
from megarl.rewards.outcome import Outcome
from megarl.rewards.pool.child import READY, REFUSED
from megarl.tracing import TRACER, past_span

START_TIMEOUT_S = 300.0
"""Seconds for a process to load its functions: a user's file may import much."""
_CODE = (
    "import sys; sys.path[:] = {path!r}; from megarl.rewards.pool.child import main; main({handle}, {parent}, {log!r})"
)


class WorkerProcess:
    """Started, and told its functions, when it is made.

    Args:
        functions: by number.
        first: of these, what it loads before it is asked for it.
        log: file for all that it prints, and level; None = it prints where this process does.

    Attributes:
        loaded: numbers of the functions that it has loaded.
        places: of the tasks that it has not answered yet, in the order in which it was sent them.
        spec: of the function that it was asked for.
        deadline: on the monotonic clock, by which it must say something; None = whenever it likes.
    """

    def __init__(
        self, functions: Sequence[FunctionSpec], first: Sequence[int] = (), log: tuple[str, str] | None = None
    ) -> None:
        self.log = log[0] if log else None
        here, there = socket.socketpair()
        with here, there:
            code = _CODE.format(path=sys.path, handle=there.fileno(), parent=os.getpid(), log=log)
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                start_new_session=True,  # a Ctrl-C in the terminal is the driver's to handle
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
            self.connection = Connection(here.detach())
        self.exit_handle = os.pidfd_open(self._process.pid)
        self.loaded: set[int] = set()
        self.places: list[int] = []
        self.spec: FunctionSpec | None = None
        self.deadline: float | None = None
        self._sent: list[int] = []
        self._heard_ns = 0
        with contextlib.suppress(OSError):  # it is dead already, which is noticed when it is listened to
            self.connection.send(list(functions))
            for number in first:
                self.connection.send((number, []))

    @property
    def is_idle(self) -> bool:
        """Whether it can be sent tasks."""
        return not self.places

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def send(self, places: Sequence[int], function: int, spec: FunctionSpec, tasks: Sequence[Task]) -> None:
        """Have a function called for tasks; ``places`` name them in the answers.

        Whether the process still lives is seen when it is listened to.
        """
        self.places, self._sent, self.spec = list(places), list(places), spec
        self._heard_ns = time.monotonic_ns()
        self.extend()
        if function not in self.loaded:
            self.deadline = time.monotonic() + START_TIMEOUT_S
        with contextlib.suppress(OSError):
            self.connection.send((function, list(tasks)))

    def extend(self) -> None:
        """Begin to count the function's time anew."""
        limit = self.spec.timeout_s if self.spec else None
        self.deadline = None if limit is None or not self.places else time.monotonic() + limit

    def hear(self) -> Iterator[tuple[int, Outcome]]:
        """What it has said since: places and outcomes.

        Raises:
            EOFError: it is dead.
            RewardError: it cannot load its functions.
        """
        try:
            while self.connection.poll():
                message = json.loads(self.connection.recv_bytes())
                if message[0] == REFUSED:
                    raise RewardError(message[1])
                if message[0] == READY:
                    self.loaded.add(message[1])
                    self.extend()
                else:
                    yield self._answer(message)
        except OSError as error:
            raise EOFError from error

    def _answer(self, message: list[Any]) -> tuple[int, Outcome]:
        place = self._sent[message[0]]
        self.places.remove(place)
        self.extend()
        self._mark(place)
        return place, Outcome(*message[1:])

    def _mark(self, place: int) -> None:
        """The call that has been answered in the timeline: it began when the one before was answered."""
        if TRACER.recording and self.spec is not None:
            name = self.spec.spec.rpartition(":")[2]
            past_span(name, "reward", self._heard_ns, f"reward process {self.pid}", row=place)
        self._heard_ns = time.monotonic_ns()

    def is_dead(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def end(self, grace_s: float = 0.0) -> str:
        """Kill it with everything that it has started.

        Args:
            grace_s: to wait for it, where it is ending by itself.

        Returns:
            How it ended.
        """
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()
        os.close(self.exit_handle)
        if status is None:
            return "was killed"
        return f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
