"""All processes of a run's roles, to be asked what they do, whatever their roles are."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from megarl.errors import WorkerError
from megarl.tracing import Event, ProfileOptions, TracingOptions
from megarl.tracing.clocks import Exchange, Offset, measure

if TYPE_CHECKING:
    from megarl.cluster.worker_group import WorkerGroup

_EXCHANGES = 8
_COLLECT_S = 30.0
"""For a process to hand over its last events; one that has hung has none to give."""
_WRITE_S = 600.0
"""For a process to write its profile, which may be large."""


class Member(NamedTuple):
    """A process of a role.

    Attributes:
        role: name of the role.
        rank: rank within it.
        pid: process number on its host.
        host: address of its node.
    """

    role: str
    rank: int
    pid: int
    host: str


class Recorded(NamedTuple):
    """What a process recorded.

    Attributes:
        member: the process.
        events: on its own clock.
        missing: why it handed none over; empty where it did.
    """

    member: Member
    events: list[Event]
    missing: str = ""


@dataclass
class RunProcesses:
    """The worker groups on a pool, and how their processes are watched.

    Attributes:
        options: given to processes that start from now on.
        groups: those that were started.
    """

    options: TracingOptions = field(default_factory=TracingOptions)
    groups: list[WorkerGroup] = field(default_factory=list)

    def members(self) -> Iterator[Member]:
        """Those that have said who they are; also before their workers are built."""
        for group in self.groups:
            for rank, card in group.processes.items():
                yield Member(group.role, rank, card.pid, card.host)

    def profile(self, label: str) -> list[ray.ObjectRef]:
        """Have the processes with a profiler record ``label`` after what they are doing; empty: stop and write."""
        by_role = {group.role: group for group in self.groups}
        profiled = [one for one in self.members() if self.options.profile(one.role, one.rank) is not None]
        return [by_role[member.role].ask(member.rank, "profile", label) for member in profiled]

    def wait(self, asked: list[ray.ObjectRef]) -> None:
        """Until processes have done what they were asked to.

        Raises:
            WorkerError: one could not; a process that is gone is passed over, for that is told elsewhere.
        """
        for ref in asked:
            try:
                ray.get(ref, timeout=_WRITE_S)
            except RayActorError:
                continue
            except RayError as error:
                raise WorkerError(f"a profiler failed: {error}") from error

    def record(self, on: bool) -> list[tuple[Member, ray.ObjectRef]]:
        """Have all keep events or not, after what they are doing; to be given to :meth:`collect`."""
        by_role = {group.role: group for group in self.groups}
        return [(member, by_role[member.role].ask(member.rank, "record", on)) for member in self.members()]

    def collect(self, asked: list[tuple[Member, ray.ObjectRef]]) -> Iterator[Recorded]:
        """What :meth:`record` brought, from each process that was asked."""
        deadline = time.monotonic() + _COLLECT_S
        for member, ref in asked:
            try:
                yield Recorded(member, ray.get(ref, timeout=max(0.0, deadline - time.monotonic())))
            except GetTimeoutError:
                yield Recorded(member, [], f"it did not answer within {_COLLECT_S:g} s")
            except RayActorError:
                yield Recorded(member, [], "it is gone")
            except RayError as error:
                yield Recorded(member, [], f"it failed: {error}".splitlines()[0])

    def offsets(self) -> dict[str, Offset]:
        """How far the clock of each node is ahead of this process's, by the node's address."""
        by_host: dict[str, list[Member]] = defaultdict(list)
        for member in self.members():
            by_host[member.host].append(member)
        here = ray.util.get_node_ip_address()
        by_role = {group.role: group for group in self.groups}
        return {
            host: Offset()
            if host == here
            else measure(_exchange(by_role[of[0].role], of[0].rank) for _ in range(_EXCHANGES))
            for host, of in by_host.items()
        }


def nsight_options(profile: ProfileOptions | None) -> dict[str, Any]:
    """Options of a Ray actor that start it under ``nsys profile``, where that is the profiler."""
    if profile is None or profile.tool != "nsys":
        return {}
    return {"runtime_env": {"nsight": dict(profile.nsight)}}


def _exchange(group: WorkerGroup, rank: int) -> Exchange:
    asked = time.monotonic_ns()
    there = ray.get(group.ask(rank, "clock"))
    return Exchange(asked, there, time.monotonic_ns())
