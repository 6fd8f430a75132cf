"""One process of the reward pool: the side of its owner, and the loop of the process. Imports no torch.

Tasks reach the process pickled. Outcomes come back as JSON, so the owner only ever receives numbers and strings: code
that a reward function or a library runs in the process cannot send objects to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megarl.base.child_process import ChildEnvironment, ChildProcess, describe_exit, die_with_parent, open_connection
from megarl.base.errors import RewardError
from megarl.base.logs import redirect_output
from megarl.rewards.calling import FunctionSpec, LoadedFunction
from megarl.rewards.outcome import Outcome
from megarl.tracing import TRACER, TracingOptions, past_span, span, watch_process

START_TIMEOUT_S = 300.0
"""Seconds for a process to load its functions; a user's file may have many imports."""
READY, REFUSED = "ready", "refused"
_OUT_OF_MEMORY_STATUS = 77
OUT_OF_MEMORY = "ran out of memory"
"""Exit status of a process whose function found no memory."""


class RewardProcess:
    """A process that calls reward functions, seen from its owner; starts with its construction.

    Args:
        preload: numbers of the functions to load at the start.
        log: file for the output of the process, and log level; None = output of this process.

    Attributes:
        loaded: numbers of the loaded functions.
        pending: indices of the unanswered tasks, in the order of sending.
        deadline: monotonic time by which the next message must arrive; None = no deadline.
        has_answered: a task was answered, so later ones may meet memory that it kept.
    """

    def __init__(
        self,
        functions: Sequence[FunctionSpec],
        preload: Sequence[int] = (),
        log: tuple[str, str] | None = None,
        environment: ChildEnvironment | None = None,
    ) -> None:
        self.log = log[0] if log else None
        self._process = ChildProcess("megarl.rewards.pool.process:main", os.getpid(), log, environment=environment)
        self.connection = self._process.connection
        self.exit_handle = os.pidfd_open(self._process.pid)
        self.loaded: set[int] = set()
        self.pending: list[int] = []
        self.spec: FunctionSpec | None = None
        self.deadline: float | None = None
        self.has_answered = False
        self._sent: list[int] = []
        self._last_message_ns = 0
        with contextlib.suppress(OSError):  # the process has died; receive() reports it
            self.connection.send(list(functions))
            for number in preload:
                self.connection.send((number, []))

    @property
    def is_idle(self) -> bool:
        """Whether all tasks are answered."""
        return not self.pending

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, indices: Sequence[int], function: int, spec: FunctionSpec, tasks: Sequence[bytes]) -> None:
        """Send serialized tasks for one function; ``indices`` identify them in the outcomes.

        A dead process is reported by :meth:`receive`.
        """
        self.pending, self._sent, self.spec = list(indices), list(indices), spec
        self._last_message_ns = time.monotonic_ns()
        self._restart_deadline()
        if function not in self.loaded:
            self.deadline = time.monotonic() + START_TIMEOUT_S
        with contextlib.suppress(OSError):
            self.connection.send((function, list(tasks)))

    def _restart_deadline(self) -> None:
        """Restart the time limit of the function, for the next task."""
        limit = self.spec.timeout_s if self.spec else None
        self.deadline = None if limit is None or not self.pending else time.monotonic() + limit

    def receive(self) -> Iterator[tuple[int, Outcome]]:
        """Yield the index and outcome of each task answered so far.

        Raises:
            EOFError: the process is dead.
            RewardError: the process cannot load its functions.
        """
        try:
            while self.connection.poll():
                message = json.loads(self.connection.recv_bytes())
                if message[0] == REFUSED:
                    raise RewardError(message[1], code=message[2])
                if message[0] == READY:
                    self.loaded.add(message[1])
                    self._restart_deadline()
                else:
                    yield self._outcome(message)
        except OSError as error:
            raise EOFError from error

    def _outcome(self, message: list[Any]) -> tuple[int, Outcome]:
        index = self._sent[message[0]]
        self.pending.remove(index)
        self.has_answered = True
        self._restart_deadline()
        if TRACER.recording and self.spec is not None:  # the call started with the previous message
            name = self.spec.spec.rpartition(":")[2]
            past_span(name, "reward", self._last_message_ns, f"reward process {self.pid}", row=index)
        self._last_message_ns = time.monotonic_ns()
        return index, Outcome(*message[1:])

    def is_dead(self) -> bool:
        """Return whether the process has ended."""
        return self._process.is_dead()

    def end(self, grace_s: float = 0.0) -> str:
        """Kill the process and its descendants.

        Args:
            grace_s: seconds to wait for a process that is ending by itself.

        Returns:
            The way it ended, such as ``was killed``, ``ended with status 1`` or ``ran out of memory``.
        """
        manner = self._process.kill(grace_s)
        if manner == describe_exit(_OUT_OF_MEMORY_STATUS):
            manner = OUT_OF_MEMORY
        os.close(self.exit_handle)
        return manner


def main(handle: int, parent: int, log: tuple[str, str] | None = None) -> None:
    """Serve the owner until it closes the connection; entry point of the process."""
    die_with_parent(parent)
    if log is not None:
        redirect_output(Path(log[0]), log[1])
    watch_process(TracingOptions(watched=True))  # stall reports show the call that hangs
    with contextlib.suppress(OSError):  # if memory runs out, the kernel kills this process before its owner
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
    with open_connection(handle) as connection, contextlib.suppress(EOFError, ConnectionError):
        server = FunctionServer(connection, connection.recv())
        try:
            while True:
                server.serve()
        except MemoryError:
            os._exit(_OUT_OF_MEMORY_STATUS)  # a new process replaces this one
        except RewardError as error:
            connection.send_bytes(json.dumps([REFUSED, error.text, error.code]).encode())


class FunctionServer:
    """Calls functions for the owner, inside a process of the pool.

    Args:
        specs: functions by number; each is loaded on first use, or by a message without tasks.
    """

    def __init__(self, connection: Connection, specs: list[FunctionSpec]) -> None:
        self.connection = connection
        self.specs = specs
        self.loaded: dict[int, LoadedFunction] = {}

    def serve(self) -> None:
        """Receive one message with tasks and send one message per outcome: the task's position and the fields.

        Raises:
            RewardError: the function cannot be loaded.
        """
        number, tasks = self.connection.recv()
        if number not in self.loaded:
            self.loaded[number] = self.specs[number].load()
            self.connection.send_bytes(json.dumps([READY, number]).encode())
        with span(self.specs[number].spec, "reward", tasks=len(tasks)):
            self.loaded[number].run([pickle.loads(task) for task in tasks], self._report)  # noqa: S301 - of this run

    def _report(self, position: int, outcome: Outcome) -> None:
        self.connection.send_bytes(json.dumps([position, *outcome]).encode())
