"""What all processes of a run do, on whatever nodes they are."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.processes import Member, RunProcesses
from megarl.tracing.board import BOARD, find_file
from megarl.tracing.stacks import child_pids, take_reports
from megarl.tracing.stall import Seen, unreachable

_ANSWER_S = 20.0
"""For another node to tell of its processes."""


def look_at(processes: RunProcesses) -> list[Seen]:
    """The driver, its processes for rewards, and all processes of roles; never raises for one that cannot be seen."""
    members = list(processes.members())
    reports = _on_nodes(members, take_reports)
    seen = []
    for host, own in _by_host(members).items():
        told = reports.get(host) or [unreachable(member.pid) for member in own]
        seen += [Seen(member.role, member.rank, host, report) for member, report in zip(own, told, strict=True)]
    return [*_driver_and_rewards(), *sorted(seen, key=lambda one: (one.role, one.rank))]


def kill_all(processes: RunProcesses) -> None:
    """End all processes of roles at once, whatever they hang in; also those that are stopped."""
    _on_nodes(list(processes.members()), _kill)


def _driver_and_rewards() -> list[Seen]:
    host, driver = ray.util.get_node_ip_address(), os.getpid()
    rewards = [pid for pid in child_pids(driver) if find_file(pid, BOARD) is not None]
    own, *others = take_reports([driver, *rewards], children_of=rewards)
    return [Seen("driver", 0, host, own), *(Seen("reward process", at, host, one) for at, one in enumerate(others))]


def _on_nodes(members: Sequence[Member], function: Callable[[Sequence[int]], Any]) -> Mapping[str, Any]:
    """By node, what a function says of the numbers of its processes; without the nodes that do not answer."""
    here = ray.util.get_node_ip_address()
    nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    by_host = {host: [member.pid for member in own] for host, own in _by_host(members).items()}
    remote = ray.remote(function)
    asked = {
        host: remote.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[host], soft=False)
        ).remote(pids)
        for host, pids in by_host.items()
        if host != here and host in nodes
    }
    found = {here: function(by_host[here])} if here in by_host else {}
    deadline = time.monotonic() + _ANSWER_S
    for host, ref in asked.items():
        with contextlib.suppress(RayError):
            found[host] = ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
    return found


def _by_host(members: Sequence[Member]) -> Mapping[str, list[Member]]:
    by_host: dict[str, list[Member]] = defaultdict(list)
    for member in members:
        by_host[member.host].append(member)
    return by_host


def _kill(pids: Sequence[int]) -> None:
    """Kills those that are still the processes that they were: that have a board."""
    for pid in pids:
        if find_file(pid, BOARD) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
