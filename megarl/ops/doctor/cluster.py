"""``megarl doctor --nodes``: checks on every node of a Ray cluster and between nodes (versions, clocks, all-reduce)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.base.ports import reserve_port
from megarl.cluster.session import RaySession
from megarl.ops.doctor.node import CheckResult, Needs, NodeReport, Status, check_node
from megarl.ops.doctor.node.collective import Bandwidth, bandwidth_result, failed_result, run_ranks, slowest
from megarl.ops.doctor.node.results import ClockOffset, clock_offset, compare_clocks, compare_facts

CHECK_TIMEOUT_S = 300.0
CLOCK_READINGS = 10


class NodeDoctor:
    """Ray actor that runs the checks on one node."""

    def check(self, needs: Needs) -> NodeReport:
        """Run all checks of the node."""
        return check_node(needs)

    def clock(self) -> float:
        """Return the node's time, in seconds since the epoch."""
        return time.time()

    def reserve_port(self) -> int:
        """Return a port that is free on the node, and reserved until the end of this actor."""
        self._reserved = reserve_port("")
        return int(self._reserved.getsockname()[1])

    def all_reduce(self, ranks: range, world: int, host: str, port: int, backend: str) -> Bandwidth:
        """Run the node's ranks of an all-reduce.

        Raises:
            RuntimeError: a rank failed.
        """
        return run_ranks(ranks, world, host, port, backend)


def check_cluster(needs: Needs, address: str | None = None) -> list[NodeReport]:
    """Run the checks on every living node of a Ray cluster, then the checks between nodes.

    Args:
        needs: requirements for each node; the names of the other nodes are added.
        address: address of the cluster; None = ``RAY_ADDRESS``, or the cluster on this machine.

    Returns:
        A report per node, and one named ``between nodes``.

    Raises:
        ResourceError: no cluster answers.
    """
    with RaySession(address=address or "auto"):
        nodes = [node for node in ray.nodes() if node["Alive"]]
        names = _node_names(nodes)
        strategies = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
        starts = [ray.remote(NodeDoctor).options(num_cpus=0, scheduling_strategy=each) for each in strategies]
        doctors = {name: start.remote() for name, start in zip(names, starts, strict=True)}
        # The cluster itself holds Ray's ports, and only the driver's node needs logins.
        node_needs = replace(needs, watched_ports=(), trackers=(), nodes=len(nodes))
        hosts = [node["NodeManagerHostname"] for node in nodes]
        calls = {
            name: doctor.check.remote(replace(node_needs, peers=tuple(peer for peer in hosts if peer != host)))
            for (name, doctor), host in zip(doctors.items(), hosts, strict=True)
        }
        reports = [_wait_for_report(name, call) for name, call in calls.items()]
        return [*reports, NodeReport("between nodes", _between_nodes(nodes, doctors, reports))]


def _node_names(nodes: Sequence[dict[str, Any]]) -> list[str]:
    """Return unique names: the host name, if shared with the address, if still shared with Ray's node ID."""
    names = [str(node["NodeManagerHostname"]) for node in nodes]
    for detail in ("NodeManagerAddress", "NodeID"):
        counts = Counter(names)
        names = [
            f"{name} {str(node[detail])[:15]}" if counts[name] > 1 else name
            for name, node in zip(names, nodes, strict=True)
        ]
    return names


def _wait_for_report(name: str, call: Any) -> NodeReport:
    try:
        report: NodeReport = ray.get(call, timeout=CHECK_TIMEOUT_S)
        return replace(report, host=name)
    except GetTimeoutError:
        problem = f"no answer within {CHECK_TIMEOUT_S:.0f} s"
    except RayError as error:
        problem = str(error).strip().splitlines()[-1]
    remedy = "check the node: a file system hangs, or its installation of megarl differs from this one"
    return NodeReport(name, [CheckResult("examination", Status.FAIL, problem, remedy)])


def _between_nodes(
    nodes: Sequence[dict[str, Any]], doctors: dict[str, Any], reports: Sequence[NodeReport]
) -> list[CheckResult]:
    complete = [report for report in reports if report.facts]
    reachable = {report.host: doctors[report.host] for report in complete}
    results = compare_facts(complete)
    if not reachable:
        return results
    results.append(compare_clocks({name: _measure_clock(doctor) for name, doctor in reachable.items()}))
    addresses = [node["NodeManagerAddress"] for node, name in zip(nodes, doctors, strict=True) if name in reachable]
    gpus = [report.gpus for report in complete]
    if len(reachable) > 1:
        actors, host = list(reachable.values()), str(addresses[0])
        results.append(_all_reduce(actors, [1] * len(reachable), host, "gloo"))
        if all(gpus):
            results.append(_all_reduce(actors, gpus, host, "nccl"))
    return results


def _measure_clock(doctor: Any) -> ClockOffset:
    """Measure a node's clock several times; return the reading with the smallest error (fastest round trip)."""
    readings = []
    for _ in range(CLOCK_READINGS):
        sent = time.time()
        remote = ray.get(doctor.clock.remote())
        readings.append(clock_offset(sent, remote, time.time()))
    return min(readings, key=lambda reading: reading.error)


def _all_reduce(doctors: Sequence[Any], counts: Sequence[int], host: str, backend: str) -> CheckResult:
    """Run one all-reduce over all nodes, with ``counts[i]`` ranks on node ``i``."""
    world, port = sum(counts), ray.get(doctors[0].reserve_port.remote())
    starts = [sum(counts[:index]) for index in range(len(counts))]
    calls = [
        doctor.all_reduce.remote(range(start, start + count), world, host, port, backend)
        for doctor, start, count in zip(doctors, starts, counts, strict=True)
    ]
    try:
        measurements: list[Bandwidth] = ray.get(calls, timeout=CHECK_TIMEOUT_S)
    except GetTimeoutError:
        message = f"{world} ranks on {len(doctors)} nodes did not end within {CHECK_TIMEOUT_S:.0f} s"
        return failed_result(backend, message)
    except RayError as error:
        return failed_result(backend, str(error).strip().splitlines()[-1])
    return bandwidth_result(slowest(measurements), backend, f"on {len(doctors)} nodes")
