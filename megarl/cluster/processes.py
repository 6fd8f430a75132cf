"""All processes of a run: stacks, trace events, profiles and clock offsets, whatever their roles."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.base.errors import WorkerError
from megarl.base.processes import child_pids
from megarl.cluster.worker_process import WorkerInfo
from megarl.tracing import Event, ProfileOptions, TracingOptions
from megarl.tracing.board import BOARD, find_file
from megarl.tracing.stacks import ProcessReport, take_reports
from megarl.tracing.stall import ObservedProcess, unreachable_process
from megarl.tracing.trace_file import ClockReading, OffsetEstimate, estimate_offset

_EXCHANGES = 8
_STACKS_S = 20.0
"""Seconds for another node to report the stacks of its processes."""
_COLLECT_S = 30.0
"""Seconds for a process to return its last events; a hung process returns none."""
_WRITE_S = 600.0
"""Seconds for a process to write its profile, which may be large."""


class Member(NamedTuple):
    """A process of a role."""

    role: str
    rank: int
    pid: int
    host: str


class Recorded(NamedTuple):
    """Trace events of a process.

    Attributes:
        events: events with times of the process's clock.
        missing: reason why the process returned no events; empty if it did.
    """

    member: Member
    events: list[Event]
    missing: str = ""


class RoleProcesses(Protocol):
    """The processes of one role, as :class:`megarl.cluster.worker_group.WorkerGroup` holds them."""

    role: str

    @property
    def processes(self) -> Mapping[int, WorkerInfo]:
        """Processes by rank, as far as they have reported."""

    def call_process(self, rank: int, method: str, *args: Any) -> ray.ObjectRef:
        """Call a method of a rank's :class:`~megarl.cluster.worker_process.WorkerProcess`."""


@dataclass
class RunProcesses:
    """The worker groups on a pool, and the tracing options of their processes.

    Attributes:
        options: options of processes that start from now on.
    """

    options: TracingOptions = field(default_factory=TracingOptions)
    groups: list[RoleProcesses] = field(default_factory=list)

    def members(self) -> Iterator[Member]:
        """Return the processes that have described themselves; their workers may not be built yet."""
        for group in self.groups:
            for rank, info in group.processes.items():
                yield Member(group.role, rank, info.pid, info.host)

    def profile(self, label: str) -> list[ray.ObjectRef]:
        """Start recording ``label`` on all processes with a profiler; an empty label stops and writes.

        Takes effect after the current call of each process.
        """
        profiled = [member for member in self.members() if self.options.profile(member.role, member.rank) is not None]
        return [self._call(member, "profile", label) for member in profiled]

    def wait(self, calls: list[ray.ObjectRef]) -> None:
        """Wait for the calls of :meth:`profile`.

        Raises:
            WorkerError: a profiler failed. A dead process is skipped: its death is reported elsewhere.
        """
        for ref in calls:
            try:
                ray.get(ref, timeout=_WRITE_S)
            except RayActorError:
                continue
            except RayError as error:
                raise WorkerError(f"a profiler failed: {error}", code="worker.profiler-failed") from error

    def record(self, on: bool) -> list[tuple[Member, ray.ObjectRef]]:
        """Turn recording on or off in all processes, after their current call.

        Returns:
            The argument of :meth:`collect`.
        """
        return [(member, self._call(member, "record", on)) for member in self.members()]

    def collect(self, calls: list[tuple[Member, ray.ObjectRef]]) -> Iterator[Recorded]:
        """Yield the events of each process that :meth:`record` was called on."""
        deadline = time.monotonic() + _COLLECT_S
        for member, ref in calls:
            try:
                yield Recorded(member, ray.get(ref, timeout=max(0.0, deadline - time.monotonic())))
            except GetTimeoutError:
                yield Recorded(member, [], f"it did not answer within {_COLLECT_S:g} s")
            except RayActorError:
                yield Recorded(member, [], "it is gone")
            except RayError as error:
                yield Recorded(member, [], f"the call failed: {error}".splitlines()[0])

    def offsets(self) -> dict[str, OffsetEstimate]:
        """Measure the offset of each node's clock relative to this process's clock, by node address."""
        here = ray.util.get_node_ip_address()
        return {
            host: OffsetEstimate()
            if host == here
            else estimate_offset(self._exchange(members[0]) for _ in range(_EXCHANGES))
            for host, members in _by_host(self.members()).items()
        }

    def _exchange(self, member: Member) -> ClockReading:
        sent = time.monotonic_ns()
        remote_clock = ray.get(self._call(member, "clock"))
        return ClockReading(sent, remote_clock, time.monotonic_ns())

    def _call(self, member: Member, method: str, *args: Any) -> ray.ObjectRef:
        group = {group.role: group for group in self.groups}[member.role]
        return group.call_process(member.rank, method, *args)


