"""One attempt: a cluster from its start, over the driver's whole run, to its end."""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from megarl.amounts import some
from megarl.errors import ResourceError
from megarl.launch.agent import ORPHAN_GRACE_S, RAY_FOLDER, TOKEN_FILE
from megarl.launch.doctor import check_command, read_check
from megarl.launch.protocol import (
    ENDED,
    GONE,
    HELLO,
    LOGS,
    OUTPUT,
    RAY,
    REFUSED,
    UP,
    Event,
    Ping,
    Run,
    Signal,
    Stop,
    Token,
)
from megarl.launch.remote import RemoteAgent
from megarl.launch.settings import (
    ClusterSettings,
    JobToRun,
    is_address,
    node_ports,
    ray_environment,
    ray_start,
)

DRIVER, WAIT, DOCTOR = "driver", "wait", "doctor"
_PING_S = 20.0
_ECHO_S = 3.0  # a node's end is often noticed by the driver first, and named by its agent a moment later
_TEARDOWN_S = 60.0
_LAST_LINES, _LAST_WORDS_S = 6, 20.0
ASKED = "asked"
"""Kind of the event by which the launcher's own signal handler speaks up; ``facts["number"]`` is the signal."""


class NodeLost(ResourceError):
    """A node, or its Ray, ended while it was needed.

    Attributes:
        host: its name.
    """

    def __init__(self, host: str, why: str) -> None:
        super().__init__(f"node {host} is lost: {why}")
        self.host = host


class Interrupted(Exception):
    """The launcher was asked to end.

    Attributes:
        number: the signal.
        code: exit code of the driver, where it was still there to be asked to end.
    """

    def __init__(self, number: int, code: int | None = None) -> None:
        super().__init__(number, code)
        self.number, self.code = number, code


def exit_code(code: int) -> int:
    """As a shell has it: 128 + n for a process that signal n ended."""
    return 128 - code if code < 0 else code


