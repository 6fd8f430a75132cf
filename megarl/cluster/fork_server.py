"""Fork server: worker processes of a CPU run start as copies of one process that has imported torch and Megatron.

Importing torch and Megatron-Core takes a process about three seconds of CPU time. On a laptop with two cores, a job
with five workers would spend most of its start on it. The server imports once, and forks in milliseconds.

Ray starts a worker by a script that sets up its environment. A local Ray gets :mod:`~megarl.cluster.fork_client` as
that script; it asks the server for a fork with its arguments, environment and standard streams. The worker is then
Ray's as usual: Ray talks to it by sockets and knows its pid. A worker with environment variables of its own starts
without the server, since some of them are read by imports.

Only for CPU processes on this machine: a fork must not inherit CUDA's state, and other nodes import for themselves.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from megarl.base.child_process import die_with_parent, parent_death_hook
from megarl.base.errors import ConfigError
from megarl.base.packages import is_installed, without_garbage_collection
from megarl.cluster import fork_client

ENVIRONMENT = fork_client.ADDRESS
"""Environment variable: ``0`` turns the fork server off, and workers import for themselves; a path is the socket of a
server that several jobs share."""
WORKER_MODULES = (
    "megarl.workers.actor",
    "megarl.workers.critic",
    "megarl.workers.rollout",
    "megarl.rollout.embedded",
    "megarl.agents.runner",
    "transformers.models.auto.tokenization_auto",
    "torch._dynamo",  # the first optimizer of a process imports it
    "megarl.models.families",
    "megarl.agents.single_turn",
    "megarl.tracing.stall",
    "megarl.tracing.trace_file",
    "requests",  # this and the following: Ray imports them
    "jsonschema",
    "google.protobuf.struct_pb2",
    "google.protobuf.timestamp_pb2",
    "google.protobuf.json_format",
    "msgpack",
    "pyarrow.json",
    "pdb",
    "logging.handlers",
    "tracemalloc",
)
"""Imported before the first fork. Ray is not: it reads each worker's environment when it is imported."""
IF_INSTALLED = ("pydantic.main", "pydantic.v1", "starlette.datastructures", "wcwidth")
"""Imported too, if they are there: Ray's serialization and its tables look for them in every worker."""

_LOG_BYTES = 2000
_address: str | None = None
logger = logging.getLogger(__name__)


class ForkServer:
    """A child process that forks workers, until it is closed or this process ends.

    Args:
        modules: imported by the server; a fork finds them loaded. Absent packages of :data:`IF_INSTALLED` are skipped.
    """

    def __init__(self, modules: Sequence[str] = (*WORKER_MODULES, *IF_INSTALLED)) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="megarl-fork-"))  # mode 0700: the socket is for this user only
        self.address = str(self.folder / "socket")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.address)
        listener.listen(128)  # workers may ask while the server still imports
        with listener, open(self.folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", __name__, str(listener.fileno()), *modules],
                stdin=subprocess.PIPE,  # its end tells the server that this process is gone
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C in a terminal is for the driver
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def close(self) -> None:
        """End the server and its forks, and delete its socket."""
        assert self._process.stdin is not None
        if self._process.poll() is not None:
            log = (self.folder / "log").read_bytes()[-_LOG_BYTES:].decode(errors="replace")
            logger.warning("the fork server ended early, so workers were started one by one: %s", log)
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def fork_server(enabled: bool = True) -> Iterator[None]:
    """Fork the CPU workers that are started in this block, if Ray is started locally too (see :data:`ENVIRONMENT`).

    Args:
        enabled: False: the block does nothing.

    Raises:
        ConfigError: the variable names a socket that does not exist.
    """
    global _address
    setting = os.environ.get(ENVIRONMENT, "")
    off = setting == "0" or os.environ.get("RAY_ADDRESS")
    if not enabled or off or _address or sys.platform != "linux":
        yield
        return
    shared = os.path.isabs(setting)
    if shared and not Path(setting).is_socket():
        raise ConfigError(f"{ENVIRONMENT}={setting}: no fork server listens there; unset it, or 0 = no fork server")
    server = None if shared else ForkServer()
    _address = setting if server is None else server.address
    try:
        yield
    finally:
        _address = None
        if server is not None:
            server.close()


def fork_address() -> str | None:
    """Return the socket of the open fork server; None without a server."""
    return _address


def serve(listener: socket.socket, modules: Sequence[str]) -> None:
    """Import the modules, then fork a process per request until standard input ends."""
    _end_during_imports(listener)
    with without_garbage_collection():
        for module in modules:
            if module not in IF_INSTALLED or is_installed(module):
                importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    server = os.getpid()
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    while True:
        ready = [key.fileobj for key, _ in selector.select()]
        if sys.stdin in ready:  # the driver ended without closing the server
            _delete_folder(listener)
            return
        connection, _ = listener.accept()
        request, streams = _receive(connection)
        if request and not os.fork():
            for inherited in (selector, listener, connection):
                inherited.close()
            _run_script(request, streams, server)
            return
        if request:
            with contextlib.suppress(OSError):  # the client may have been killed
                connection.sendall(b"1")
        connection.close()
        for stream in streams:
            os.close(stream)


def _end_during_imports(listener: socket.socket) -> None:
    """Have the kernel end this process with SIGTERM when the driver dies, also before it looks at standard input."""

    def end(number: int, frame: FrameType | None) -> None:
        _delete_folder(listener)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    parent_death_hook(os.getppid(), signal.SIGTERM)()


def _delete_folder(listener: socket.socket) -> None:
    shutil.rmtree(Path(listener.getsockname()).parent, ignore_errors=True)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Read a client's request and its three standard streams; an empty request if the client is gone."""
    header, streams, _, _ = socket.recv_fds(connection, fork_client.HEADER_BYTES, 3)
    with connection.makefile("rb") as file:
        size = int.from_bytes(header, "big")
        body = file.read(size)
    return (json.loads(body) if len(streams) == 3 and len(body) == size else {}), streams


def _run_script(request: dict[str, Any], streams: Sequence[int], server: int) -> None:
    """Become the client: its streams, environment, folder and arguments; then run the script."""
    # Ray's own workers are children of Ray and end with it. A fork that Ray no longer waits for, since the run was
    # interrupted, would try to connect for a minute.
    die_with_parent(server)
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = request["argv"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def main(argv: Sequence[str]) -> int:
    """Serve on the listening socket with the given file descriptor."""
    try:
        serve(socket.socket(fileno=int(argv[0])), argv[1:])
    except SystemExit as error:
        return int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a fork must not run the exit handlers of the server
