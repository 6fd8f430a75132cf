"""Cluster session: start of a Ray cluster through agents, checks, the driver's run, and shutdown."""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence

from megarl.base.errors import ResourceError
from megarl.base.formatting import count_noun
from megarl.ops.launch import checks
from megarl.ops.launch.agent import HEARTBEAT_TIMEOUT_S, ORPHAN_GRACE_S, RAY_FOLDER, TOKEN_FILE
from megarl.ops.launch.protocol import (
    AGENT_STARTED,
    COMMAND_ENDED,
    DISCONNECTED,
    LISTENING,
    LOGS_KEPT,
    OUTPUT,
    PORTS_TAKEN,
    RAY,
    REQUEST_FAILED,
    STEP_CANCELLED,
    AgentEvent,
    Heartbeat,
    SendSignal,
    SetToken,
    Shutdown,
    StartCommand,
)
from megarl.ops.launch.remote import RemoteAgent
from megarl.ops.launch.settings import ClusterSettings, JobToRun, host_address, node_ports, ray_environment, ray_start

DRIVER, WAIT, DOCTOR = "driver", "wait", "doctor"
ANY_ADDRESS = "0.0.0.0"  # noqa: S104 (ports are tried on it, and nothing listens)
INTERRUPT = "interrupt"
"""Kind of the event that the launcher's signal handler puts in the queue; ``facts["number"]`` is the signal."""
_HEARTBEAT_S = 20.0
_EVENT_DELAY_S = 3.0  # the driver often fails a moment before the agent reports the lost node
_TEARDOWN_S = 60.0
_LAST_LINES, _DRIVER_END_S = 6, 20.0
_PROBE_S, _PROBE_END_S = 30.0, 5.0
_RELEASE_S, _PORTS_POLL_S = HEARTBEAT_TIMEOUT_S + 6 * ORPHAN_GRACE_S, 1.0


class NodeLost(ResourceError):
    """A node, or its Ray, ended during the session."""

    def __init__(self, host: str, reason: str) -> None:
        super().__init__(f"node {host} is lost: {reason}", code="launch.node-lost")
        self.host = host


class LaunchInterrupted(Exception):
    """The launcher received a signal.

    Attributes:
        code: exit code of the driver; None if it did not run.
    """

    def __init__(self, number: int, code: int | None = None) -> None:
        super().__init__(number, code)
        self.number, self.code = number, code


def shell_exit_code(code: int) -> int:
    """Convert a return code to a shell's: 128 + n for a process killed by signal n."""
    return 128 - code if code < 0 else code


