"""``python -m megarl.launch.agent``: what the launcher starts on each node, and speaks to over stdin and stdout."""

from __future__ import annotations

import codecs
import contextlib
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
from pathlib import Path
from types import FrameType
from typing import IO, Any

import psutil

from megarl.launch import processes
from megarl.launch.protocol import (
    ENDED,
    HELLO,
    LOGS,
    OUTPUT,
    RAY,
    REFUSED,
    UP,
    Ping,
    Request,
    Run,
    Signal,
    Stop,
    Token,
    decode_request,
    encode_event,
)

PATIENCE_S = 300.0
"""An agent that hears nothing for so long takes the launcher for gone; it is pinged far more often."""
ORPHAN_GRACE_S = 5.0
"""What is left to commands to end by themselves when nobody is there any more who could wait for them."""
RAY_FOLDER = "{folder}"
"""Stands in a command and its environment for the agent's own temporary folder."""
TOKEN_FILE = "token"
OF_OTHER_CLUSTERS = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Variables of the shell that lead elsewhere; the launcher gives its own."""
_POLL_S = 0.1


class Agent:
    """Starts commands on this node and ends them.

    Args:
        events: where events are written.
        folder: a new, private one, for the token and Ray's files; removed at the end.
    """

    def __init__(self, events: IO[str], folder: Path) -> None:
        self.folder = folder
        self._events = events
        self._lock = threading.Lock()
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def say(self, kind: str, name: str = "", **facts: Any) -> None:
        """Tell the launcher; a launcher that is gone is noticed elsewhere."""
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):
            self._events.write(encode_event(kind, name, **facts))
            self._events.flush()

    def hello(self) -> None:
        """Say who this is."""
        self.say(
            HELLO,
            addresses=interface_addresses(),
            address=own_address(),
        )

    def do(self, request: Request) -> None:
        """Do what is asked, except for :class:`Stop`."""
        if isinstance(request, Token):
            file = self.folder / TOKEN_FILE
            file.touch(0o600)
            file.write_text(request.token)
        elif isinstance(request, Signal):
            self._signal(request.name, request.number)
        elif isinstance(request, Run):
            self._run(request)

    def end(self, grace_s: float, keep_logs: str = "") -> None:
        """End all commands and whatever they started, then remove the folder."""
        for name in self._running:
            self._signal(name, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        for process in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        left = processes.end_descendants(grace_s)
        if left:
            self.say(REFUSED, why=f"these processes cannot be ended: {', '.join(left)}")
        if keep_logs:
            self._keep_logs(Path(keep_logs))
        shutil.rmtree(self.folder, ignore_errors=True)

    def _signal(self, name: str, number: int) -> None:
        process = self._running.get(name)
        if process is not None and process.poll() is None:
            process.send_signal(number)

    def _run(self, request: Run) -> None:
        taken = [port for port in request.ports if not port_is_free(request.address, port)]
        if taken:
            ports = ", ".join(map(str, taken))
            why = f"port {ports} of {request.address} is taken by another process; choose others with --port"
            self.say(REFUSED, request.name, why=why)
            return
        argv = [self._filled(word) for word in request.argv]
        own = {name: value for name, value in os.environ.items() if name not in OF_OTHER_CLUSTERS}
        env = own | {name: self._filled(value) for name, value in request.env.items()}
        try:
            process = processes.start(argv, env)
        except OSError as error:
            self.say(REFUSED, request.name, why=f"{argv[0]} cannot be started: {error}")
            return
        self._running[request.name] = process
        pumps = [self._pump(request.name, "stdout", process.stdout), self._pump(request.name, "stderr", process.stderr)]
        threading.Thread(target=self._watch, args=(request, process, pumps), daemon=True).start()

    def _filled(self, text: str) -> str:
        return text.replace(RAY_FOLDER, str(self.folder))

    def _pump(self, name: str, stream: str, source: IO[bytes] | None) -> threading.Thread:
        """Pass on what a command writes, as it comes."""

        def pump() -> None:
            assert source is not None
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            while chunk := os.read(source.fileno(), 65536):
                if text := decoder.decode(chunk):
                    self.say(OUTPUT, name, stream=stream, text=text)

        thread = threading.Thread(target=pump, daemon=True)
        thread.start()
        return thread

    def _watch(self, request: Run, process: subprocess.Popen[bytes], pumps: list[threading.Thread]) -> None:
        """Tell when a command listens, and when it has ended and all its output is out."""
        while request.answers is not None and process.poll() is None:
            if listens(request.address, request.answers):
                self.say(UP, request.name)
                break
            time.sleep(_POLL_S)
        code = process.wait()
        for pump in pumps:
            pump.join(1.0)  # longer only where something it started still holds the pipe
        self.say(ENDED, request.name, code=code)

    def _keep_logs(self, folder: Path) -> None:
        for logs in self.folder.glob(f"{RAY}/session_2*/logs"):
            try:
                shutil.copytree(logs, folder, dirs_exist_ok=True, ignore_dangling_symlinks=True)
            except (OSError, shutil.Error) as error:
                self.say(REFUSED, why=f"Ray's logs cannot be kept in {folder}: {error}")
                return
            self.say(LOGS, folder=str(folder.resolve()))


def port_is_free(address: str, port: int) -> bool:
    """Whether a server could listen there."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that linger are in nobody's way
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def listens(address: str, port: int) -> bool:
    """Whether a server does; asked by connecting, for a test by binding could be in its way."""
    try:
        socket.create_connection((address, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def interface_addresses() -> dict[str, str]:
    """IPv4 address of each network interface that has one."""
    found: dict[str, str] = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET:
                found.setdefault(name, entry.address)
    return found


def own_address() -> str:
    """The address by which other machines reach this one: that of its name, or else of the default route."""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        if not address.startswith("127."):
            return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # of a range that nobody has; no packet is sent
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


class _Ended(Exception):
    """A polite signal."""


def main() -> int:
    """Serve one launcher until it is done or gone."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise _Ended

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, leave)
    processes.adopt_orphans()
    agent = Agent(sys.stdout, Path(tempfile.mkdtemp(prefix="megarl-", dir="/tmp")))  # sockets need short paths
    stop = None
    try:
        agent.hello()
        stop = _serve(agent, _requests())
    except _Ended:
        pass
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        agent.end(ORPHAN_GRACE_S, stop.keep_logs if stop else "")
    return 0


def _requests() -> queue.SimpleQueue[str]:
    """The lines of stdin, read beside; an empty one is its end."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    return lines


def _serve(agent: Agent, lines: queue.SimpleQueue[str]) -> Stop | None:
    """Do what is asked until the end is asked for, or there is nobody who asks."""
    while True:
        try:
            line = lines.get(timeout=PATIENCE_S)
        except queue.Empty:
            return None
        if not line:
            return None
        try:
            request = decode_request(line)
        except ValueError as error:
            agent.say(REFUSED, why=str(error))
            continue
        if isinstance(request, Stop):
            return request
        if not isinstance(request, Ping):
            agent.do(request)


if __name__ == "__main__":
    sys.exit(main())
