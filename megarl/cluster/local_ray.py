"""A local Ray with as few processes as a run needs, on loopback, protected by a token and watched.

As a program (``python -m megarl.cluster.local_ray start ...``) it is Ray's command line for a node of a launched
cluster, without imports and processes that no job uses. Ray Serve and Ray Jobs, whose imports take each node's start
1.2 seconds of CPU time, are hidden, and so is grpc's package: without it Ray starts no client server, which nobody
connects to. Ray goes on without packages that cannot be imported. Workers of a node on CPUs are forks, if its
environment names a fork server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import runpy
import shlex
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import ray

from megarl.base.child_process import environment_variables
from megarl.base.files import private_folder
from megarl.base.processes import has_ended, process_name
from megarl.base.signals import ENDING_SIGNALS, request_interrupt, withdraw_interrupt
from megarl.base.timeouts import RAY_SILENCE
from megarl.cluster import ray_programs
from megarl.cluster.fork_server import fork_address
from megarl.cluster.ray_internals import loopback_only, read_authentication
from megarl.cluster.reaper import ClusterToken

LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable: with ``0``, Ray's processes do not replace 127.0.0.1 by an address for other machines."""
_NO_TASK_EVENTS = {"task_events_report_interval_ms": 0}
"""Ray's setting without records of each call, which only its dashboard shows.

They cost the GCS 4 KB per call, up to 100,000 calls, and every process a buffer of about 10 MB.
"""

GCS, RAYLET = "Ray's control process (GCS)", "Ray's node process (raylet)"
_NAMES = {"gcs_server": GCS, "raylet": RAYLET}
_TICK_S = 0.5
_daemons_of: tuple[int, int] | None = None  # thread that starts Ray, and the process group of Ray's processes
HIDDEN = ("ray.serve", "ray.dashboard.modules.job.cli", "grpc")
"""Packages that ``ray start`` imports and does not use."""


def start_local_ray(
    num_cpus: int,
    object_store_bytes: int,
    temp_dir: str,
    dashboard: bool = False,
    *,
    token: ClusterToken,
    group: int = 0,
) -> str:
    """Start Ray and connect this process to it; the arguments are those of ``ray.init``. Returns the dashboard's URL.

    Clients need the token, whatever the user's shell says about Ray's authentication. Ray's processes join the process
    group, which exists; 0 = each has a group of its own.

    Ray runs without autoscaler and log monitor, and without API server and agents unless it has a dashboard: each takes
    about a second to start. With a fork server, workers are its forks.
    Signals to this process's group do not reach Ray's processes, which end with this process: a driver whose Ray is
    gone waits for it for a minute.
    """
    has_token = read_authentication()  # in this version of Ray
    variables = {LOOPBACK_SWITCH: "0", **token.environment(protects=has_token)}
    if (address := fork_address()) is not None:
        variables[ray_programs.ADDRESS] = address
    without = ["autoscaler", "log-monitor", *([] if dashboard else ["dashboard"])]

    with contextlib.ExitStack() as stack:
        stack.enter_context(environment_variables(variables))
        read_authentication()
        stack.enter_context(loopback_only())
        stack.enter_context(_daemon_group(group))
        stack.enter_context(light_programs(token.file.parent, without))
        context = ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=dashboard,
            object_store_memory=object_store_bytes,
            log_to_driver=False,
            logging_level="ERROR" if dashboard else "CRITICAL",  # it reports the missing API server as an error
            _temp_dir=temp_dir,
            _system_config=RAY_SILENCE if dashboard else RAY_SILENCE | _NO_TASK_EVENTS,
        )
        logging.getLogger("ray").setLevel("ERROR")
        Path(context.address_info["session_dir"]).chmod(0o700)  # logs and sockets, which Ray opens to all users
        return f"http://{context.dashboard_url}" if dashboard else ""


@contextlib.contextmanager
def light_programs(folder: Path, without: Sequence[str] = ()) -> Iterator[None]:
    """Have a Ray that starts in this block start its Python programs by :mod:`~megarl.cluster.ray_programs`.

    Where files of the folder cannot be executed, it starts them by itself.

    Args:
        folder: for a script, which is there as long as Ray runs.
        without: names of :data:`.ray_programs.SERVICES` that Ray does without.
    """
    script, python = folder / "python", sys.executable
    # -I -S: without the user's and without installed packages, it starts at once.
    command = [python, "-I", "-S", ray_programs.__file__, ",".join(without)]
    script.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
    script.chmod(0o700)
    if os.access(script, os.X_OK):  # not if the file system is mounted with noexec
        sys.executable = str(script)
    try:
        yield
    finally:
        sys.executable = python


@contextlib.contextmanager
def _daemon_group(group: int) -> Iterator[None]:
    """Have Ray's processes that this thread starts in this block join a process group, see :func:`_join_group`."""
    global _daemons_of
    _daemons_of = threading.get_ident(), group
    try:
        yield
    finally:
        _daemons_of = None


def _join_group() -> None:
    """Leave the driver's process group in a process of Ray, and take signals that the driver holds."""
    if _daemons_of is not None and _daemons_of[0] == threading.get_ident():
        os.setpgid(0, _daemons_of[1])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, set(ENDING_SIGNALS))


os.register_at_fork(after_in_child=_join_group)  # also runs in a child before the ``preexec_fn`` that Ray gives it


class RayWatch:
    """A thread that interrupts the main thread soon after the GCS or the raylet has died.

    Ray itself notices a dead raylet by errors of all workers, and for a dead GCS aborts this process after a minute.
    """

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self.finished = False
        self._watched = [(name, process) for process in processes if (name := _NAMES.get(process_name(process)))]
        self._closed = threading.Event()
        self._lock = threading.Lock()  # no interrupt is requested once the watch is finished or closed
        if self._watched and threading.current_thread() is threading.main_thread():
            threading.Thread(target=self._watch, name="ray watch", daemon=True).start()

    def lost(self) -> str | None:
        """Return :data:`GCS` or :data:`RAYLET` if that process has died, else None."""
        for name, process in self._watched:
            if has_ended(process):
                return name
        return None

    def finish(self) -> None:
        """Mark the work as complete: a death interrupts nothing any more."""
        with self._lock:
            self.finished = True
        withdraw_interrupt()

    def close(self) -> None:
        """End the watch, before Ray is shut down."""
        with self._lock:
            self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(_TICK_S):
            if self.lost() is not None:
                with self._lock:
                    if not self.finished and not self._closed.is_set():
                        request_interrupt()
                return


def main() -> None:
    """Run Ray's command line with the arguments of this process."""
    for name in HIDDEN:
        sys.modules[name] = None  # type: ignore[assignment]  # an import then raises ModuleNotFoundError
    server = Path(os.environ.get(ray_programs.ADDRESS, ""))
    is_on_cpu = any(argument.startswith("--num-cpus=") for argument in sys.argv)  # see ``ray_start`` of the launcher
    with contextlib.ExitStack() as stack:
        if is_on_cpu and server.is_absolute():  # a fork must not inherit the state of CUDA
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-python-", dir=private_folder()))
            stack.enter_context(light_programs(Path(folder)))
        runpy.run_module("ray.scripts.scripts", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
