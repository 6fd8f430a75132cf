"""Time of a training step, phase by phase: passes, generation and weight sync."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from megarl.base.disjoint_groups import disjoint_groups
from megarl.config import TrainConfig
from megarl.config.batch import MicroBatches
from megarl.config.schema.async_training import COLOCATED, SYNC
from megarl.config.schema.jobs import ROLLOUT, TEACHERS
from megarl.models import WeightMap
from megarl.ops.plan.asynchronous import ModeComparison, SimulatedBatch, SimulatedMode, SimulatedRates, compare_modes
from megarl.ops.plan.flops import FlopCount, layers_elements
from megarl.ops.plan.generation import EngineTimer, GenerationTime, time_generation
from megarl.ops.plan.hardware import Hardware
from megarl.ops.plan.job import PlannedJob, PlannedPass, PlannedRole
from megarl.ops.plan.lengths import Lengths
from megarl.ops.plan.pass_times import PassTime, PassTimer, TimeBreakdown, weights_copy_s
from megarl.sharding.placement import Placement, RolloutLayout
from megarl.sharding.plan import build_plan

_BATCHES = {
    "reward": "reward_model",
    "old_log_prob": "old_log_prob",
    "ref": "ref_log_prob",
    "values": "critic",
    "update_critic": "critic",
    "update_actor": "actor",
}
"""Name of a phase's pass in the batch plan, by phase."""
_NOT_TRAINING = ("gen", "update_weights")