class Attempt:
    """A cluster that exists for the length of a ``with`` block.

    Args:
        settings: of the cluster.
        job: what it is for.
        reach: the command that starts an agent on a host and connects its stdin and stdout.
        events: all that happens; the signal handler puts :data:`ASKED` there.
        say: prints a line for the user.

    Raises:
        ResourceError: a node cannot be reached.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        job: JobToRun,
        reach: Callable[[str], Sequence[str]],
        events: queue.SimpleQueue[Event],
        say: Callable[[str], None],
    ) -> None:
        self.settings, self.job, self._say = settings, job, say
        self._reach, self._events = reach, events
        self._agents: dict[str, RemoteAgent] = {}
        self._hello: dict[str, Event] = {}
        self._output: dict[tuple[str, str], str] = {}
        self._ended: dict[tuple[str, str], int] = {}
        self._up: set[str] = set()
        self._pinged = time.monotonic()
        self._failed = True
        self._lost: set[str] = set()

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def head(self) -> str:
        """Where the cluster's address is, and the driver runs."""
        return self.settings.hosts[0]

    def start(self) -> None:
        """Start the cluster and wait until all of it is there.

        Raises:
            ResourceError: names the host, and says what is wrong with it.
            Interrupted: the launcher was asked to end.
        """
        settings, deadline = self.settings, time.monotonic() + self.settings.start_timeout_s
        for host in settings.hosts:
            self._agents[host] = RemoteAgent(host, self._reach(host), self._events)
        self._until(lambda: len(self._hello) == len(settings.hosts), deadline, self._silent_hosts)
        token = Token(secrets.token_hex(32))
        for agent in self._agents.values():
            agent.send(token)
        addresses = {host: self._address_of(host) for host in settings.hosts}
        ports = node_ports(settings)
        self._cluster = f"{addresses[self.head]}:{ports[self.head].gcs}"
        self._alone = addresses[self.head] == "127.0.0.1"
        self._start_ray(self.head, addresses[self.head])
        self._until(lambda: self.head in self._up, deadline, lambda: f"Ray did not start on {self.head}")
        for host in settings.hosts[1:]:
            self._start_ray(host, addresses[host])
        self._wait_for_nodes(deadline)

    def check(self) -> None:
        """Have every node checked, and the network between them.

        Raises:
            ResourceError: what is wrong, by host and with its remedy.
            Interrupted: the launcher was asked to end.
        """
        argv = check_command(self.settings.python, self.job)
        self._agents[self.head].send(Run(DOCTOR, argv, self._environment()))
        done, deadline = (self.head, DOCTOR), time.monotonic() + self.settings.start_timeout_s
        self._until(
            lambda: done in self._ended, deadline, lambda: "megarl doctor did not end; --no-doctor goes on without"
        )
        check = read_check(self._ended[done], self._output.get(done, ""))
        for warning in check.warnings:
            self._say(f"warning: {warning}")
        if check.failures:
            raise ResourceError(
                "nodes are not in order (--no-doctor goes on all the same):\n" + "\n".join(check.failures)
            )
        self._say(f"doctor: {check.passed} checks passed, {len(check.warnings)} warnings")

    def run(self) -> int:
        """Run the driver on the head, and pass on what it writes.

        Returns:
            Its exit code.

        Raises:
            NodeLost: a node ended, and the driver with it.
            Interrupted: the launcher was asked to end; the driver has ended then.
        """
        command = self.job.command(self.settings.python)
        self._agents[self.head].send(Run(DRIVER, command, self._environment()))
        try:
            self._until(lambda: (self.head, DRIVER) in self._ended)
        except Interrupted as asked:
            self._failed = False
            raise Interrupted(asked.number, self._end_driver(asked.number)) from None
        except NodeLost:
            # The driver notices by itself which of its workers are gone, and says it better.
            with contextlib.suppress(NodeLost):
                self._until(lambda: (self.head, DRIVER) in self._ended, time.monotonic() + _LAST_WORDS_S)
            raise
        code = exit_code(self._ended[self.head, DRIVER])
        if code != 0:
            self._until(lambda: False, time.monotonic() + _ECHO_S, None)
        self._failed = code != 0
        return code

    def close(self) -> None:
        """End all that was started, on every node that can still be reached, and wait until it has."""
        keep = self.settings.log_folder if self._failed and self._up else ""
        # The head last: a node's Ray that loses its head writes pages about it.
        for host in [*self.settings.hosts[1:], self.head]:
            agent = self._agents.get(host)
            if agent is None:
                continue
            agent.send(Stop(keep and f"{keep}/{host}"))
        for host, agent in self._agents.items():
            if not agent.close(_TEARDOWN_S) and host not in self._lost:
                self._say(
                    f"{host}: the connection had to be cut; what runs there ends by itself within {ORPHAN_GRACE_S:g} s"
                )
        self._agents = {}
        logs = {}
        while not self._events.empty():
            event = self._events.get()
            if event.kind == LOGS:
                logs[event.host] = event.facts["folder"]
            elif event.kind == REFUSED:
                self._say(f"{event.host}: {event.facts['why']}")
            elif event.kind == OUTPUT and event.name == DRIVER:
                self._note(event)
        if logs:
            self._say(f"Ray's logs: {logs.get(self.head, next(iter(logs.values())))} on {some(len(logs), 'node')}")

    def _start_ray(self, host: str, address: str) -> None:
        ports, head = node_ports(self.settings)[host], "" if host == self.head else self._cluster
        folder = f"{RAY_FOLDER}/{RAY}"
        argv = ray_start(self.settings, self.job, host, address, head, ports, folder)
        env = ray_environment(f"{RAY_FOLDER}/{TOKEN_FILE}", loopback=self._alone) | self.settings.env
        listening = [] if head else [ports.gcs]
        if address:
            taken = [*ports.of_node().values(), *listening]
            answers = listening[0] if listening else None
            self._agents[host].send(Run(RAY, argv, env, taken, address, answers))
        else:
            self._agents[host].send(Run(RAY, argv, env))

    def _wait_for_nodes(self, deadline: float) -> None:
        left = max(1.0, deadline - time.monotonic())
        needs = ["--device", self.job.device, "--devices", str(self.job.devices), "--timeout-s", f"{left:.0f}"]
        argv = [self.settings.python, "-m", "megarl.launch.nodes", *self.settings.hosts, *needs]
        self._agents[self.head].send(Run(WAIT, argv, self._environment()))
        done = (self.head, WAIT)
        self._until(lambda: done in self._ended, deadline + 60.0, lambda: f"{self.head} did not say which nodes joined")
        text = self._output.get(done, "").strip()
        if self._ended[done] != 0:
            raise ResourceError(text or f"{argv} failed on {self.head}")
        addresses = json.loads(text.splitlines()[-1])
        self._say(f"Ray at {self._cluster}: " + ", ".join(f"{h} ({addresses[h]})" for h in self.settings.hosts))

    def _environment(self) -> dict[str, str]:
        """Variables of what speaks to the cluster."""
        own = ray_environment(f"{RAY_FOLDER}/{TOKEN_FILE}", self._cluster, self._alone)
        return self.settings.env | own

    def _address_of(self, host: str) -> str:
        """By which other nodes reach a host; empty = Ray looks for the way to the head."""
        facts, interface = self._hello[host].facts, self.settings.interface
        if host == self.head and self.settings.head_address:
            return self.settings.head_address
        if interface:
            if interface not in facts["addresses"]:
                there = ", ".join(f"{name} {address}" for name, address in facts["addresses"].items())
                raise ResourceError(
                    f"--interface={interface}: {host} has no such interface with an address; it has {there}"
                )
            return str(facts["addresses"][interface])
        if is_address(host):
            return host
        return str(facts["address"]) if host == self.head else ""

    def _silent_hosts(self) -> str:
        return "no answer from " + ", ".join(host for host in self.settings.hosts if host not in self._hello)

    def _last_words(self, key: tuple[str, str]) -> str:
        """The end of what ``ray start`` said, without the counters that it repeats from its logs."""
        lines = [line for line in self._output.get(key, "").splitlines() if line.strip() and "[state-dump]" not in line]
        return "".join(f"\n  {line}" for line in lines[-_LAST_LINES:])

    def _end_driver(self, number: int) -> int | None:
        """Pass on a signal to the driver and wait until it has ended; a second signal ends the waiting."""
        self._say(f"asking the driver to end; a second {signal.Signals(number).name} does not wait for it")
        self._agents[self.head].send(Signal(DRIVER, number))
        try:
            self._until(lambda: (self.head, DRIVER) in self._ended, time.monotonic() + self.settings.grace_s, None)
        except (Interrupted, NodeLost):
            return None
        code = self._ended.get((self.head, DRIVER))
        return None if code is None else exit_code(code)

    def _until(
        self, done: Callable[[], bool], deadline: float = float("inf"), late: Callable[[], str] | None = None
    ) -> None:
        """Take notice of what happens until something has, or it is too late.

        Raises:
            ResourceError: ``deadline`` has passed, if ``late`` says what to tell then; or a node refuses a request.
            NodeLost, Interrupted: see there.
        """
        while not done():
            now = time.monotonic()
            if now > deadline:
                if late is None:
                    return
                raise ResourceError(f"{late()} (after {self.settings.start_timeout_s:g} s, --start-timeout)")
            if now - self._pinged > _PING_S:
                self._pinged = now
                for agent in self._agents.values():
                    agent.send(Ping())
            try:
                event = self._events.get(timeout=min(1.0, max(0.0, deadline - now)))
            except queue.Empty:
                continue
            self._note(event)

    def _note(self, event: Event) -> None:
        """Take notice of one event.

        Raises:
            NodeLost, Interrupted, ResourceError: see :meth:`_until`.
        """
        key = (event.host, event.name)
        if event.kind == ASKED:
            raise Interrupted(event.facts["number"])
        if event.kind == HELLO:
            self._hello[event.host] = event
        elif event.kind == UP:
            self._up.add(event.host)
        elif event.kind == OUTPUT and event.name == DRIVER:
            stream = sys.stdout if event.facts["stream"] == "stdout" else sys.stderr
            stream.write(event.facts["text"])
            stream.flush()
        elif event.kind == OUTPUT:
            self._output[key] = (self._output.get(key, "") + event.facts["text"])[-20000:]
        elif event.kind == REFUSED:
            raise ResourceError(f"{event.host}: {event.facts['why']}")
        elif event.kind == GONE:
            self._lost.add(event.host)
            raise NodeLost(event.host, _reason_of(event))
        elif event.kind == ENDED and event.name == RAY:
            self._lost.add(event.host)
            raise NodeLost(event.host, f"its Ray ended with code {event.facts['code']}{self._last_words(key)}")
        elif event.kind == ENDED:
            self._ended[key] = event.facts["code"]


def _reason_of(event: Event) -> str:
    said = f": {event.facts['why']}" if event.facts["why"] else ""
    return f"the connection ended with code {event.facts['code']}{said}"
