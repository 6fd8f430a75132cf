"""Supervision of child processes: start with a pipe, request with a deadline, kill of the process tree, parent death.

::

    child = ChildProcess("megarl.tracking.subprocess_tracker:main", timeout_s)   # in the parent
    reply = child.request(("log", metrics, step), timeout_s=60)
    child.kill()

    def main(handle: int, timeout_s: float) -> None:                            # in the child
        connection = open_connection(handle)

Two kinds of processes do without :class:`ChildProcess`. The reward sandbox limits the bytes that a program writes and
isolates it by namespaces. The launcher's agents run behind ssh and srun and exchange lines of JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import psutil

from megarl.base.processes import READ_ERRORS, descendants, wait_for_ends

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_CODE = "import sys; sys.path[:] = {path!r}; from {module} import {function} as main; main({handle}, *{arguments!r})"
_EXIT_S = 5.0


@dataclass(frozen=True)
class ChildEnvironment:
    """Working folder, environment variables and import path of a child process."""

    folder: str
    variables: Mapping[str, str]
    path: Sequence[str]

    @classmethod
    def here(cls) -> ChildEnvironment:
        """Return the environment of this process."""
        return cls(str(Path.cwd()), dict(os.environ), list(sys.path))


class ChildProcess:
    """A Python process in a new session, with a socket pair to this process.

    A Ctrl-C in the terminal does not reach it: the parent handles the signal.

    Args:
        target: ``package.module:function``, called in the child with the descriptor of its end of the socket pair.
        *arguments: further arguments of the function: numbers, strings, None, tuples.
        output: file for standard output and error; None = the streams of this process.
        environment: working folder (if this node has it), environment variables and import path; None = as this
            process.

    Attributes:
        connection: this process's end of the socket pair.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self,
        target: str,
        *arguments: object,
        output: IO[bytes] | int | None = None,
        environment: ChildEnvironment | None = None,
    ) -> None:
        module, _, function = target.partition(":")
        parent_end, child_end = socket.socketpair()
        with parent_end, child_end:
            handle = child_end.fileno()
            code = _CODE.format(
                path=environment.path if environment else sys.path,
                module=module,
                function=function,
                handle=handle,
                arguments=tuple(arguments),
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                pass_fds=[handle],
                start_new_session=True,
                cwd=environment.folder if environment and Path(environment.folder).is_dir() else None,
                env={"OMP_NUM_THREADS": "1", **(environment.variables if environment else os.environ)},
            )
            self.connection = Connection(parent_end.detach())

    @property
    def pid(self) -> int:
        """Process ID."""
        return self._process.pid

    def is_dead(self) -> bool:
        """Return whether the process has ended."""
        return self._process.poll() is not None

    def request(self, message: Any, timeout_s: float) -> Any:
        """Send a message and return the reply.

        Raises:
            TimeoutError: no reply within ``timeout_s`` seconds.
            EOFError: the process ended; the message has its exit status.
        """
        try:
            self.connection.send(message)
            if not self.connection.poll(max(0.0, timeout_s)):
                raise TimeoutError(f"no reply within {timeout_s:.0f} s")
            return self.connection.recv()
        except TimeoutError:
            raise
        except (OSError, EOFError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_S)
            raise EOFError(f"its process ended ({self._process.returncode})") from error

    def kill(self, grace_s: float = 0.0) -> str:
        """Kill the process and its descendants, and close the connection.

        Args:
            grace_s: seconds to wait for the process to end by itself.

        Returns:
            The way it ended, such as ``was killed`` or ``ended with status 1``.
        """
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(grace_s)
        kill_process_tree(self._process)
        with contextlib.suppress(OSError):
            self.connection.close()
        return "was killed" if status is None else describe_exit(status)


def open_connection(handle: int) -> Connection:
    """Open the child's end of the socket pair; processes that the child starts do not inherit it."""
    os.set_inheritable(handle, False)
    return Connection(handle)


def kill_process_tree(process: subprocess.Popen[Any], wait_s: float = 0.0) -> None:
    """Kill a child process, its process group and all descendants; reap the child.

    Args:
        wait_s: seconds to wait for the child and for its descendants to end; 0 = wait for the child only, without a
            limit.

    Raises:
        subprocess.TimeoutExpired: the child does not end.
    """
    others: list[psutil.Process] = []
    if process.poll() is None:
        with contextlib.suppress(*READ_ERRORS):
            others = descendants(psutil.Process(process.pid))
    with contextlib.suppress(ProcessLookupError, PermissionError):  # only a child in a new session leads a group
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    for descendant in others:
        with contextlib.suppress(*READ_ERRORS):
            descendant.kill()
    if wait_s:
        wait_for_ends(others, wait_s)
    process.wait(wait_s or None)


def describe_exit(status: int) -> str:
    """Describe the exit status of a process: ``died of SIGKILL`` or ``ended with status 1``."""
    return f"died of {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def parent_death_hook(parent: int, number: int = signal.SIGKILL) -> Callable[[], None]:
    """Prepare a call that has the kernel signal this process when its parent dies (Linux).

    It does nothing but system calls, so it is safe as ``preexec_fn`` of :class:`subprocess.Popen`.

    Args:
        parent: process ID of the parent; the call ends a process whose parent has died already.
    """
    prctl: Callable[..., int] | None = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def hook() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return hook


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies (Linux)."""
    parent_death_hook(parent)()


@contextlib.contextmanager
def environment_variables(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables in this block, for this process and those started in it; None removes a variable."""
    previous = {name: os.environ.get(name) for name in variables}
    _apply(variables)
    try:
        yield
    finally:
        _apply(previous)


def _apply(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
