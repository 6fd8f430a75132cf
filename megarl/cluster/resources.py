"""Resource pools: the devices that a job requests, the check against the cluster, and the placement of processes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from megarl.base.errors import ResourceError
from megarl.base.formatting import count_noun
from megarl.base.logs import ProcessLogs
from megarl.base.signals import sleep
from megarl.cluster.processes import RunProcesses

RESOURCE_NAMES = {"cpu": "CPU", "cuda": "GPU"}
_DEVICE_WORD = {"cpu": "CPU slot", "cuda": "GPU"}
# Share of its device that one process claims. It only places the process: all processes on a device share its time and
# memory, so the share is small enough never to limit the number of roles on a device.
_PROCESS_SHARE = 0.01


@dataclass(frozen=True)
class ResourcePool:
    """A named set of devices that one or several roles share.

    Attributes:
        device: ``cpu`` (one device is one CPU slot) or ``cuda`` (one device is one GPU).
        devices_per_node: devices on each node, such as ``(8, 8)`` for two nodes of eight. Each
            entry is a group of devices that are reserved together; two groups may be on one node.
        required: groups that must be reserved at the start, others may follow during the run; None = all.

    Raises:
        ResourceError: an unknown device, no node, or a node without devices.
    """

    name: str
    device: Literal["cpu", "cuda"]
    devices_per_node: Sequence[int]
    required: int | None = None

    def __post_init__(self) -> None:
        if self.device not in RESOURCE_NAMES:
            raise ResourceError(f"pool {self.name!r}: device={self.device!r}, not cpu or cuda", code="ray.pool-device")
        if not self.devices_per_node or min(self.devices_per_node) < 1:
            raise ResourceError(
                f"pool {self.name!r}: devices_per_node={list(self.devices_per_node)} must list at least one node, "
                "each with at least one device",
                code="ray.pool-size",
            )

    @property
    def num_devices(self) -> int:
        """Number of devices on all nodes."""
        return sum(self.devices_per_node)

    @property
    def required_groups(self) -> Sequence[int]:
        """Sizes of the groups that must be reserved at the start."""
        return self.devices_per_node[: self.required]

    def bundle(self) -> dict[str, float]:
        """Return the Ray resources of one device; a GPU reserves one CPU slot too."""
        return {"CPU": 1.0} if self.device == "cpu" else {"GPU": 1.0, "CPU": 1.0}


def cluster_nodes() -> list[dict[str, float]]:
    """Return the total resources of each living node of the cluster, such as ``{"CPU": 8.0, "GPU": 1.0}``."""
    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def check_resources(pools: Iterable[ResourcePool], nodes: Sequence[Mapping[str, float]] | None = None) -> None:
    """Reject pools that the cluster can never hold, before anything is placed.

    Args:
        pools: all pools of the job, which exist at the same time.
        nodes: total resources per node; default: the nodes of the connected cluster.

    Raises:
        ResourceError: reports per pool the required and the available devices, and a remedy.
    """
    pools = list(pools)
    nodes = cluster_nodes() if nodes is None else nodes
    free = [dict(node) for node in nodes]
    for pool, count in _placing_order((pool, pool.required_groups) for pool in pools):
        need = {name: count * each for name, each in pool.bundle().items()}
        fitting = [node for node in free if all(node.get(name, 0.0) >= amount for name, amount in need.items())]
        if not fitting:
            raise ResourceError(_shortage(pools, pool, nodes), code="ray.too-few-devices")
        # Best fit: keeps the larger nodes whole for other pools.
        tightest = min(fitting, key=lambda node: node[RESOURCE_NAMES[pool.device]])
        for name, amount in need.items():
            tightest[name] -= amount


def _placing_order(pools: Iterable[tuple[ResourcePool, Sequence[int]]]) -> list[tuple[ResourcePool, int]]:
    """Groups of all pools with their device counts: GPUs, which few nodes have, before CPUs, and large before small."""
    entries = [(pool, count) for pool, groups in pools for count in groups]
    return sorted(entries, key=lambda entry: (entry[0].device == "cpu", -entry[1]))


def _shortage(pools: Sequence[ResourcePool], failing: ResourcePool, nodes: Sequence[Mapping[str, float]]) -> str:
    """Message for a pool that does not fit."""
    resource, word = RESOURCE_NAMES[failing.device], _DEVICE_WORD[failing.device]
    needs = "; ".join(
        f"pool {pool.name!r} needs {sum(pool.required_groups)} {_DEVICE_WORD[pool.device]}(s) as "
        f"{list(pool.required_groups)} per node"
        for pool in pools
    )
    available = ", ".join(f"{node.get('GPU', 0):g} GPU and {node.get('CPU', 0):g} CPU" for node in nodes) or "no node"
    requested = sum(sum(pool.required_groups) for pool in pools if resource in pool.bundle())
    have = sum(node.get(resource, 0) for node in nodes)
    advice = "Give the pool fewer devices (roles that share a pool share its devices), " + (
        "or, to run several processes on one core, start Ray with a higher num_cpus."
        if resource == "CPU"
        else "or add GPUs or nodes."
    )
    return (
        f"not enough {word}s: {requested} needed, {have:g} available, and pool {failing.name!r} cannot be placed. "
        f"Requested: {needs}. The cluster has {len(nodes)} node(s): {available}. {advice}"
    )


class PlacedPool:
    """A pool whose devices are reserved in Ray.

    :func:`place_pools` creates it. Rank ``r`` of a role with one device per rank is on device ``r % num_devices``.
    Devices are numbered node by node, so neighbouring ranks share a node.
    """

    def __init__(
        self,
        pool: ResourcePool,
        groups: Sequence[PlacementGroup | None],
        logs: ProcessLogs | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.pool, self.logs = pool, logs
        self.processes = RunProcesses()
        self._groups: list[PlacementGroup | None] = list(groups)
        self._sizes = sizes or sorted(pool.devices_per_node, reverse=True)  # as they were placed
        self._bundles = [(group, bundle) for group, size in enumerate(self._sizes) for bundle in range(size)]
        self._nodes: dict[int, str] = {}
        for number in range(len(self._groups)):
            self._locate(number)

    def joined(self, other: PlacedPool) -> PlacedPool:
        """Return a view of both pools: this one's devices, then the other's; the pools still own them."""
        sizes = [*self._sizes, *other._sizes]
        pool = ResourcePool(f"{self.pool.name} and {other.pool.name}", self.pool.device, sizes)
        joined = PlacedPool(pool, [*self._groups, *other._groups], self.logs, sizes)
        joined.processes = self.processes
        return joined

    def device_of(self, rank: int) -> int:
        """Return the device of a role's rank."""
        return rank % len(self._bundles)

    def local_rank(self, rank: int) -> int:
        """Count the lower ranks of the same role on the same node."""
        return sum(self.node(lower) == self.node(rank) for lower in range(rank))

    def actor_options(self, rank: int) -> dict[str, Any]:
        """Return the Ray options that place a rank of a role on its device."""
        group, bundle = self._bundles[self.device_of(rank)]
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._groups[group], placement_group_bundle_index=bundle
        )
        gpu_share = {} if self.pool.device == "cpu" else {"num_gpus": _PROCESS_SHARE}
        return {"num_cpus": _PROCESS_SHARE, **gpu_share, "scheduling_strategy": strategy}

    def host_options(self, rank: int) -> dict[str, Any]:
        """Return the Ray options of a process without device: one node after another, the driver's first."""
        nodes = list(dict.fromkeys([ray.get_runtime_context().get_node_id(), *self._nodes.values()]))
        strategy = NodeAffinitySchedulingStrategy(nodes[rank % len(nodes)], soft=False)
        return {"num_cpus": 0, "scheduling_strategy": strategy}

    def gpu_ids(self, ranks: Sequence[int]) -> list[str]:
        """Return the ids of the ranks' GPUs on their node, for a process that computes on all of them.

        Raises:
            ResourceError: the GPUs are not on one node.
        """
        if len({self.node(rank) for rank in ranks}) > 1:
            devices = [self.device_of(rank) for rank in ranks]
            raise ResourceError(
                f"pool {self.pool.name!r}: devices {devices} of one process are on different nodes",
                code="ray.process-over-nodes",
            )
        probe = ray.remote(_gpu_id)
        gpu_ids: list[str] = ray.get([probe.options(**self.actor_options(rank)).remote() for rank in ranks])
        return gpu_ids

    def is_placed(self, devices: Iterable[int]) -> bool:
        """Return whether these devices are reserved on living nodes now.

        Ray places the devices of a lost node on another one as soon as a node has room.
        """
        numbers = {self._bundles[device][0] for device in devices}
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return all(self._locate(number) and self._nodes[number] in alive for number in numbers)

    def release(self, devices: Iterable[int]) -> None:
        """Give the groups of these devices back to the cluster, until :meth:`request`."""
        for number in {self._bundles[device][0] for device in devices}:
            group, self._groups[number] = self._groups[number], None
            if group is not None:
                remove_placement_group(group)

    def request(self, devices: Iterable[int]) -> None:
        """Ask the cluster for the groups of these devices, if they were released."""
        for number in {self._bundles[device][0] for device in devices}:
            if self._groups[number] is None:
                bundles = [self.pool.bundle()] * self._sizes[number]
                self._groups[number] = placement_group(bundles, strategy="STRICT_PACK")

    def close(self) -> None:
        """Release the devices; Ray kills processes that are still on them."""
        self.release(range(len(self._bundles)))

    def _locate(self, number: int) -> bool:
        """Look up the node of a group, and remember it; return whether the group is reserved."""
        group = self._groups[number]
        table = {} if group is None else placement_group_table(group)
        if table.get("state") != "CREATED":
            return False
        self._nodes[number] = table["bundles_to_node_id"][0]
        return True

    def node(self, rank: int) -> str | None:
        """Return the last known node of a rank's device."""
        return self._nodes.get(self._bundles[self.device_of(rank)][0])


