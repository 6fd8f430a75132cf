"""Runs jobs of the command line as forks of one process that has imported their libraries.

Importing torch, transformers, Ray and the trainer costs a job 3.5 s of CPU time. A fork starts with them loaded, and
is otherwise like a process of its own: arguments, environment, working folder, standard streams, session and exit code.
All forks share the seed of Python's string hashes, so one run of a comparison must be a process of its own.

As a script, ``warm_drivers.py SOCKET MODULE ARGUMENT...`` runs a job on a server, for the commands of a shell, and ends
as the job does. A fork is killed when its client ends. :func:`write_interpreter` writes an interpreter that starts jobs
in this way.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

MODULES = (
    *("megarl.cli", "torch", "transformers", "transformers.models.auto.tokenization_auto", "ray", "ray.dag"),
    *(f"megarl.trainer.jobs.{name}" for name in ("train", "supervised_jobs", "evaluate")),
    *("megarl.ops.dry_run", "megarl.ops.report.command", "megarl.models.families", "megarl.megatron"),
    *("megarl.rollout.embedded", "megarl.agents.loop", "megarl.sharding.transports", "megarl.tracking.backends"),
    *("pandas", "pyarrow.json", "pyarrow.pandas_compat", "plotly.offline"),
    *("transformers.models.qwen2.configuration_qwen2", "ray._private.arrow_serialization"),
    *("pydantic.main", "pydantic.v1", "starlette.datastructures"),  # Ray's serialization looks for them
)
"""Imported before the first fork: what a job imports until its end."""
_HEADER_BYTES = 8
_INTERPRETER = "WARM_PYTHON"
"""Environment variable of a fork: its ``sys.executable``."""
_SCRIPT = r"""#!/usr/bin/env bash
# Python for the jobs that {module} starts: they, too, are forks of a server of tests/support/warm_drivers.py.
export {variable}="$0"
if [ "$1" = -u ]; then shift; fi
case "$1 ${{2:-}}" in
  "-m {module}"*) exec {python} -S {client} {address} "${{@:2}}" ;;
  "-m megarl"*) unset {variable}; exec {python} -S {client} {address} "${{@:2}}" ;;
  *.py\ *) unset {variable}; exec {python} -S {client} {address} "$@" ;;
esac
unset {variable}
exec {python} "$@"
"""


def write_interpreter(path: Path, address: str, module: str = "megarl.cli") -> Path:
    """Write a program like ``python`` whose jobs and scripts are forks of a server.

    Args:
        path: of the program.
        address: socket of the server.
        module: starts further jobs by ``sys.executable``; it and its submodules see the program as their interpreter.
    """
    values = {"module": module, "variable": _INTERPRETER, "address": address, "client": __file__}
    path.write_text(_SCRIPT.format(python=sys.executable, **values), encoding="utf-8")
    path.chmod(0o755)
    return path


class WarmDriver:
    """A job in a fork of a server; the methods are those of ``subprocess.Popen``.

    Args:
        address: socket of the server.
        module: run as by ``python -m``; or the path of a script.
        arguments: arguments of the command line.
        cwd: working folder.
        env: environment.
        streams: file descriptors of standard input, output and error.
    """

    def __init__(
        self, address: str, module: str, arguments: list[str], cwd: str, env: dict[str, str], streams: list[int]
    ) -> None:
        request = {"module": module, "arguments": arguments, "cwd": cwd, "env": env}
        body = json.dumps(request).encode()
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect(address)
        socket.send_fds(self._connection, [len(body).to_bytes(_HEADER_BYTES, "big")], streams)
        self._connection.sendall(body)
        self._answers = self._connection.makefile()
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code, or minus the number of the signal that ended it."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self._connection.recv(1, socket.MSG_PEEK)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(f"warm driver {self.pid}", timeout or 0.0) from None
            self._connection.settimeout(None)
            self.returncode = int(self._answers.readline())
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit code; None while the job runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the job has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the job, unless it has ended."""
        self.send_signal(signal.SIGKILL)


class Drivers:
    """Starts drivers as forks of a server.

    Args:
        address: socket of the server.
    """

    def __init__(self, address: str) -> None:
        self.address = address

    def start(self, command: Sequence[str], cwd: Path, env: dict[str, str], output: int) -> WarmDriver:
        """Run a module with arguments; standard output and error go to a file descriptor."""
        with Path(os.devnull).open(encoding="utf-8") as nothing:
            streams = [nothing.fileno(), output, output]
            return WarmDriver(self.address, command[0], list(command[1:]), str(cwd), env, streams)