@dataclass(frozen=True)
class StepTime:
    """Time of a training step.

    Attributes:
        phases: times of the phases, in order.
        tokens: prompt and response tokens.
        devices: number of devices of the job.
        peak_flops: peak FLOP/s of one device, in the dtype of the trained role.
        generated: details of generation; None without a rollout on the job's devices.
        overlap: generation and training at the same time; None in synchronous mode.
        simultaneous: groups of phases at the same time, on separate devices.
        phase_devices: number of devices of each phase: those of its roles' pool.
    """

    phases: tuple[PassTime, ...]
    tokens: float
    devices: int
    peak_flops: float
    generated: GenerationTime | None
    overlap: ModeComparison | None = None
    simultaneous: tuple[tuple[str, ...], ...] = ()
    phase_devices: Mapping[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.overlap.run.step_s if self.overlap else exposed_seconds(self.phases, self.simultaneous)

    @property
    def throughput(self) -> float:
        """Prompt and response tokens per second and device: the metric ``perf/throughput``."""
        return self.tokens / (self.seconds * self.devices)

    @property
    def mfu(self) -> float:
        """Model FLOPs of the whole step divided by the peak."""
        return sum(phase.flops.total for phase in self.phases) / (self.seconds * self.devices * self.peak_flops)

    def mfu_of(self, phase: PassTime) -> float:
        """Return the MFU of a phase on its devices."""
        seconds, devices = phase.cost.seconds, self.phase_devices.get(phase.phase, self.devices)
        return phase.flops.total / (seconds * devices * self.peak_flops) if seconds else 0.0

    @property
    def limit(self) -> tuple[str, str]:
        """The longest phase and its largest cause."""
        phase = max(self.phases, key=lambda timed: timed.cost.seconds)
        return phase.phase, largest_cause(phase.cost)


def largest_cause(cost: TimeBreakdown) -> str:
    """Return the name of the largest cause."""
    return max(TimeBreakdown._fields, key=lambda name: getattr(cost, name))


def exposed_seconds(phases: Iterable[PassTime], simultaneous: Iterable[tuple[str, ...]]) -> float:
    """Return the seconds of phases, of which those of a group run at the same time."""
    seconds = {phase.phase: phase.cost.seconds for phase in phases}
    hidden = 0.0
    for group in simultaneous:
        times = [seconds.get(phase, 0.0) for phase in group]
        hidden += sum(times) - max(times)
    return sum(seconds.values()) - hidden


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


def time_step(
    job: PlannedJob, hardware: Hardware, lengths: Lengths, sync_s: float = 0.0, kv_tokens: float | None = None
) -> StepTime:
    """Time a training step.

    Args:
        job: the job.
        hardware: hardware of the job.
        lengths: prompt and response lengths.
        sync_s: seconds of the weight sync's transfers.
        kv_tokens: tokens in the KV cache of a replica; None = unlimited.
    """
    trained = job.roles[0]
    generated = _generation(job, hardware, lengths, kv_tokens)
    timed = {"gen": generated.time} if generated else {}
    phase_devices = {"gen": len(job.pool_of(ROLLOUT).numbers)}
    for role in job.roles:
        pool = job.pool_of(role.section)
        model = PassTimer(role, hardware, lengths, pool.devices_per_node)
        for planned in role.passes:
            time = model.time(planned, micro_batches_of(job, role, planned))
            several = planned.phase == "teacher" and planned.phase in timed
            timed[planned.phase] = timed[planned.phase].plus(time) if several else time
            phase_devices[planned.phase] = len(pool.numbers)
    if job.rollout is not None:
        timed["update_weights"] = _sync(job, hardware, sync_s)
    samples, phases = job.batches.samples_per_step, tuple(timed[phase] for phase in job.phases if phase in timed)
    return StepTime(
        phases=phases,
        tokens=samples * (lengths.prompts.mean + lengths.responses.mean),
        devices=job.devices,
        peak_flops=hardware.peak_flops(trained.megatron.dtype),
        generated=generated,
        overlap=_overlap(job, hardware, lengths, generated, phases, kv_tokens),
        simultaneous=simultaneous_phases(job),
        phase_devices=phase_devices,
    )


def _overlap(
    job: PlannedJob,
    hardware: Hardware,
    lengths: Lengths,
    generated: GenerationTime | None,
    phases: Sequence[PassTime],
    kv_tokens: float | None,
) -> ModeComparison | None:
    """Simulate asynchronous training with the speeds of the phases; None in synchronous mode."""
    rollout, config = job.rollout, job.config
    if not isinstance(config, TrainConfig) or rollout is None or generated is None:
        return None
    if (keys := config.async_training).mode == SYNC:
        return None
    trained = [phase for phase in phases if phase.phase not in _NOT_TRAINING]
    training = exposed_seconds(trained, simultaneous_phases(job))
    syncing = sum(phase.cost.seconds for phase in phases if phase.phase == "update_weights")
    slots = rollout.config.max_num_seqs
    if kv_tokens is not None:
        responses = np.array(lengths.responses.values, float)
        # A sequence reserves its whole length for as many steps as it has response tokens.
        reserved = lengths.prompts.mean + float((responses**2).sum() / responses.sum())
        slots = min(slots, max(1, int(kv_tokens / reserved)))
    lone = engine_timer(job, hardware).step(1).seconds
    rates = SimulatedRates.of_generation(generated, lone, slots)
    tokens = rollout.samples * lengths.responses.mean
    # Hybrid replicas finish the decode step in flight before they return their devices.
    token_s = training * job.trainer_devices / tokens
    rates = replace(rates, token_s=token_s, sync_s=syncing, switch_s=rates.decode_s + rates.sequence_s * slots)
    mode = SimulatedMode(
        keys.mode,
        replicas=rollout.replicas,
        trainers=job.trainer_devices,
        max_staleness=keys.max_staleness,
        sync_interval=keys.sync_interval,
        shares_devices=keys.mode == COLOCATED,
        drains=not keys.partial_rollout,
        sync_wave=keys.sync_wave_size,
        hybrid=config.hybrid_replicas,
    )
    batch = SimulatedBatch(rollout.prompts, rollout.samples_per_prompt, lengths.responses)
    layout = job.role("actor").layout
    replica, node = layout.world_size // layout.dp, job.devices_per_node
    # On several nodes both pools have whole nodes.
    units = (1, replica) if job.nodes == rollout.config.nnodes == 1 else (node, math.lcm(node, replica))
    return compare_modes(mode, rates, batch, rollout.tp, units, rollout.config.min_replicas)


def micro_batches_of(job: PlannedJob, role: PlannedRole, planned: PlannedPass) -> MicroBatches:
    """Return the micro-batch sizes of a role's pass."""
    name = role.name if job.rollout is None else _BATCHES.get(planned.phase, role.name)
    return job.batches.phase(name).micro


def generation_s(job: PlannedJob, hardware: Hardware, lengths: Lengths) -> float:
    """Return the seconds of generation with an unlimited KV cache."""
    generated = _generation(job, hardware, lengths, None)
    return generated.time.cost.seconds if generated else 0.0


def _generation(
    job: PlannedJob, hardware: Hardware, lengths: Lengths, kv_tokens: float | None
) -> GenerationTime | None:
    rollout = job.rollout
    if rollout is None or rollout.is_external:
        return None
    timer = engine_timer(job, hardware)
    return time_generation(rollout, timer, lengths, float("inf") if kv_tokens is None else kv_tokens)


def engine_timer(job: PlannedJob, hardware: Hardware) -> EngineTimer:
    """Return the timer of a replica of a job with a rollout."""
    assert job.rollout is not None
    return EngineTimer(job.rollout, hardware, job.engine_devices_per_node, on_cpu=job.device == "cpu")


def _sync(job: PlannedJob, hardware: Hardware, seconds: float) -> PassTime:
    """Return the time of the transfers, and of onloading the actor's weights."""
    actor = job.role("actor")
    host = weights_copy_s(actor, hardware) if actor.megatron.param_offload else 0.0
    return PassTime("update_weights", "actor", TimeBreakdown(network=seconds, host=host), FlopCount())


class SyncTraffic(NamedTuple):
    """Bytes and seconds of a weight sync.

    Attributes:
        total: bytes received, over all ranks.
        on_device: bytes whose sender and receiver share a device.
        within_nodes: bytes between devices of a node.
        between_nodes: bytes between nodes.
        most_received: maximum bytes that a rank receives from other devices.
        most_sent: maximum bytes that a rank sends to other devices.
        buckets: number of buckets.
        seconds: seconds of the busiest link.
        limit: kind of the busiest link.
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
    """Plan and time the weight sync of a job; None without a rollout or with an external one.

    All devices send and receive at the same time, over the link inside their node and their share of the network. The
    busiest link sets the pace of each wave. On a CPU, processes copy through shared host memory.
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
    wave_replicas = job.config.async_training.sync_wave_size if isinstance(job.config, TrainConfig) else None
    weight_map, sizes = WeightMap(actor.model), (job.bucket_bytes, actor.dtype_bytes)
    together = rollout.config.quantization is not None
    plan = build_plan(weight_map, actor.layout, target, *sizes, placement, wave_replicas, together=together)
    parts = [_Traffic.of(plan.pair_nbytes(wave), placement, job) for wave in plan.waves]
    timed = [part.seconds(hardware) for part in parts]
    seconds = {kind: sum(part[kind] for part in timed) for kind in timed[0]}
    limit = max(seconds, key=lambda kind: seconds[kind])
    link = "NVLink" if job.device == "cuda" else "shared memory"
    whole = _Traffic.of(plan.pair_nbytes(), placement, job)
    return SyncTraffic(
        total=plan.nbytes,
        on_device=int(whole.nbytes[whole.same].sum()),
        within_nodes=int(whole.nbytes[whole.inside].sum()),
        between_nodes=int(whole.nbytes[whole.outside].sum()),
        most_received=whole.busiest(whole.destination, ~whole.same),
        most_sent=whole.busiest(whole.source, ~whole.same),
        buckets=len(plan.buckets),
        seconds=seconds[limit] + len(plan.buckets) * hardware.latency_s(within_node=not whole.outside.any()),
        limit=link if limit == "link" else limit,
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

    def seconds(self, hardware: Hardware) -> dict[str, float]:
        """Return the seconds of the busiest rank, by kind of link."""
        inside, outside = (
            max(self.busiest(self.source, mask), self.busiest(self.destination, mask))
            for mask in (self.inside, self.outside)
        )
        return {
            "link": hardware.transfer_s(inside, within_node=True),
            "network": hardware.transfer_s(outside, within_node=False),
            "memory": 2 * hardware.reading_s(self.busiest(self.destination, self.same)),
        }


def rough_sync_s(job: PlannedJob, hardware: Hardware) -> float:
    """Return the seconds of a sync in which every engine rank receives all of its weights from another device."""
    if job.rollout is None or job.rollout.is_external:
        return 0.0
    model = job.rollout.model
    elements = sum(layers_elements(model, range(model.num_layers))) + 2 * model.vocab_size * model.hidden_size
    nbytes = elements * job.role("actor").dtype_bytes / job.rollout.tp
    last = job.slot(job.devices - 1, hardware.devices_per_node)
    return hardware.transfer_s(nbytes, within_node=last.node == 0)
