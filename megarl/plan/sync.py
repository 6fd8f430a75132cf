"""Bytes and seconds of a weight sync, from the reshard plan that the sync itself carries out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megarl.models import WeightMap
from megarl.plan.flops import layers_elements
from megarl.plan.hardware import Hardware
from megarl.plan.job import PlannedJob
from megarl.sharding.placement import Placement, RolloutLayout
from megarl.sharding.plan import build_plan


class SyncTraffic(NamedTuple):
    """A sync in bytes and seconds.

    Attributes:
        total: bytes that ranks receive, over all of them.
        on_device: of those, what sender and receiver share a device for.
        within_nodes: what stays inside nodes otherwise.
        between_nodes: what passes between nodes.
        most_received: bytes of the rank that receives most from other devices.
        most_sent: the same of sending.
        buckets: parts that the sync is done in.
        seconds: of the busiest link.
        limit: which kind of link that is.
    """

    total: int
    on_device: int
    within_nodes: int
    between_nodes: int
    most_received: int
    most_sent: int
    buckets: int
    seconds: float
    limit: str


def plan_sync(job: PlannedJob, hardware: Hardware) -> SyncTraffic | None:
    """Plans the sync of a job and times it; None where there is no rollout, or its servers are elsewhere.

    Every device sends and receives at the same time, over the link to its own node and its share of the network, and
    the busiest of these links paces the whole. On a CPU processes copy through one memory.
    """
    rollout = job.rollout
    if rollout is None or rollout.is_elsewhere:
        return None
    actor = job.role("actor")
    target = RolloutLayout(tp=rollout.tp, replicas=rollout.replicas)
    placement = Placement.of_devices(range(actor.layout.world_size), range(target.world_size), job.devices_per_node)
    plan = build_plan(WeightMap(actor.model), actor.layout, target, job.bucket_bytes, actor.dtype_bytes, placement)
    source, destination, nbytes = plan.pair_nbytes()
    size = job.devices_per_node
    same, near = source == destination, source // size == destination // size
    if job.device == "cpu":
        same = np.zeros_like(same)  # processes have no memory in common

    def busiest(ends: np.ndarray, which: np.ndarray) -> int:
        return int(np.bincount(ends[which], nbytes[which], minlength=1).max()) if which.any() else 0

    inside, outside = near & ~same, ~near
    seconds = {
        "NVLink" if job.device == "cuda" else "shared memory": hardware.transfer_s(
            max(busiest(source, inside), busiest(destination, inside)), within_node=True
        ),
        "network": hardware.transfer_s(max(busiest(source, outside), busiest(destination, outside)), within_node=False),
        "memory": 2 * hardware.reading_s(busiest(destination, same)),
    }
    limit = max(seconds, key=lambda kind: seconds[kind])
    return SyncTraffic(
        total=plan.nbytes,
        on_device=int(nbytes[same].sum()),
        within_nodes=int(nbytes[inside].sum()),
        between_nodes=int(nbytes[outside].sum()),
        most_received=busiest(destination, ~same),
        most_sent=busiest(source, ~same),
        buckets=len(plan.buckets),
        seconds=seconds[limit] + len(plan.buckets) * hardware.latency_s(within_node=job.nodes == 1),
        limit=limit,
    )


def rough_sync_s(job: PlannedJob, hardware: Hardware) -> float:
    """Seconds in which every engine rank gets all of its weights from elsewhere; a plan finds some at hand."""
    if job.rollout is None or job.rollout.is_elsewhere:
        return 0.0
    model = job.rollout.model
    elements = sum(layers_elements(model, range(model.num_layers))) + 2 * model.vocab_size * model.hidden_size
    nbytes = elements * job.role("actor").dtype_bytes / job.rollout.tp
    return hardware.transfer_s(nbytes, within_node=job.nodes == 1)