class DriverServer(Drivers):
    """A child process that forks drivers until it is closed or this process ends."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-drivers-")
        super().__init__(os.path.join(self._folder.name, "socket"))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.address)
        listener.listen()
        with listener:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno())],
                stdin=subprocess.PIPE,  # its end tells the server that this process is gone
                pass_fds=[listener.fileno()],
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def close(self) -> None:
        """End the server; its forks continue."""
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()


def _serve(listener: socket.socket) -> dict[str, object]:
    """Fork a process per request; returns the request in the fork, and an empty one when standard input ends."""
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    running: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of the process
    while True:
        for key, _ in selector.select():
            if key.fileobj == 0:
                return {}
            if key.data is not None:  # the client is gone
                with contextlib.suppress(KeyError, ValueError, ProcessLookupError):  # the fork, too
                    selector.unregister(key.fileobj)
                    os.killpg(key.data, signal.SIGKILL)
                continue
            if key.fd in running:
                pid, connection = running.pop(key.fd)
                with contextlib.suppress(KeyError):
                    selector.unregister(connection)
                selector.unregister(key.fd)
                os.close(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(OSError), connection:  # the client may be gone
                    connection.sendall(f"{code}\n".encode())
                continue
            connection, _ = listener.accept()
            streams: list[int] = []
            try:
                header, streams, _, _ = socket.recv_fds(connection, _HEADER_BYTES, 3)
                with connection.makefile("rb") as file:
                    request: dict[str, object] = json.loads(file.read(int.from_bytes(header, "big")))
            except (OSError, ValueError):  # the client was killed in the middle
                connection.close()
                for stream in streams:
                    os.close(stream)
                continue
            pid = os.fork()
            if not pid:
                os.setsid()
                connection.sendall(f"{os.getpid()}\n".encode())  # from here on its group can be signalled
                inherited: Any
                for inherited in (selector, listener, connection, *(other for _, other in running.values())):
                    inherited.close()
                for descriptor in running:
                    os.close(descriptor)
                return {**request, "streams": streams}
            for stream in streams:
                os.close(stream)
            descriptor = os.pidfd_open(pid)
            running[descriptor] = pid, connection
            selector.register(descriptor, selectors.EVENT_READ)
            selector.register(connection, selectors.EVENT_READ, pid)  # its client sends nothing more, but may end


def _become(request: dict[str, object]) -> str:
    """Take over streams, environment, folder and arguments of a request; returns the module to run."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    streams, env, module = request["streams"], request["env"], request["module"]
    assert isinstance(streams, list) and isinstance(env, dict) and isinstance(module, str)
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.close(stream)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(str(request["cwd"]))
    arguments = request["arguments"]
    assert isinstance(arguments, list)
    is_script = module.endswith(".py")
    sys.executable = os.environ.pop(_INTERPRETER, sys.executable)
    sys.argv = [module, *arguments]
    sys.orig_argv = [sys.executable, *([] if is_script else ["-m"]), *sys.argv]
    if "RAY_ADDRESS" in os.environ:
        _read_cluster()
    first = os.path.dirname(os.path.abspath(module)) if is_script else os.getcwd()
    sys.path[:1] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return module


def _read_cluster() -> None:
    """Let Ray, which has read the environment of the server, read that of a job which joins a cluster."""
    from ray._private import ray_constants

    from megarl.cluster.ray_internals import read_authentication

    ray_constants.ENABLE_RAY_CLUSTER = ray_constants.env_bool(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, True)
    read_authentication()


def _main() -> None:
    import gc
    import importlib
    import runpy

    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # the checkout
    gc.disable()  # a collection would visit the objects of all modules again and again
    for name in MODULES:
        importlib.import_module(name)
    _compose_once()
    importlib.import_module("megarl.ops.report.page")._plotly()  # compressed, for the report at the end of a job
    gc.freeze()
    gc.enable()
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request:
        module = _become(request)
        import numpy

        numpy.random.seed()  # as in a new process; Python's generator does so by itself
        try:
            if module == "megarl.cli":  # loaded, so runpy would warn
                sys.exit(importlib.import_module(module).main())
            if module.endswith(".py"):
                _fork_children()
                runpy.run_path(module, run_name="__main__")
            else:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as stop:
            if not isinstance(stop.code, int | None):
                raise
            _exit(stop.code or 0)
        _exit(0)


def _fork_children() -> None:
    """Let a script's processes be forks, too, where it asks multiprocessing for new interpreters."""
    import multiprocessing.context

    contexts: dict[str, object] = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = contexts["fork"]


def _compose_once() -> None:
    """Fill the caches of schemas and of Hydra's plugins, which take a new process 0.3 s."""
    from megarl.config.build import defaults
    from megarl.config.compose import ConfigRequest, compose
    from megarl.ops.jobs.table import JOBS

    for job in JOBS.values():
        schema: Any = job.schema
        defaults(schema)
    compose(ConfigRequest(JOBS["train"].schema, "quickstart"))


def _exit(code: int) -> NoReturn:
    """End as the interpreter does, but without clearing modules: their memory would be copied for that."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _client(address: str, module: str, arguments: list[str]) -> int:
    driver = WarmDriver(address, module, arguments, os.getcwd(), dict(os.environ), [0, 1, 2])
    code = driver.wait()
    if code < 0:  # it was ended by a signal, and so is its client
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _main()
    else:
        sys.exit(_client(sys.argv[1], sys.argv[2], sys.argv[3:]))
