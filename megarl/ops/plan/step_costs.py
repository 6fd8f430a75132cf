"""Cost of a training step, phase by phase: passes, generation, and the weight sync with its traffic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megarl.base.disjoint_groups import disjoint_groups
from megarl.config.schema.jobs import ROLLOUT, TEACHERS
from megarl.models import WeightMap
from megarl.ops.plan.flops import Lengths, layers_elements
from megarl.ops.plan.generation import generation_cost
from megarl.ops.plan.hardware import Hardware
from megarl.ops.plan.job import PlannedJob, PlannedRole
from megarl.ops.plan.pass_costs import Cost, PassModel, PhaseCost, weights_copy_s
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


@dataclass(frozen=True)
class StepCost:
    """Cost of a training step."""

    phases: tuple[PhaseCost, ...]  # costs of the phases, in order
    tokens: float  # prompt and response tokens
    devices: int  # of the job
    peak_flops: float  # peak FLOP/s of one device, in the dtype of the trained role
    simultaneous: tuple[tuple[str, ...], ...] = ()  # groups of phases at the same time, on separate devices
    is_calibrated: bool = False  # whether costs are seconds: the hardware has an efficiency of every phase

    @property
    def total(self) -> float:
        """Sum of the costs of all phases, of which those of a group run at the same time."""
        costs = {phase.phase: phase.cost.total for phase in self.phases}
        hidden = 0.0
        for group in self.simultaneous:
            together = [costs.get(phase, 0.0) for phase in group]
            hidden += sum(together) - max(together)
        return sum(costs.values()) - hidden

    @property
    def throughput(self) -> float:
        """Prompt and response tokens per second and device: the metric ``perf/throughput``."""
        return self.tokens / (self.total * self.devices)

    @property
    def mfu(self) -> float:
        """Model FLOPs of all phases divided by the peak."""
        return sum(phase.flops for phase in self.phases) / (self.total * self.devices * self.peak_flops)

    def mfu_of(self, phase: PhaseCost) -> float:
        """Return the MFU of a phase on its devices."""
        seconds = phase.cost.total
        return phase.flops / (seconds * phase.devices * self.peak_flops) if seconds else 0.0


def simultaneous_phases(job: PlannedJob) -> tuple[tuple[str, ...], ...]:
    """Return the groups of phases that a run of the job starts together, because their roles have separate devices."""
    if job.rollout is None:
        return ()
    teachers = [role for role in job.roles if role.section == TEACHERS]
    groups: list[tuple[str, ...]] = []
    for phases in (("old_log_prob", "ref", "teacher", "values"), ("update_critic", "update_actor")):
        pools = {
            phase: [job.pool_of(role.section) for role in job.roles if role.pass_of(phase) is not None]
            for phase in phases
        }
        if len(teachers) > 1:
            pools["teacher"] = list(job.pools)  # several teachers take turns, and nothing runs at the same time
        present = [phase for phase in phases if pools[phase]]
        groups += [tuple(group) for group in disjoint_groups(present, pools.__getitem__) if len(group) > 1]
    return tuple(groups)


def step_cost(job: PlannedJob, hardware: Hardware, lengths: Lengths, kv_tokens: float | None = None) -> StepCost:
    """Return the cost of a training step, with an unlimited KV cache if ``kv_tokens`` is None."""
    phases: dict[str, PhaseCost] = {}
    if (generation := generation_cost(job, hardware, lengths, kv_tokens)) is not None:
        phases["gen"] = generation
    for cost in (cost for role in job.roles for cost in pass_costs(job, role, hardware, lengths)):
        before = phases.get(cost.phase)  # of another teacher
        phases[cost.phase] = cost if before is None else before.plus(cost)
    if job.rollout is not None:
        phases["update_weights"] = sync_cost(job, hardware)
    return StepCost(
        phases=tuple(phases[phase] for phase in job.phases if phase in phases),
        tokens=job.batches.samples_per_step * (lengths.prompt + lengths.response),
        devices=job.devices,
        peak_flops=hardware.peak_flops(job.roles[0].megatron.dtype),
        simultaneous=simultaneous_phases(job),
        is_calibrated=phases.keys() <= hardware.efficiencies.keys(),
    )


def pass_costs(job: PlannedJob, role: PlannedRole, hardware: Hardware, lengths: Lengths) -> Iterator[PhaseCost]:
    """Yield the costs of a role's passes."""
    model = PassModel(role, hardware, lengths, job.pool_of(role.section).devices_per_node)
    for planned in role.passes:
        yield model.cost(planned, job.micro_batches(role, planned))


def sync_cost(job: PlannedJob, hardware: Hardware) -> PhaseCost:
    """Return the cost of a weight sync: its transfers, and onloading the actor's weights."""
    actor = job.role("actor")
    host = weights_copy_s(actor, hardware) if actor.megatron.param_offload else 0.0
    cost = Cost(transfer=sync_s(job, hardware), host=host)
    return PhaseCost.of("update_weights", cost, 0.0, actor.layout.world_size, hardware)
