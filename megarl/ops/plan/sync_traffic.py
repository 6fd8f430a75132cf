"""Traffic of a weight sync: bytes between devices, and the busiest link."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megarl.models import WeightMap
from megarl.ops.plan.flops import layers_elements
from megarl.ops.plan.hardware import Hardware
from megarl.ops.plan.job import PlannedJob
from megarl.sharding.placement import Placement, RolloutLayout
from megarl.sharding.plan import build_plan


class SyncTraffic(NamedTuple):
    """Bytes of a weight sync.

    Attributes:
        total: bytes received, over all ranks.
        on_device: bytes whose sender and receiver share a device.
        within_nodes: bytes between devices of a node.
        between_nodes: bytes between nodes.
        most_received: maximum bytes that a rank receives from other devices.
        most_sent: maximum bytes that a rank sends to other devices.
        buckets: number of buckets.
        cost: seconds of the busiest link at its peak speed.
        limit: kind of the busiest link.
    """

    total: int
    on_device: int
    within_nodes: int
    between_nodes: int
    most_received: int
    most_sent: int
    buckets: int
    cost: float
    limit: str


def plan_sync(job: PlannedJob, hardware: Hardware) -> SyncTraffic | None:
    """Plan the weight sync of a job; None without a rollout or with an external one.

    All devices send and receive at the same time, over the link inside their node and their share of the network. The
    busiest link sets the pace. On a CPU, processes copy through shared host memory.
    """
    rollout = job.rollout
    if rollout is None or rollout.is_external:
        return None
    actor = job.role("actor")
    engines = [*job.engine_devices, *job.hybrid_devices]
    target = RolloutLayout(tp=rollout.tp, replicas=len(engines) // rollout.tp)
    placement = Placement(
        tuple(job.slot(rank, hardware.devices_per_node) for rank in range(actor.layout.world_size)),
        tuple(job.slot(device, hardware.devices_per_node) for device in engines),
    )
    weight_map, sizes = WeightMap(actor.model), (job.bucket_bytes, actor.dtype_bytes)
    together = rollout.config.quantization is not None
    plan = build_plan(weight_map, actor.layout, target, *sizes, placement, together=together)
    traffic = _Traffic.of(plan.pair_nbytes(), placement, job)
    costs = traffic.costs(hardware)
    limit = max(costs, key=lambda kind: costs[kind])
    return SyncTraffic(
        total=plan.nbytes,
        on_device=int(traffic.nbytes[traffic.same].sum()),
        within_nodes=int(traffic.nbytes[traffic.inside].sum()),
        between_nodes=int(traffic.nbytes[traffic.outside].sum()),
        most_received=traffic.busiest(traffic.destination, ~traffic.same),
        most_sent=traffic.busiest(traffic.source, ~traffic.same),
        buckets=len(plan.buckets),
        cost=costs[limit] + len(plan.buckets) * hardware.latency_s(within_node=not traffic.outside.any()),
        limit=limit,
    )


class _Traffic(NamedTuple):
    """Bytes per pair of a training rank and a rollout rank, by their locations."""

    source: np.ndarray
    destination: np.ndarray
    nbytes: np.ndarray
    same: np.ndarray
    inside: np.ndarray
    outside: np.ndarray

    @classmethod
    def of(cls, pairs: tuple[np.ndarray, np.ndarray, np.ndarray], placement: Placement, job: PlannedJob) -> _Traffic:
        source, destination, nbytes = pairs
        sends, receives = np.array(placement.train)[source], np.array(placement.rollout)[destination]
        same, near = (sends == receives).all(axis=1), sends[:, 0] == receives[:, 0]
        if job.device == "cpu":
            same = np.zeros_like(same)  # processes have separate memory
        return cls(source, destination, nbytes, same, near & ~same, ~near)

    def busiest(self, ends: np.ndarray, mask: np.ndarray) -> int:
        """Return the most bytes of one rank among some pairs."""
        return int(np.bincount(ends[mask], self.nbytes[mask], minlength=1).max()) if mask.any() else 0

    def costs(self, hardware: Hardware) -> dict[str, float]:
        """Return the cost of the busiest rank, by kind of link."""
        inside, outside = (
            max(self.busiest(self.source, mask), self.busiest(self.destination, mask))
            for mask in (self.inside, self.outside)
        )
        return {
            "NVLink" if hardware.device == "cuda" else "shared memory": hardware.transfer_s(inside, within_node=True),
            "network": hardware.transfer_s(outside, within_node=False),
            "memory": 2 * hardware.reading_s(self.busiest(self.destination, self.same)),
        }


def rough_sync_cost(job: PlannedJob, hardware: Hardware) -> float:
    """Return the cost of a sync in which every engine rank receives all of its weights from another device."""
    if job.rollout is None or job.rollout.is_external:
        return 0.0
    model = job.rollout.model
    elements = sum(layers_elements(model, range(model.num_layers))) + 2 * model.vocab_size * model.hidden_size
    nbytes = elements * job.role("actor").dtype_bytes / job.rollout.tp
    last = job.slot(job.devices - 1, hardware.devices_per_node)
    return hardware.transfer_s(nbytes, within_node=last.node == 0)
