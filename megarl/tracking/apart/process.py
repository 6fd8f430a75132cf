"""A tracker's process, seen from the driver."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from megarl.tracking.apart.child import DONE, MISCONFIGURED, UNREACHABLE, Answer

_CODE = "import sys; sys.path[:] = {path!r}; from megarl.tracking.apart.child import main; main({handle}, {timeout_s})"


class TrackerFailed(Exception):
    """A call that was not done.

    Attributes:
        misconfigured: whether it is the configuration that is wrong.
        may_pass: whether the same call may succeed later: the network is down, the process hung.
        lost: whether the process is of no more use.
    """

    def __init__(self, message: str, *, misconfigured: bool = False, may_pass: bool = False, lost: bool = False):
        super().__init__(message)
        self.misconfigured, self.may_pass, self.lost = misconfigured, may_pass, lost


class TrackerProcess:
    """Started when it is made.

    Args:
        log: file to which what it prints is appended; None = it is not kept.
        timeout_s: for the tracker to send what is outstanding, should this process be gone.
    """

    def __init__(self, log: Path | None, timeout_s: float) -> None:
        here, there = socket.socketpair()
        with here, there, contextlib.ExitStack() as stack:
            output: Any = subprocess.DEVNULL if log is None else stack.enter_context(log.open("ab"))
            code = _CODE.format(path=sys.path, handle=there.fileno(), timeout_s=timeout_s)
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[there.fileno()],
                start_new_session=True,  # a Ctrl-C in the terminal is the driver's to handle
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
            self._connection = Connection(here.detach())

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ask(self, name: str, *args: Any, timeout_s: float) -> str:
        """Have something done; see :class:`megarl.tracking.apart.child.Call`.

        Returns:
            The answer's text.

        Raises:
            TrackerFailed: it was not done, or not in time.
        """
        try:
            self._connection.send((name, args))
            if not self._connection.poll(max(0.0, timeout_s)):
                message = f"no answer to {name} within {timeout_s:.0f} s"
                raise TrackerFailed(message, may_pass=True, lost=True)
            answer = Answer(*self._connection.recv())
        except (OSError, EOFError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
            raise TrackerFailed(f"its process ended ({self._process.returncode}) in {name}", lost=True) from error
        if answer.status != DONE:
            raise TrackerFailed(
                answer.text,
                misconfigured=answer.status == MISCONFIGURED,
                may_pass=answer.status == UNREACHABLE,
            )
        return answer.text

    def end(self) -> None:
        """Kill it, with all that it has started, unless it has ended by itself."""
        family = []
        with contextlib.suppress(psutil.Error):
            family = psutil.Process(self.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._connection.close()
