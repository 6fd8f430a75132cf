"""``megarl doctor`` on every node of a Ray cluster, and between the nodes: clocks, differences, all-reduce."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.session import RaySession
from megarl.doctor.node import Finding, Needs, NodeReport, Status, examine
from megarl.doctor.node.collective import Bandwidth, failure, finding_of, run_ranks, slowest
from megarl.doctor.node.differences import ClockOffset, clocks, differences, offset
from megarl.ports import free_port

EXAMINATION_S = 300.0
CLOCK_READINGS = 10


class NodeDoctor:
    """Lives on one node, as a Ray actor, and answers for it."""

    def examine(self, needs: Needs) -> NodeReport:
        """All checks of the node."""
        return examine(needs)

    def clock(self) -> float:
        """The node's time, in seconds since the epoch."""
        return time.time()

    def free_port(self) -> int:
        """A port that nobody on the node uses now."""
        return free_port()

    def all_reduce(self, ranks: range, world: int, host: str, port: int, backend: str) -> Bandwidth:
        """The node's ranks of an all-reduce.

        Raises:
            RuntimeError: one of them failed.
        """
        return run_ranks(ranks, world, host, port, backend)


def examine_nodes(needs: Needs, address: str | None = None) -> list[NodeReport]:
    """Examines every living node of a cluster, then what is between them.

    Args:
        needs: of each node; the names of the others are added.
        address: of the cluster; None = ``RAY_ADDRESS``, or the cluster on this machine.

    Returns:
        A report per node, and one named ``between nodes``.

    Raises:
        ResourceError: no cluster answers.
    """
    with RaySession(address=address or "auto"):
        nodes = [node for node in ray.nodes() if node["Alive"]]
        names = _names(nodes)
        doctors = dict(zip(names, map(_settle, nodes), strict=True))
        # Ray itself holds its ports here; devices are on all nodes that the run needs, not on a head without any
        each = replace(needs, watched_ports=(), nodes=len(nodes))
        hosts = [node["NodeManagerHostname"] for node in nodes]
        asked = {
            name: doctor.examine.remote(replace(each, peers=tuple(other for other in hosts if other != host)))
            for (name, doctor), host in zip(doctors.items(), hosts, strict=True)
        }
        reports = [_report(name, call) for name, call in asked.items()]
        return [*reports, NodeReport("between nodes", _between(nodes, doctors, reports))]


def _names(nodes: Sequence[dict[str, Any]]) -> list[str]:
    """Host names; with the address where several nodes share one, and Ray's identifier where they share that, too."""
    names = [str(node["NodeManagerHostname"]) for node in nodes]
    for detail in ("NodeManagerAddress", "NodeID"):
        shared = Counter(names)
        names = [
            f"{name} {str(node[detail])[:15]}" if shared[name] > 1 else name
            for name, node in zip(names, nodes, strict=True)
        ]
    return names


def _settle(node: dict[str, Any]) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
    return ray.remote(NodeDoctor).options(num_cpus=0, scheduling_strategy=strategy).remote()


def _report(name: str, call: Any) -> NodeReport:
    try:
        return replace(ray.get(call, timeout=EXAMINATION_S), host=name)
    except GetTimeoutError:
        found = f"no answer within {EXAMINATION_S:.0f} s"
    except RayError as error:
        found = str(error).strip().splitlines()[-1]
    remedy = "look at the node: a file system that hangs, or megarl is not installed there as it is here"
    return NodeReport(name, [Finding("examination", Status.FAIL, found, remedy)])


def _between(nodes: Sequence[dict[str, Any]], doctors: dict[str, Any], reports: Sequence[NodeReport]) -> list[Finding]:
    answered = [report for report in reports if report.facts]
    living = {report.host: doctors[report.host] for report in answered}
    findings = differences(answered)
    if not living:
        return findings
    findings.append(clocks({name: _offset(doctor) for name, doctor in living.items()}))
    addresses = [str(node["NodeManagerAddress"]) for node, name in zip(nodes, doctors, strict=True) if name in living]
    gpus = [_gpus(report) for report in answered]
    if len(living) > 1:
        findings.append(_all_reduce(list(living.values()), [1] * len(living), addresses[0], "gloo"))
        if all(gpus):
            findings.append(_all_reduce(list(living.values()), gpus, addresses[0], "nccl"))
    return findings


def _gpus(report: NodeReport) -> int:
    return int(report.facts.get("GPUs", "0").split(" ")[0])


def _offset(doctor: Any) -> ClockOffset:
    """Of the reading that was answered fastest, which is the surest."""
    readings = []
    for _ in range(CLOCK_READINGS):
        sent = time.time()
        told = ray.get(doctor.clock.remote())
        readings.append(offset(sent, told, time.time()))
    return min(readings, key=lambda reading: reading.within)


def _all_reduce(doctors: Sequence[Any], counts: Sequence[int], host: str, backend: str) -> Finding:
    """One all-reduce over all nodes, with as many ranks on each as ``counts`` says."""
    world, port = sum(counts), ray.get(doctors[0].free_port.remote())
    starts = [sum(counts[:at]) for at in range(len(counts))]
    calls = [
        doctor.all_reduce.remote(range(start, start + count), world, host, port, backend)
        for doctor, start, count in zip(doctors, starts, counts, strict=True)
    ]
    try:
        done = ray.get(calls, timeout=EXAMINATION_S)
    except GetTimeoutError:
        return failure(backend, f"{world} ranks on {len(doctors)} nodes did not end within {EXAMINATION_S:.0f} s")
    except RayError as error:
        return failure(backend, str(error).strip().splitlines()[-1])
    return finding_of(slowest(done), backend, f"on {len(doctors)} nodes")
