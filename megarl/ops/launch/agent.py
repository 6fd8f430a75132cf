"""``python -m megarl.ops.launch.agent``: starts and ends the commands of one node, controlled over stdin and stdout."""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import io
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

import psutil

from megarl.base.child_process import parent_death_hook
from megarl.base.processes import READ_ERRORS, descendants, has_ended, process_name, wait_for_ends
from megarl.ops.launch.protocol import (
    AGENT_STARTED,
    COMMAND_ENDED,
    LISTENING,
    LOGS_KEPT,
    OUTPUT,
    PORTS_TAKEN,
    RAY,
    REQUEST_FAILED,
    STEP_CANCELLED,
    AgentRequest,
    SendSignal,
    SetToken,
    Shutdown,
    StartCommand,
    decode_request,
    encode_event,
)

HEARTBEAT_TIMEOUT_S = 90.0
"""Seconds without a request after which an agent assumes that the launcher is dead; heartbeats come every 20 s.

A node that was cut off must have ended its Ray before a restart uses it again.
"""
ORPHAN_GRACE_S = 5.0  # time for commands to end by themselves once the agent shuts down
RAY_FOLDER = "{folder}"  # placeholder in commands and environments for the agent's temporary folder
TOKEN_FILE = "token"
OTHER_CLUSTER_VARIABLES = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Variables of the user's shell that point to another cluster; commands do not inherit them."""
_POLL_S = 0.1
_PIPE_S = 3.0  # seconds for the last output of a command that has ended; a descendant may hold its pipe for longer
_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_KILL_ROUNDS = 5
IGNORE_SIGNALS = "--ignore-signals"
"""Option of an agent whose launcher receives the same signals; the agent ends with its connection."""


