"""Traffic of a weight sync: bytes between devices, from the reshard plan that the run executes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megarl.config.schema.jobs import ROLLOUT
from megarl.models import WeightMap
from megarl.ops.plan.flops import layers_elements
from megarl.ops.plan.hardware import Hardware
from megarl.ops.plan.job import PlannedJob
from megarl.sharding.placement import Placement, RolloutLayout
from megarl.sharding.plan import build_plan


class SyncTraffic(NamedTuple):
    """Bytes of a weight sync."""

    total: int  # bytes received, over all ranks
    on_device: int  # bytes whose sender and receiver share a device
    within_nodes: int  # bytes between devices of a node
    between_nodes: int  # bytes between nodes
    most_received: int  # maximum bytes that a rank receives from other devices
    most_sent: int  # maximum bytes that a rank sends to other devices
    buckets: int


def plan_sync(job: PlannedJob, hardware: Hardware) -> SyncTraffic | None:
    """Plan the weight sync of a job; None without a rollout or with an external one."""
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
    source, destination, nbytes = plan.pair_nbytes()
    sends, receives = np.array(placement.train)[source], np.array(placement.rollout)[destination]
    # On a CPU, processes have separate memory.
    same = (sends == receives).all(axis=1) & (job.device != "cpu")
    near = sends[:, 0] == receives[:, 0]
    return SyncTraffic(
        total=plan.nbytes,
        on_device=int(nbytes[same].sum()),
        within_nodes=int(nbytes[near & ~same].sum()),
        between_nodes=int(nbytes[~near].sum()),
        most_received=_busiest(destination[~same], nbytes[~same]),
        most_sent=_busiest(source[~same], nbytes[~same]),
        buckets=len(plan.buckets),
    )


def _busiest(ranks: np.ndarray, nbytes: np.ndarray) -> int:
    return int(np.bincount(ranks, nbytes, minlength=1).max())


def sync_s(job: PlannedJob, hardware: Hardware) -> float:
    """Return the seconds, at peak speeds, in which every engine rank receives its weights from another device."""
    if job.rollout is None or job.rollout.is_external:
        return 0.0
    model = job.rollout.model
    elements = sum(layers_elements(model, range(model.num_layers))) + 2 * model.vocab_size * model.hidden_size
    nbytes = elements * job.role("actor").dtype_bytes / job.rollout.tp
    ends = (pool.numbers[place] for pool in (job.pools[0], job.pool_of(ROLLOUT)) for place in (0, -1))
    nodes = {job.slot(device, hardware.devices_per_node).node for device in ends}
    return hardware.transfer_s(nbytes, within_node=len(nodes) == 1)
