"""A process of the pool: loads reward functions, and calls them for the tasks that it is sent. Imports no torch.

Tasks come pickled from the driver. Answers go back as JSON, which the driver reads as data: whatever a function, or a
library that reads what the policy wrote, makes of this process, the driver only ever takes numbers and texts from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

from megarl.errors import RewardError
from megarl.logs import take_output
from megarl.rewards.calling import FunctionSpec, LoadedFunction
from megarl.rewards.outcome import Outcome
from megarl.tracing import TracingOptions, span, watch_process

_PR_SET_PDEATHSIG = 1
READY, REFUSED = "ready", "refused"


def main(handle: int, parent: int, log: tuple[str, str] | None = None) -> None:
    """Serve until the driver hangs up.

    Args:
        handle: file descriptor of the connection to the driver.
        parent: process id of the driver.
        log: file for all that this process prints, and level.
    """
    die_with(parent)
    os.set_inheritable(handle, False)
    if log is not None:
        take_output(Path(log[0]), log[1])
    watch_process(TracingOptions(watched=True))  # whoever looks for what hangs finds what it calls
    with contextlib.suppress(OSError):  # when memory runs out it shall be here, and not in the driver
        Path("/proc/self/oom_score_adj").write_text("1000")
    with Connection(handle) as connection, contextlib.suppress(EOFError, ConnectionError):
        server = Server(connection, connection.recv())
        try:
            while True:
                server.serve()
        except RewardError as error:
            connection.send_bytes(json.dumps([REFUSED, str(error)]).encode())


class Server:
    """Calls functions for the driver.

    Args:
        connection: to it.
        specs: of the functions, by number; each is loaded when it is first needed, or asked for by a message without
            tasks.
    """

    def __init__(self, connection: Connection, specs: list[FunctionSpec]) -> None:
        self.connection = connection
        self.specs = specs
        self.loaded: dict[int, LoadedFunction] = {}

    def serve(self) -> None:
        """One message with tasks, and an answer for each: its place among them, and the fields of its outcome.

        Raises:
            RewardError: the function cannot be loaded.
        """
        number, tasks = self.connection.recv()
        if number not in self.loaded:
            self.loaded[number] = self.specs[number].load()
            self.connection.send_bytes(json.dumps([READY, number]).encode())
        with span(self.specs[number].spec, "reward", tasks=len(tasks)):
            self.loaded[number].run(tasks, self._tell)

    def _tell(self, place: int, outcome: Outcome) -> None:
        self.connection.send_bytes(json.dumps([place, *outcome]).encode())


def die_with(parent: int) -> None:
    """Have this process killed when its parent ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