class Agent:
    """Starts commands on this node and ends them.

    Args:
        events: stream for events.
        folder: new, private folder for the token and Ray's files; removed at the end.
    """

    def __init__(self, events: IO[str], folder: Path) -> None:
        self.folder = folder
        self._events = events
        self._lock = threading.Lock()
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def send_event(self, kind: str, name: str = "", **facts: Any) -> None:
        """Send an event to the launcher; a broken connection is ignored here, and detected on the input."""
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):
            self._events.write(encode_event(kind, name, **facts))
            self._events.flush()

    def announce(self) -> None:
        """Send the first event, with the addresses of this node."""
        self.send_event(AGENT_STARTED, addresses=interface_addresses(), address=default_address())

    def handle(self, request: AgentRequest) -> None:
        """Handle a request, except for :class:`Shutdown`.

        Raises:
            ValueError, OSError, OverflowError: it cannot be fulfilled.
        """
        if isinstance(request, SetToken):
            file = self.folder / TOKEN_FILE
            file.touch(0o600)
            file.write_text(request.token, encoding="utf-8")
        elif isinstance(request, SendSignal):
            self._signal(request.name, request.number)
        elif isinstance(request, StartCommand):
            self._start(request)

    def end(self, grace_s: float, keep_logs: str = "") -> None:
        """End all commands and their descendants, keep Ray's logs if requested, and remove the folder."""
        for name in self._running:
            self._signal(name, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        for process in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        survivors = end_descendants(grace_s)
        if survivors:
            self.send_event(REQUEST_FAILED, reason=f"these processes cannot be ended: {', '.join(survivors)}")
        if keep_logs:
            self._keep_logs(Path(keep_logs))
        shutil.rmtree(self.folder, ignore_errors=True)

    def _signal(self, name: str, number: int) -> None:
        process = self._running.get(name)
        if process is not None and process.poll() is None:
            process.send_signal(number)

    def _start(self, request: StartCommand) -> None:
        used = [port for port in request.ports if not port_is_free(request.address, port)]
        if used:
            ports = ", ".join(map(str, used))
            reason = f"port {ports} of {request.address} is taken by another process; choose others with --port"
            self.send_event(PORTS_TAKEN, request.name, reason=reason)
            return
        if not request.argv:
            raise ValueError(f"command {request.name!r} is empty")
        argv = [self._insert_folder(word) for word in request.argv]
        inherited = {name: value for name, value in os.environ.items() if name not in OTHER_CLUSTER_VARIABLES}
        env = inherited | {name: self._insert_folder(value) for name, value in request.env.items()}
        # `python` in a command is this interpreter, also where ssh gives no PATH of a login.
        env["PATH"] = os.pathsep.join(filter(None, [str(Path(sys.executable).parent), env.get("PATH", "")]))
        try:
            process = start_process(argv, env)
        except (OSError, ValueError) as error:  # a ValueError: a null byte
            self.send_event(REQUEST_FAILED, request.name, reason=f"{argv[0]} cannot be started: {error}")
            return
        self._running[request.name] = process
        pumps = [self._pump(request.name, "stdout", process.stdout), self._pump(request.name, "stderr", process.stderr)]
        threading.Thread(target=self._watch, args=(request, process, pumps), daemon=True).start()

    def _insert_folder(self, text: str) -> str:
        return text.replace(RAY_FOLDER, str(self.folder))

    def _pump(self, name: str, stream: str, source: IO[bytes] | None) -> threading.Thread:
        """Forward the output of a command as events, in a thread."""

        def pump() -> None:
            assert source is not None
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            while chunk := os.read(source.fileno(), 65536):
                if text := decoder.decode(chunk):
                    self.send_event(OUTPUT, name, stream=stream, text=text)

        thread = threading.Thread(target=pump, daemon=True)
        thread.start()
        return thread

    def _watch(self, request: StartCommand, process: subprocess.Popen[bytes], pumps: list[threading.Thread]) -> None:
        """Send events when a command listens on its port, and when it has ended and its output is sent."""
        while request.listen_port is not None and process.poll() is None:
            if accepts_connections(request.address, request.listen_port):
                self.send_event(LISTENING, request.name)
                break
            time.sleep(_POLL_S)
        code = process.wait()
        for pump in pumps:
            pump.join(_PIPE_S)
        self.send_event(COMMAND_ENDED, request.name, code=code)

    def _keep_logs(self, folder: Path) -> None:
        for logs in self.folder.glob(f"{RAY}/session_2*/logs"):
            try:
                shutil.copytree(logs, folder, dirs_exist_ok=True, ignore_dangling_symlinks=True)
            except (OSError, shutil.Error) as error:
                self.send_event(REQUEST_FAILED, reason=f"Ray's logs cannot be kept in {folder}: {error}")
                return
            self.send_event(LOGS_KEPT, folder=str(folder.resolve()))


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants (Linux subreaper).

    :func:`end_descendants` then finds daemons that left their session, and no processes of other programs.
    """
    if sys.platform == "linux":
        prctl: Callable[[int, int], int] = ctypes.CDLL(None, use_errno=True).prctl
        prctl(_PR_SET_CHILD_SUBREAPER, 1)


def start_process(argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a command in a new session, with pipes for its output.

    The kernel sends it SIGTERM when this process dies (Linux); a Ctrl-C in the terminal does not reach it. Call this
    from the main thread, since the kernel watches the thread.

    Raises:
        OSError: the command cannot be started.
    """
    return subprocess.Popen(
        argv,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=parent_death_hook(os.getpid(), signal.SIGTERM),
    )


def end_descendants(grace_s: float) -> list[str]:
    """End every descendant: SIGTERM, then SIGKILL after ``grace_s``; returns survivors as ``pid name``."""
    alive = _live_descendants()
    _send_signal(alive, signal.SIGTERM)
    wait_for_ends(alive, grace_s)
    for _ in range(_KILL_ROUNDS):  # a process may start others while it ends
        alive = _live_descendants()
        if not alive:
            return []
        _send_signal(alive, signal.SIGKILL)
        wait_for_ends(alive, grace_s)
    return [f"{process.pid} {process_name(process)}" for process in _live_descendants()]


def _live_descendants() -> list[psutil.Process]:
    return [process for process in descendants() if not has_ended(process)]


def _send_signal(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(*READ_ERRORS):
            process.send_signal(number)


def port_is_free(address: str, port: int) -> bool:
    """Return whether a server could bind the port."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def accepts_connections(address: str, port: int) -> bool:
    """Return whether a server accepts connections; tested by a connection, since a test bind could block the server."""
    try:
        socket.create_connection((address, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def interface_addresses() -> dict[str, str]:
    """Return the IPv4 address of each network interface that has one."""
    interfaces = psutil.net_if_addrs().items()
    found = {name: [entry.address for entry in all if entry.family == socket.AF_INET] for name, all in interfaces}
    return {name: addresses[0] for name, addresses in found.items() if addresses}


def default_address() -> str:
    """Return the address at which other machines reach this one: of its host name, or of the default route."""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        if not address.startswith("127."):
            return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # of a range reserved for documentation; no packet is sent
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


class _Terminated(Exception):
    """SIGTERM, SIGHUP or SIGINT."""


def main() -> int:
    """Serve one launcher until it shuts the agent down or disappears."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    def ignore(number: int, frame: FrameType | None) -> None:
        """Unlike SIG_IGN, a handler is not inherited by commands."""

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, ignore if IGNORE_SIGNALS in sys.argv else terminate)
    adopt_orphans()
    agent = Agent(sys.stdout, Path(tempfile.mkdtemp(prefix="megarl-", dir="/tmp")))  # sockets need short paths
    shutdown = None
    try:
        agent.announce()
        shutdown = _serve(agent, _read_stdin())
    except _Terminated:
        if "SLURM_STEP_ID" in os.environ:  # SLURM signals all processes of a step, Ray's too: nothing can be saved
            agent.send_event(STEP_CANCELLED, job=os.environ.get("SLURM_JOB_ID", ""))
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        agent.end(ORPHAN_GRACE_S, shutdown.keep_logs if shutdown else "")
    return 0


def _read_stdin() -> queue.SimpleQueue[str]:
    """Read the lines of stdin in a thread; an empty line marks the end."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    assert isinstance(sys.stdin, io.TextIOWrapper)
    sys.stdin.reconfigure(encoding="utf-8", errors="replace")  # other bytes are no request, and end nothing

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    return lines


def _serve(agent: Agent, lines: queue.SimpleQueue[str]) -> Shutdown | None:
    """Handle requests until a shutdown request; None if the launcher disappears."""
    while True:
        try:
            line = lines.get(timeout=HEARTBEAT_TIMEOUT_S)
        except queue.Empty:
            return None
        if not line:
            return None
        try:
            request = decode_request(line)
            if isinstance(request, Shutdown):
                return request
            agent.handle(request)
        except (ValueError, OSError, OverflowError) as error:  # such as a port or a signal that does not exist
            agent.send_event(REQUEST_FAILED, reason=str(error))


if __name__ == "__main__":
    sys.exit(main())