def silent_hosts(
    hosts: Sequence[str], agent_command: Callable[[str], Sequence[str]], events: queue.SimpleQueue[AgentEvent]
) -> list[str]:
    """Start an agent on every host, end it, and return the hosts on which none started within 30 s.

    Args:
        events: a new queue; the signal handler adds :data:`INTERRUPT`.

    Raises:
        LaunchInterrupted: the launcher received a signal.
    """
    agents = [RemoteAgent(host, agent_command(host), events) for host in hosts]
    started: set[str] = set()
    pending, deadline = set(hosts), time.monotonic() + _PROBE_S
    try:
        while pending and (remaining := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                event = events.get(timeout=remaining)
                if event.kind == INTERRUPT:
                    raise LaunchInterrupted(event.facts["number"])
                if event.kind == AGENT_STARTED:
                    started.add(event.host)
                pending.discard(event.host)
    finally:
        for agent in agents:
            agent.send(Shutdown())
        for agent in agents:
            agent.close(_PROBE_END_S)
    return [host for host in hosts if host not in started]


class ClusterSession:
    """A Ray cluster that exists until :meth:`close`; or a running one, which the only host, this machine, joins.

    Args:
        agent_command: returns the command that starts an agent on a host and connects its stdin and stdout.
        events: queue of all events; the signal handler adds :data:`INTERRUPT`.
        is_restart: wait for ports that a node which was cut off in the last session still uses.

    Attributes:
        lost: hosts that ended during the session, or did not answer its shutdown.

    Raises:
        ResourceError: a node cannot be reached.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        job: JobToRun,
        agent_command: Callable[[str], Sequence[str]],
        events: queue.SimpleQueue[AgentEvent],
        say: Callable[[str], None],
        is_restart: bool = False,
    ) -> None:
        self.settings, self.job, self._say = settings, job, say
        self._agent_command, self._events = agent_command, events
        self._agents: dict[str, RemoteAgent] = {}
        self._started: dict[str, AgentEvent] = {}
        self._output: dict[tuple[str, str], str] = {}
        self._exit_codes: dict[tuple[str, str], int] = {}
        self._listening: set[str] = set()
        self._last_heartbeat = time.monotonic()
        self._ray_starts: dict[str, StartCommand] = {}
        self._ports_deadline = time.monotonic() + (_RELEASE_S if is_restart else 0.0)
        self._failed, self._cancelled = True, False
        self.lost: set[str] = set()

    @property
    def head(self) -> str:
        """Host of the cluster's head and of the driver."""
        return self.settings.hosts[0]

    def start(self) -> None:
        """Start the cluster and wait until all nodes have joined.

        Raises:
            ResourceError: names the host and the problem.
            LaunchInterrupted: the launcher received a signal.
        """
        settings, deadline = self.settings, time.monotonic() + self.settings.start_timeout_s
        for host in settings.hosts:
            self._agents[host] = RemoteAgent(host, self._agent_command(host), self._events)

        def silent() -> list[str]:
            return [host for host in settings.hosts if host not in self._started]

        self._wait_until(lambda: not silent(), deadline, lambda: f"no answer from {', '.join(silent())}")
        if settings.address:
            self._cluster = settings.address
        else:
            self._start_cluster(deadline)
        self._wait_for_nodes(deadline)

    def _start_cluster(self, deadline: float) -> None:
        settings, token = self.settings, SetToken(secrets.token_hex(32))
        for agent in self._agents.values():
            agent.send(token)
        addresses = {host: self._address_of(host) for host in settings.hosts}
        ports = node_ports(settings)
        self._cluster = f"{addresses[self.head]}:{ports[self.head].gcs}"
        self._loopback = addresses[self.head] == "127.0.0.1"
        self._start_ray(self.head, addresses[self.head])
        self._wait_until(lambda: self.head in self._listening, deadline, lambda: f"Ray did not start on {self.head}")
        for host in settings.hosts[1:]:
            self._start_ray(host, addresses[host])

    def run_doctor(self) -> None:
        """Run ``megarl doctor`` on every node and between nodes.

        Raises:
            ResourceError: failed checks, by host and with their remedies.
            LaunchInterrupted: the launcher received a signal.
        """
        argv = checks.doctor_command(self.settings.python, self.job)
        self._agents[self.head].send(StartCommand(DOCTOR, argv, self._environment()))
        key, deadline = (self.head, DOCTOR), time.monotonic() + self.settings.start_timeout_s
        self._wait_until(
            lambda: key in self._exit_codes, deadline, lambda: "megarl doctor did not end; --no-doctor skips it"
        )
        summary = checks.parse_doctor_output(self._exit_codes[key], self._output.get(key, ""))
        for warning in summary.warnings:
            self._say(f"warning: {warning}")
        if summary.failures:
            failures = "\n".join(summary.failures)
            raise ResourceError(
                f"checks of the nodes failed (--no-doctor skips them):\n{failures}", code="launch.checks-failed"
            )
        self._say(f"doctor: {summary.passed} checks passed, {len(summary.warnings)} warnings")

    def run_driver(self) -> int:
        """Run the driver on the head, and print its output.

        Returns:
            Its exit code.

        Raises:
            NodeLost: a node ended, and the driver with it.
            LaunchInterrupted: the launcher received a signal, and the driver has ended.
        """
        command, key = self.job.command(self.settings.python), (self.head, DRIVER)
        self._agents[self.head].send(StartCommand(DRIVER, command, self._environment()))
        try:
            self._wait_until(lambda: key in self._exit_codes)
        except LaunchInterrupted as interrupt:
            self._failed = False
            raise LaunchInterrupted(interrupt.number, self._end_driver(interrupt.number)) from None
        except NodeLost:
            # The driver detects its lost workers itself, with a better message.
            with contextlib.suppress(NodeLost):
                self._wait_until(lambda: key in self._exit_codes, time.monotonic() + _DRIVER_END_S)
            raise
        code = shell_exit_code(self._exit_codes[key])
        if code != 0:
            self._wait_until(lambda: False, time.monotonic() + _EVENT_DELAY_S, None)
        self._failed = code != 0
        return code

    def close(self) -> None:
        """Shut down every agent that can be reached, and wait until its processes have ended."""
        keep = self.settings.log_folder if self._failed and self._listening else ""
        # The head last: the Ray of another node logs many errors once it loses the head.
        for host in [*self.settings.hosts[1:], self.head]:
            if host in self._agents:
                self._agents[host].send(Shutdown(keep and f"{keep}/{host}"))
        for host, agent in self._agents.items():
            if not agent.close(_TEARDOWN_S) and host not in self.lost:
                self.lost.add(host)
                self._say(
                    f"{host} does not answer: if it still runs, its processes end by themselves within "
                    f"{HEARTBEAT_TIMEOUT_S + ORPHAN_GRACE_S:g} s"
                )
        self._agents = {}
        logs = {}
        while not self._events.empty():
            event = self._events.get()
            if event.kind == LOGS_KEPT:
                logs[event.host] = event.facts["folder"]
            elif event.kind == REQUEST_FAILED:
                self._say(f"{event.host}: {event.facts['reason']}")
            elif event.kind == OUTPUT and event.name == DRIVER:
                self._handle(event)
        if logs:
            folder = logs.get(self.head, next(iter(logs.values())))
            self._say(f"Ray's logs: {folder} on {count_noun(len(logs), 'node')}")

    def _start_ray(self, host: str, address: str) -> None:
        ports, head = node_ports(self.settings)[host], "" if host == self.head else self._cluster
        folder = f"{RAY_FOLDER}/{RAY}"
        argv = ray_start(self.settings, self.job, host, address, head, ports, folder)
        env = ray_environment(f"{RAY_FOLDER}/{TOKEN_FILE}", loopback=self._loopback) | self.settings.env
        gcs = None if head else ports.gcs
        used = [*ports.of_node().values(), *([] if gcs is None else [gcs])]
        self._ray_starts[host] = StartCommand(RAY, argv, env, used, address or ANY_ADDRESS, gcs)
        self._agents[host].send(self._ray_starts[host])

    def _wait_for_nodes(self, deadline: float) -> None:
        timeout_s = max(1.0, deadline - time.monotonic())
        names = () if self.settings.address else self.settings.hosts
        argv = checks.nodes_command(self.settings.python, names, self.job, timeout_s)
        self._agents[self.head].send(StartCommand(WAIT, argv, self._environment()))
        key = (self.head, WAIT)
        late = f"{self.head} did not report the nodes of the cluster"
        self._wait_until(lambda: key in self._exit_codes, deadline + 60.0, lambda: late)
        text = self._output.get(key, "").strip()
        if self._exit_codes[key] != 0:
            raise ResourceError(text or f"{argv} failed on {self.head}", code="launch.nodes-missing")
        addresses = json.loads(text.splitlines()[-1])
        nodes = ", ".join(f"{host} ({address})" for host, address in addresses.items())
        self._say(f"Ray at {self._cluster}: {nodes}")

    def _environment(self) -> dict[str, str]:
        """Return the environment of commands that connect to the cluster."""
        if self.settings.address:
            return self.settings.env
        cluster = ray_environment(f"{RAY_FOLDER}/{TOKEN_FILE}", self._cluster, self._loopback)
        return self.settings.env | cluster

    def _address_of(self, host: str) -> str:
        """Return the address at which other nodes reach a host; empty = Ray detects it."""
        facts, interface = self._started[host].facts, self.settings.interface
        if host == self.head and self.settings.head_address:
            return self.settings.head_address
        if interface:
            if interface not in facts["addresses"]:
                interfaces = ", ".join(f"{name} {address}" for name, address in facts["addresses"].items())
                raise ResourceError(
                    f"--interface={interface}: {host} has no such interface with an address; it has {interfaces}",
                    code="launch.no-interface",
                )
            return str(facts["addresses"][interface])
        if host_address(host) is not None:
            return host
        return str(facts["address"]) if host == self.head else ""

    def _last_output(self, key: tuple[str, str]) -> str:
        """Return the last lines of ``ray start``, without the counters that it repeats from its logs."""
        lines = [line for line in self._output.get(key, "").splitlines() if line.strip() and "[state-dump]" not in line]
        return "".join(f"\n  {line}" for line in lines[-_LAST_LINES:])

    def _end_driver(self, number: int) -> int | None:
        """Forward a signal to the driver and wait for its end; a second signal ends the wait."""
        self._say(f"waiting for the driver to end; a second {signal.Signals(number).name} does not wait")
        if not self.settings.in_ray_job:
            self._agents[self.head].send(SendSignal(DRIVER, number))
        key, deadline = (self.head, DRIVER), time.monotonic() + self.settings.grace_s
        try:
            self._wait_until(lambda: key in self._exit_codes, deadline, None)
        except (LaunchInterrupted, NodeLost):
            return None
        code = self._exit_codes.get(key)
        return None if code is None else shell_exit_code(code)

    def _wait_until(
        self, done: Callable[[], bool], deadline: float = float("inf"), late: Callable[[], str] | None = None
    ) -> None:
        """Handle events until a condition holds or the deadline passes.

        Args:
            late: returns the message of the error at the deadline; None = return without an error.

        Raises:
            ResourceError: the deadline passed, or a request failed.
            NodeLost: a node was lost.
            LaunchInterrupted: the launcher received a signal.
        """
        while not done():
            now = time.monotonic()
            if now > deadline:
                if late is None:
                    return
                raise ResourceError(
                    f"{late()} (after {self.settings.start_timeout_s:g} s, --start-timeout)",
                    code="launch.start-timeout",
                )
            if now - self._last_heartbeat > _HEARTBEAT_S:
                self._last_heartbeat = now
                for agent in self._agents.values():
                    agent.send(Heartbeat())
            try:
                event = self._events.get(timeout=min(1.0, max(0.0, deadline - now)))
            except queue.Empty:
                continue
            self._handle(event)

    def _handle(self, event: AgentEvent) -> None:
        """Handle one event; raises as :meth:`_wait_until`."""
        key = (event.host, event.name)
        if event.kind == INTERRUPT:
            raise LaunchInterrupted(event.facts["number"])
        if event.kind == AGENT_STARTED:
            self._started[event.host] = event
        elif event.kind == LISTENING:
            self._listening.add(event.host)
        elif event.kind == OUTPUT and event.name == DRIVER:
            stream = sys.stdout if event.facts["stream"] == "stdout" else sys.stderr
            stream.write(event.facts["text"])
            stream.flush()
        elif event.kind == OUTPUT:
            self._output[key] = (self._output.get(key, "") + event.facts["text"])[-20000:]
        elif event.kind == PORTS_TAKEN and time.monotonic() < self._ports_deadline:
            time.sleep(_PORTS_POLL_S)
            self._agents[event.host].send(self._ray_starts[event.host])
        elif event.kind in (PORTS_TAKEN, REQUEST_FAILED):
            raise ResourceError(f"{event.host}: {event.facts['reason']}", code="launch.request-failed")
        elif event.kind == STEP_CANCELLED:
            if not self._cancelled:
                self._say(
                    f"SLURM ends the job's steps, with Ray and the driver: the training step in progress is lost. "
                    f"`scancel --batch --signal=TERM {event.facts['job']}` lets the run end after its step and save"
                )
            self._cancelled = True
        elif event.kind == DISCONNECTED:
            self.lost.add(event.host)
            output = f": {event.facts['reason']}" if event.facts["reason"] else ""
            raise NodeLost(event.host, f"the connection ended with code {event.facts['code']}{output}")
        elif event.kind == COMMAND_ENDED and event.name == RAY:
            self.lost.add(event.host)
            raise NodeLost(event.host, f"its Ray ended with code {event.facts['code']}{self._last_output(key)}")
        elif event.kind == COMMAND_ENDED:
            self._exit_codes[key] = event.facts["code"]
