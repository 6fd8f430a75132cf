"""A local Ray with as few processes as a run needs, on loopback, protected by a token and watched."""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import node, parameter, ray_constants, services, utils
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled: its stub lacks the class

from megarl.base.child_process import environment_variables
from megarl.base.processes import has_ended, process_name
from megarl.base.signals import ENDING_SIGNALS, request_interrupt, withdraw_interrupt
from megarl.base.timeouts import RAY_SILENCE
from megarl.cluster import fork_client, node_agents
from megarl.cluster.fork_server import fork_address
from megarl.cluster.ray_command import parameters_with
from megarl.cluster.ray_token import ClusterToken, read_authentication

_LOOPBACK_SWITCH = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Environment variable: ``0`` stops ``ray.init`` from replacing 127.0.0.1 by an address that other machines reach.

The switch exists for machines whose firewall prompts the user. Ray's processes read it from the environment; this
process has already read it, as ``ENABLE_RAY_CLUSTER``.
"""
_NO_TASK_EVENTS = {"task_events_report_interval_ms": 0}
"""Ray's setting without records of each call, which only its dashboard shows.

They cost the GCS 4 KB per call, up to 100,000 calls, and every process a buffer of about 10 MB.
"""

_REGISTRATION_S, _POLL_S = 5.0, 0.02
"""Longest wait for the node's registration before Ray waits by itself, and the time between two looks."""
_DASHBOARD_AGENT = "--dashboard_agent_command"
_AGENT_PORTS = {_DASHBOARD_AGENT: "grpc-port", "--runtime_env_agent_command": "runtime-env-agent-port"}
"""Options of Ray's node process with the command lines of its agents, and the agents' options of their ports."""
GCS, RAYLET = "Ray's control process (GCS)", "Ray's node process (raylet)"
_NAMES = {"gcs_server": GCS, "raylet": RAYLET}
_TICK_S = 0.5


def start_local_ray(
    num_cpus: int,
    object_store_bytes: int,
    log_to_driver: bool,
    temp_dir: str | None,
    dashboard: bool = False,
    *,
    token: ClusterToken,
    group: int = 0,
) -> str:
    """Start Ray and connect this process to it; the arguments are those of ``ray.init``. Returns the dashboard's URL.

    Clients need the token, whatever the user's shell says about Ray's authentication. Ray's processes join the process
    group, which exists; 0 = each has a group of its own.

    Ray runs without autoscaler, without API server and agents unless it has a dashboard, and without log monitor unless
    the driver prints the output of workers: each takes about a second to start. With a fork server, workers are its
    forks.
    Signals to this process's group do not reach Ray's processes, which end with this process: a driver whose Ray is
    gone waits for it for a minute.
    """
    settings: dict[str, Any] = {"no_monitor": True, "include_log_monitor": log_to_driver}
    variables: dict[str, str | None] = {_LOOPBACK_SWITCH: "0", **token.environment()}
    address = fork_address()
    if address is not None:
        settings["setup_worker_path"] = fork_client.__file__
        variables[fork_client.ADDRESS] = address

    with contextlib.ExitStack() as stack:
        stack.enter_context(environment_variables(variables))
        read_authentication()
        stack.enter_context(_replaced(ray_constants, "ENABLE_RAY_CLUSTER", False))
        stack.enter_context(_replaced(parameter, "RayParams", parameters_with(settings)))
        if not dashboard:
            stack.enter_context(_replaced(node, "Node", _HeadNode))
        daemon = partial(_Daemon, dashboard=dashboard, process_group=group)
        stack.enter_context(_replaced(services, "ConsolePopen", daemon))
        stack.enter_context(_replaced(services, "get_node", partial(_registered_node, services.get_node)))
        context = ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=dashboard,
            object_store_memory=object_store_bytes,
            log_to_driver=log_to_driver,
            logging_level="ERROR",
            _temp_dir=temp_dir,
            _system_config=RAY_SILENCE if dashboard else RAY_SILENCE | _NO_TASK_EVENTS,
        )
        Path(context.address_info["session_dir"]).chmod(0o700)  # logs and sockets, which Ray opens to all users
        return f"http://{context.dashboard_url}" if dashboard else ""


def dashboard_error() -> str:
    """Describe the missing package of Ray's dashboard, without starting Ray; empty if all are installed."""
    error = utils.get_dashboard_dependency_error()
    return "" if error is None else str(error)


class _Daemon(services.ConsolePopen):
    """A process of Ray outside the driver's process group, which signals can end even if they are held here.

    Without a dashboard a node has light agents, see :mod:`~megarl.cluster.node_agents`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *args: Any,
        dashboard: bool = False,
        preexec_fn: Callable[[], None] | None = None,
        **kwargs: Any,
    ) -> None:
        def prepare() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, set(ENDING_SIGNALS))
            if preexec_fn is not None:
                preexec_fn()

        words = command if dashboard else [_with_light_agents(word) for word in command]
        super().__init__(words, *args, preexec_fn=prepare, **kwargs)


def _with_light_agents(word: str) -> str:
    """Replace Ray's agents in those arguments of a node's command that have their command lines.

    An older Ray, which gives its agents their ports and waits for no files, keeps its own.
    """
    option, separator, value = word.partition("=")
    words = shlex.split(value) if option in _AGENT_PORTS else []
    named = node_agents.options_of(words)
    if not {"session-dir", "node-id"} <= named.keys() or named.get(_AGENT_PORTS[option]) != "0":
        return word
    if option == _DASHBOARD_AGENT:
        words = [node_agents.DASHBOARD, named["session-dir"], named["node-id"]]
    else:
        program = next(place for place, item in enumerate(words) if item.endswith(".py"))
        words = [node_agents.RUNTIME_ENV, *words[program:]]
    # -I -S: without the user's and without installed packages, it starts at once.
    command = [sys.executable, "-I", "-S", node_agents.__file__, *words]
    return option + separator + subprocess.list2cmdline(command)  # quoted as Ray does


class _HeadNode(node.Node):
    """Head node without API server."""

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        self._webui_url = ""  # as of a Ray without dashboard


def _registered_node(get_node: Callable[[str, str], Any], gcs_address: str, node_id: str) -> Any:
    """Wait until a node is known to the GCS, then describe it; Ray itself looks once a second."""
    client, deadline = GcsClient(address=gcs_address), time.monotonic() + _REGISTRATION_S
    while not client.get_all_node_info(timeout=_REGISTRATION_S) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return get_node(gcs_address, node_id)


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: object) -> Iterator[None]:
    """Replace an attribute of one of Ray's modules in this block."""
    previous = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, previous)


class RayWatch:
    """A thread that interrupts the main thread soon after the GCS or the raylet has died.

    Ray itself notices a dead raylet by errors of all workers, and for a dead GCS aborts this process after a minute.

    Args:
        processes: of a local Ray.

    Attributes:
        finished: the work is complete.
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