def _gpu_id() -> str:
    (gpu,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return str(gpu)


def place_pools(
    pools: Iterable[ResourcePool], timeout_s: float = 60.0, logs: ProcessLogs | None = None
) -> dict[str, PlacedPool]:
    """Reserve the devices of all pools: one bundle per device, one placement group per node of a pool.

    Raises:
        ResourceError: the cluster cannot hold the pools, or other jobs hold the devices for longer than ``timeout_s``
            seconds. Nothing stays reserved then.
    """
    pools = list(pools)
    check_resources(pools)
    groups: dict[str, list[PlacementGroup]] = {pool.name: [] for pool in pools}
    try:
        for pool, count in _placing_order((pool, pool.devices_per_node) for pool in pools):
            groups[pool.name].append(placement_group([pool.bundle()] * count, strategy="STRICT_PACK"))
        _wait_until_placed(pools, groups, timeout_s)
    except BaseException:
        for group in itertools.chain.from_iterable(groups.values()):
            remove_placement_group(group)
        raise
    return {pool.name: PlacedPool(pool, groups[pool.name], logs) for pool in pools}


def _wait_until_placed(
    pools: Sequence[ResourcePool], groups: Mapping[str, Sequence[PlacementGroup]], timeout_s: float
) -> None:
    """Wait until the required groups of each pool are placed."""
    deadline = time.monotonic() + timeout_s
    for pool in pools:
        refs = [group.ready() for group in groups[pool.name]]
        needed = len(pool.required_groups)
        placed, _ = ray.wait(refs, num_returns=needed, timeout=max(deadline - time.monotonic(), 0.01))
        if len(placed) < needed:
            available = ray.available_resources()
            free = ", ".join(f"{available.get(kind, 0.0):g} {kind}" for kind in ("CPU", "GPU"))
            raise ResourceError(
                f"the devices of pool {pool.name!r} were not free within {timeout_s:g} s: the cluster has them, but "
                f"other jobs hold some (free now: {free}). Stop them, or give the pool fewer devices.",
                code="ray.devices-busy",
            )


_POLL_S = 0.5


def wait_for_nodes(
    names: Sequence[str], device: Literal["auto", "cpu", "cuda"], devices: int, timeout_s: float
) -> dict[str, str]:
    """Wait until the connected cluster has all nodes, each with its devices; return their addresses by name.

    Args:
        names: names of the nodes, from ``ray start --node-name``.
        device: kind of device to count; ``auto``: none.
        devices: GPUs, or CPU slots, that each node must have.

    Raises:
        ResourceError: names the nodes that are missing, or that have too few devices.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        nodes = _living_nodes()
        if all(name in nodes for name in names):
            break
        if time.monotonic() > deadline:
            missing = [name for name in names if name not in nodes]
            raise ResourceError(
                f"after {timeout_s:g} s {len(missing)} of {len(names)} nodes have not joined the Ray cluster: "
                f"{', '.join(missing)}. Joined: {', '.join(nodes) or 'none'}. Can they reach the head's address and "
                "ports (docs/how_to/launch.md, Ports)?",
                code="launch.nodes-missing",
            )
        sleep(_POLL_S)
    if device != "auto":
        _check_devices({name: nodes[name] for name in names}, device, devices)
    return {name: str(nodes[name]["NodeManagerAddress"]) for name in names}


def wait_for_any_nodes(
    count: int, device: Literal["auto", "cpu", "cuda"], devices: int, timeout_s: float
) -> dict[str, str]:
    """Wait until the connected cluster has ``count`` nodes with their devices; see :func:`wait_for_nodes`.

    Nodes with fewer devices, such as a head without GPUs, are not counted.

    Returns:
        The address of each counted node.

    Raises:
        ResourceError: gives the devices of each node.
    """
    kind, least = ("CPU", 0) if device == "auto" else (RESOURCE_NAMES[device], devices)
    deadline = time.monotonic() + timeout_s
    while True:
        nodes = _living_nodes()
        counts = {name: node["Resources"].get(kind, 0.0) for name, node in nodes.items()}
        fitting = {name: str(nodes[name]["NodeManagerAddress"]) for name in nodes if counts[name] >= least}
        if len(fitting) >= count:
            return fitting
        if time.monotonic() > deadline:
            have = ", ".join(f"{name} has {number:g}" for name, number in counts.items())
            raise ResourceError(
                f"after {timeout_s:g} s the Ray cluster has {len(fitting)} of {count_noun(count, 'node')} with "
                f"{count_noun(least, kind)}: {have}. Start more nodes, or lower the job's nodes or devices",
                code="launch.nodes-missing",
            )
        sleep(_POLL_S)


def _living_nodes() -> dict[str, Any]:
    """Return Ray's descriptions of the living nodes, by name."""
    return {str(node["NodeName"]): node for node in ray.nodes() if node["Alive"]}


def _check_devices(nodes: Mapping[str, Mapping[str, Any]], device: Literal["cpu", "cuda"], devices: int) -> None:
    kind = RESOURCE_NAMES[device]
    counts = {name: node["Resources"].get(kind, 0.0) for name, node in nodes.items()}
    short = ", ".join(f"{name} has {count:g}" for name, count in counts.items() if count < devices)
    if short:
        raise ResourceError(
            f"{count_noun(devices, kind)} are needed on every node, but {short}. Use nodes that have them, make them "
            "visible (CUDA_VISIBLE_DEVICES, the scheduler's GPU request), or lower trainer.n_gpus_per_node.",
            code="launch.too-few-devices",
        )
