"""Fork server: worker processes of a CPU run start as copies of one process that has imported torch and Megatron.

Importing torch and Megatron-Core takes a process about three seconds of CPU time. On a laptop with two cores, a job
with five workers would spend most of its start on it. The server imports once, and forks in milliseconds. Ray, which
reads its environment at import, is imported by a fork of the server for all workers of a node.

Ray starts its Python programs by :mod:`~megarl.cluster.ray_programs`, which asks the server for a fork with the
arguments, environment and standard streams of a worker. The worker is then Ray's as usual: Ray talks to it by sockets
and knows its pid. A worker with a runtime environment, as under Nsight Systems, starts without the server.

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
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from megarl.base.child_process import die_with_parent, parent_death_hook
from megarl.base.errors import ConfigError
from megarl.base.files import private_folder
from megarl.base.json_text import parse_json
from megarl.base.packages import is_installed, without_garbage_collection
from megarl.base.processes import child_pids
from megarl.cluster import ray_programs

ENVIRONMENT = ray_programs.ADDRESS
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
    "megarl.agents.loop",
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
"""Imported before the first fork. Ray follows once the environment of a node's workers is known, which it reads."""
IF_INSTALLED = (
    *("pydantic.main", "pydantic.types", "pydantic.fields", "pydantic.deprecated.class_validators", "pydantic.v1"),
    *("starlette.datastructures", "wcwidth"),
)
"""Imported too, if they are there: Ray's serialization and its tables look for them in every worker."""
NODE_MODULES = (
    "megarl.cluster.worker_process",
    "megarl.cluster.agent_runner_worker",
    "ray._private.arrow_serialization",
)
"""Imported by the process that forks the workers of a node, with Ray."""

_RAYLET = "RAY_RAYLET_PID"
"""Environment variable of Ray's workers: the node process that starts them."""
_LOG_BYTES = 2000
_PAUSE_S = 0.5
_address: str | None = None
_SEND_S = 10.0
"""Seconds for a client to send its request; meanwhile others wait."""
_STREAMS, _LARGEST_REQUEST = 3, 1 << 24
logger = logging.getLogger(__name__)


