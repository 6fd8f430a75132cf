"""An agent on a node, as the launcher sees it."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Sequence

from megarl.errors import ResourceError
from megarl.launch.protocol import GONE, Event, Request, decode_event, encode_request

_TAIL_LINES = 20
_CUT_PATIENCE_S = 10.0


class RemoteAgent:
    """The process that leads to an agent (ssh, srun, or the agent itself), and the lines that go through it.

    Args:
        host: name of the node.
        argv: starts the agent there and connects its stdin and stdout.
        events: receives what happens on the node, and :data:`megarl.launch.protocol.GONE` when the connection ends.

    Raises:
        ResourceError: the command cannot be started here.
    """

    def __init__(self, host: str, argv: Sequence[str], events: queue.SimpleQueue[Event]) -> None:
        self.host = host
        self._events = events
        self._said: deque[str] = deque(maxlen=_TAIL_LINES)
        try:
            # In a session of its own: a Ctrl-C of the terminal is for the launcher to pass on, in order.
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise ResourceError(f"{host}: {argv[0]} cannot be started here: {error}") from error
        self._notes = threading.Thread(target=self._read_notes, daemon=True)
        self._notes.start()
        self._reader = threading.Thread(target=self._read_events, daemon=True)
        self._reader.start()

    def send(self, request: Request) -> None:
        """Ask for something; an agent that is gone says so by its event."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(encode_request(request))
            self._process.stdin.flush()

    def close(self, timeout_s: float) -> bool:
        """Wait for the connection to end, and end it if it does not.

        Returns:
            Whether it ended by itself, which it does once the agent has ended everything on the node.
        """
        with contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        in_time = True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            in_time = False
            self._cut()
        self._reader.join(_CUT_PATIENCE_S)
        return in_time

    def _cut(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_CUT_PATIENCE_S)
                return

    def _read_events(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = decode_event(line, self.host)
            if event is None:
                self._said.append(line.rstrip())
            else:
                self._events.put(event)
        code = self._process.wait()
        self._notes.join(1.0)
        self._events.put(Event(GONE, self.host, "", {"code": code, "why": "\n".join(filter(None, self._said))}))

    def _read_notes(self) -> None:
        """What ssh, srun, or Python as it starts has to say."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line.rstrip())