def nsight_options(profile: ProfileOptions | None) -> dict[str, Any]:
    """Return the options of a Ray actor that start it under ``nsys profile``, if that is the profiler."""
    if profile is None or profile.tool != "nsys":
        return {}
    return {"runtime_env": {"nsight": dict(profile.nsight)}}


def collect_stacks(processes: RunProcesses) -> list[ObservedProcess]:
    """Collect the stacks of the driver, all role processes, and the reward processes that they have started.

    Never raises: a process that cannot be read gets a report that says so.
    """
    here = ray.util.get_node_ip_address()
    members = list(processes.members())
    reports = _on_nodes(members, _take_reports)
    driver, rewards = _take_reports([os.getpid()])
    of_rewards = [(here, report) for report in rewards]
    stacks = []
    for host, local in _by_host(members).items():
        own, rewards = reports.get(host) or ([unreachable_process(member.pid) for member in local], [])
        stacks += [
            ObservedProcess(member.role, member.rank, host, report) for member, report in zip(local, own, strict=True)
        ]
        of_rewards += [(host, report) for report in rewards]
    return [
        ObservedProcess("driver", 0, here, driver[0]),
        *(ObservedProcess("reward process", number, *of) for number, of in enumerate(of_rewards)),
        *sorted(stacks, key=lambda process: (process.role, process.rank)),
    ]


def kill_processes(processes: RunProcesses) -> None:
    """Kill all processes of roles at once, also hung and stopped ones."""
    _on_nodes(list(processes.members()), _kill)


def _take_reports(pids: Sequence[int]) -> tuple[list[ProcessReport], list[ProcessReport]]:
    """Observe processes of this node, and the reward processes among their children."""
    rewards = [child for pid in pids for child in child_pids(pid) if find_file(child, BOARD) is not None]
    parents = [pid for pid in (*pids, *rewards) if pid != os.getpid()]  # children of the driver are no part of the run
    reports = take_reports([*pids, *rewards], children_of=parents)
    return reports[: len(pids)], reports[len(pids) :]


def _on_nodes(members: Sequence[Member], function: Callable[[Sequence[int]], Any]) -> Mapping[str, Any]:
    """Call a function with the pids of each node, on that node.

    Returns:
        Results by node, without nodes that do not respond.
    """
    here = ray.util.get_node_ip_address()
    nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    by_host = {host: [member.pid for member in local] for host, local in _by_host(members).items()}
    remote = ray.remote(function)
    refs = {
        host: remote.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[host], soft=False)
        ).remote(pids)
        for host, pids in by_host.items()
        if host != here and host in nodes
    }
    results = {here: function(by_host[here])} if here in by_host else {}
    deadline = time.monotonic() + _STACKS_S
    for host, ref in refs.items():
        with contextlib.suppress(RayError):
            results[host] = ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
    return results


def _by_host(members: Iterable[Member]) -> Mapping[str, list[Member]]:
    by_host: dict[str, list[Member]] = defaultdict(list)
    for member in members:
        by_host[member.host].append(member)
    return by_host


def _kill(pids: Sequence[int]) -> None:
    """Kill the processes that still have a board: a reused pid has none."""
    for pid in pids:
        if find_file(pid, BOARD) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