class ForkServer:
    """A child process that forks workers, until it is closed or this process ends.

    Args:
        modules: imported by the server; a fork finds them loaded. Absent packages of :data:`IF_INSTALLED` are skipped.
    """

    def __init__(self, modules: Sequence[str] = (*WORKER_MODULES, *IF_INSTALLED)) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fork-", dir=private_folder()))
        self.address = str(self.folder / "socket")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.address)
        listener.listen(128)  # workers may ask while the server still imports
        with listener, (self.folder / "log").open("wb") as log:
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

    Raises:
        ConfigError: the variable names a socket that does not exist.
    """
    global _address
    setting = os.environ.get(ENVIRONMENT, "")
    off = setting == "0" or os.environ.get("RAY_ADDRESS")
    if not enabled or off or _address or sys.platform != "linux":
        yield
        return
    shared = Path(setting).is_absolute()
    if shared and not Path(setting).is_socket():
        raise ConfigError(
            f"{ENVIRONMENT}={setting}: no fork server listens there; unset it, or 0 = no fork server",
            code="worker.no-fork-server",
        )
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
    """Import the modules, then fork a process per request until standard input ends.

    Workers of Ray are forks of a second process, one per node and environment, which has imported Ray as well.
    """
    _end_during_imports(listener)
    with without_garbage_collection():
        for module in modules:
            if module not in IF_INSTALLED or is_installed(module):
                importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    server = _Server(listener, selector)
    while sys.stdin not in (ready := [key.fileobj for key, _ in selector.select()]):
        if run := server.serve(ready):
            run()
            return
    _delete_folder(listener)  # the driver ended without closing the server


def _checked(request: Any) -> dict[str, Any]:
    """Check the types of a request; ValueError if :func:`ray_programs.request_worker` has not sent it."""
    argv, env, cwd = (request.get(name) if isinstance(request, dict) else None for name in ("argv", "env", "cwd"))
    texts = [cwd, *argv, *env.values()] if isinstance(argv, list) and argv and isinstance(env, dict) else []
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"no request for a worker: {request!r:.200}")
    return {"argv": argv, "env": env, "cwd": cwd}


class _Server:
    """The state of the server: channels to the second processes, by environment."""

    def __init__(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        self.listener, self.selector, self.pid = listener, selector, os.getpid()
        self.nodes: dict[str, socket.socket] = {}

    def serve(self, ready: Sequence[Any]) -> Callable[[], None] | None:
        """Serve the ready sockets; in a fork, return what the fork runs."""
        for name, channel in list(self.nodes.items()):
            if channel in ready:  # its process has ended with the node
                self.selector.unregister(channel)
                self.nodes.pop(name).close()
        return self._accept() if self.listener in ready else None

    def _accept(self) -> Callable[[], None] | None:
        try:
            client = self.listener.accept()[0]
        except OSError:  # no descriptor is left
            traceback.print_exc()
            time.sleep(_PAUSE_S)
            return None
        with client:
            client.settimeout(_SEND_S)
            body, streams = _receive(client, _STREAMS)
            try:
                run = self._started(_checked(parse_json(body)), streams, client)
            except ValueError as error:
                print(f"ignored: {error}", file=sys.stderr)
                run = None
        if run is None:
            for stream in streams:
                os.close(stream)
        return run

    def _started(
        self, request: dict[str, Any], streams: Sequence[int], client: socket.socket
    ) -> Callable[[], None] | None:
        """Start a worker, or ask the second process of its node; returns what a fork runs.

        A client without an answer starts its worker by itself.
        """
        environment = request["env"]
        inherited: list[socket.socket | selectors.BaseSelector] = [self.selector, self.listener, *self.nodes.values()]
        if _RAYLET not in environment:
            forked = _is_fork([*inherited, client])
            if forked is False:
                _answer(client.fileno())
            return (lambda: _run_script(request, streams, self.pid)) if forked else None
        name = json.dumps(environment, sort_keys=True)
        if name not in self.nodes:
            own, channel = socket.socketpair()
            if _is_fork([*inherited, client, own]):
                for stream in streams:
                    os.close(stream)
                return lambda: _serve_node(channel, environment, self.pid)
            channel.close()  # without a second process, the server notices that it has no other end
            self.nodes[name] = own
            self.selector.register(own, selectors.EVENT_READ)
        with contextlib.suppress(OSError):  # the second process has just ended
            ray_programs.send_request(self.nodes[name], request, [*streams, client.fileno()])
        return None


def _serve_node(channel: socket.socket, environment: Mapping[str, str], server: int) -> None:
    """Import Ray in the environment of a node's workers, then fork them until the node ends.

    Ray reads hundreds of variables when it is imported, the node's among them.
    """
    die_with_parent(server)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    with without_garbage_collection():
        for module in filter(is_installed, NODE_MODULES):
            importlib.import_module(module)
    by_import = {name: value for name, value in os.environ.items() if environment.get(name) != value}
    try:
        raylet = os.pidfd_open(int(environment[_RAYLET]))
    except ProcessLookupError:
        return
    node, selector = os.getpid(), selectors.DefaultSelector()
    selector.register(channel, selectors.EVENT_READ)
    selector.register(raylet, selectors.EVENT_READ)
    while raylet not in [key.fileobj for key, _ in selector.select()]:
        body, descriptors = _receive(channel, _STREAMS + 1)
        if not body:  # the server has ended
            return
        request = json.loads(body)
        *streams, client = descriptors
        forked = _is_fork([selector, channel], [raylet, client])
        if forked:
            _run_script({**request, "env": {**request["env"], **by_import}}, streams, node)
            return
        if forked is False:
            _answer(client)
        for descriptor in descriptors:
            os.close(descriptor)
    while child_pids(node):  # they end by themselves when they miss their node
        time.sleep(_PAUSE_S)


def _is_fork(
    inherited: Sequence[socket.socket | selectors.BaseSelector], descriptors: Sequence[int] = ()
) -> bool | None:
    """Fork this process; return True in the fork, which closes sockets and descriptors of this process.

    None if no process can be started, because of a limit of processes or memory.
    """
    try:
        if os.fork():
            return False
    except OSError:
        traceback.print_exc()
        return None
    for resource in inherited:
        resource.close()
    for descriptor in descriptors:
        os.close(descriptor)
    return True


def _answer(connection: int) -> None:
    with contextlib.suppress(OSError):  # it may have been killed
        os.write(connection, b"1")


def _end_during_imports(listener: socket.socket) -> None:
    """Have the kernel end this process with SIGTERM when the driver dies, also before it looks at standard input."""

    def end(number: int, frame: FrameType | None) -> None:
        _delete_folder(listener)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    parent_death_hook(os.getppid(), signal.SIGTERM)()


def _delete_folder(listener: socket.socket) -> None:
    shutil.rmtree(Path(listener.getsockname()).parent, ignore_errors=True)


def _receive(connection: socket.socket, descriptors: int) -> tuple[bytes, list[int]]:
    """Read a request and its descriptors, first the three standard streams.

    The request is empty if the sender is gone or stands still, or if it sends something else.
    """
    body, size, received = bytearray(), 0, list[int]()
    with contextlib.suppress(OSError):
        header, received, _, _ = socket.recv_fds(connection, ray_programs.HEADER_BYTES, descriptors)
        size = int.from_bytes(header, "big")
        while len(body) < size <= _LARGEST_REQUEST and (part := connection.recv(size - len(body))):
            body += part
    return (bytes(body) if len(received) == descriptors and len(body) == size else b""), received


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
    added = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry not in sys.path]
    sys.path[:1] = [str(Path(sys.argv[0]).parent), *added]
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
