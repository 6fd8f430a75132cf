"""Cost of a training step, phase by phase: passes of models in their layouts, generation, and the weight sync.

A cost is a time in seconds at the peak speeds of the hardware file, and orders layouts. A run takes longer, by a factor
for each phase: ``megarl plan --calibrate`` fits it to runs, and costs on calibrated hardware include it.

The cost of a pipeline stage per micro-batch is that of its matrix products, or of reading the weights, if that takes
longer, and of the collectives that its layers wait for. The slowest stage sets the pace: ``m`` micro-batches take
``m + (pp - 1) / vpp`` times its cost; the second term is the pipeline bubble (section 2.2 of
https://arxiv.org/abs/2104.04473). Gradients are reduced and weights gathered once per optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megarl.base.disjoint_groups import disjoint_groups
from megarl.config.batch import MicroBatches
from megarl.config.schema.jobs import ROLLOUT, TEACHERS
from megarl.data.balance import common_micro_batch_count
from megarl.models import WeightMap
from megarl.models.tower_class import tower_parameters
from megarl.ops.plan.flops import (
    BACKWARD,
    Cost,
    Lengths,
    PhaseCost,
    SequenceStats,
    forward_flops,
    layers_elements,
    optimized_elements,
    rank_elements,
    recomputed_flops,
)
from megarl.ops.plan.generation import generation_cost
from megarl.ops.plan.hardware import CollectiveGroups, Hardware
from megarl.ops.plan.job import PlannedJob, PlannedPass, PlannedRole
from megarl.ops.plan.states import FLOAT32, MOMENTS
from megarl.ops.plan.tower import tower_cost
from megarl.sharding.placement import Placement, RolloutLayout
from megarl.sharding.plan import build_plan

ADAM_BYTES = 34
"""Bytes read and written per element of a rank's share in an optimizer step.

Gradient, main weight and moments are read; main weight, moments and weight are written.
"""


class PassModel:
    """Model of the passes of a role."""

    def __init__(self, role: PlannedRole, hardware: Hardware, lengths: Lengths, devices_per_node: int) -> None:
        self.role, self.hardware, self.lengths = role, hardware, lengths
        self.groups = CollectiveGroups.of(role.layout, devices_per_node)
        self._stages = [role.layout.stage_layers(role.model.num_layers, stage) for stage in range(role.layout.pp)]
        # Except for norms and router, stages with equal parts have equal costs: one of each kind is enough.
        kinds: dict[tuple[int, int, int, int, bool, bool], int] = {}
        for stage, layers in enumerate(self._stages):
            with_experts = sum(role.model.has_experts(layer) for layer in layers)
            with_window = sum(role.model.has_window(layer) for layer in layers)
            linear, is_last = sum(map(role.model.is_linear, layers)), stage == role.layout.pp - 1
            kinds.setdefault((len(layers), with_experts, with_window, linear, stage == 0, is_last), stage)
        self._kinds = list(kinds.values())
        self._elements = {stage: rank_elements(role, stage) for stage in self._kinds}
        self._most = max(self._elements.values(), key=lambda elements: elements.total)

    def cost(self, planned: PlannedPass, micro: MicroBatches) -> PhaseCost:
        """Return the cost of a pass in a training step, and its model FLOPs."""
        steps = max(1, planned.optimizer_steps)
        rows = self.rows(max(1, planned.samples // steps))
        layers = range(self.role.model.num_layers)
        flops = forward_flops(self.role, rows, layers, with_head=not planned.hidden_only)
        flops *= steps * (1 + BACKWARD if planned.updates else 1)
        cost = self._mini_batch(planned, micro, rows).times(steps).plus(self._host_copies(planned))
        return PhaseCost.of(planned.phase, cost, flops, self.role.layout.world_size, self.hardware)

    def rows(self, samples: float) -> SequenceStats:
        """Return the sums over a number of samples."""
        return SequenceStats.of(samples, self.lengths.prompt, self.lengths.response, self.role.model)

    def _mini_batch(self, planned: PlannedPass, sizes: MicroBatches, rows: SequenceStats) -> Cost:
        """Return the cost of a mini-batch with its optimizer step, or of all micro-batches of a pass without update."""
        layout = self.role.layout
        share = rows.part(1 / layout.dp)
        count = self.micro_batches(sizes, share.sequences)
        micro = share.part(1 / count)
        forward = [self.forward(stage, micro, with_head=not planned.hidden_only) for stage in self._kinds]
        backward = [self.backward(stage, micro) if planned.updates else Cost() for stage in self._kinds]
        slowest = max((f.plus(b) for f, b in zip(forward, backward, strict=True)), key=lambda cost: cost.total)
        bubble = slowest.total * (layout.pp - 1) / layout.vpp
        cost = slowest.times(count)._replace(bubble=bubble)
        if planned.updates:
            cost = cost.plus(self.optimizer_step())
        return cost

    def micro_batches(self, sizes: MicroBatches, samples: float) -> int:
        """Return the number of micro-batches that a number of samples of mean length fills."""
        each = sizes.samples
        if each is None:
            each = max(1, int((sizes.max_tokens or 0) / (self.lengths.prompt + self.lengths.response)))
        return common_micro_batch_count([max(1, math.ceil(samples / each))], sizes.multiple)

    def forward(self, stage: int, micro: SequenceStats, *, with_head: bool = True) -> Cost:
        """Return the cost of a micro-batch's forward pass on a rank; without head only final hidden states."""
        role, hardware, layout = self.role, self.hardware, self.role.layout
        layers, with_head = self._stages[stage], with_head and stage == layout.pp - 1
        flops = forward_flops(role, micro, layers, with_head=with_head) / (layout.tp * layout.cp)
        compute = hardware.compute_s(flops, role.megatron.dtype)
        weights = hardware.reading_s(self._elements[stage].total * role.dtype_bytes)
        memory = max(0.0, weights - compute)
        floor = len(layers) * hardware.latency.layer_us * 1e-6
        parallel = self._tensor(layers, micro) + self._context(len(layers), micro) + self._expert(layers, micro)
        return Cost(
            compute=compute,
            memory=memory,
            parallel=parallel + self._send(micro),
            latency=max(0.0, floor - compute - memory),
        )

    def backward(self, stage: int, micro: SequenceStats) -> Cost:
        """Return the cost of a micro-batch's backward pass, including recomputation."""
        role, layout = self.role, self.role.layout
        forward, layers = self.forward(stage, micro), self._stages[stage]
        # The additional gather and reduction of sequence parallelism overlap with a product of the same layer.
        cost = forward.times(BACKWARD)._replace(parallel=forward.parallel + self._context(len(layers), micro))
        recomputed = recomputed_flops(role, micro, layers) / (layout.tp * layout.cp)
        compute = self.hardware.compute_s(recomputed, role.megatron.dtype)
        if role.megatron.recompute_granularity == "full":
            first = role.megatron.recompute_num_layers or 1
            share = 1.0 if role.megatron.recompute_method != "block" else min(1.0, first / max(1, len(layers)))
            again = forward._replace(compute=0.0, parallel=forward.parallel - self._send(micro))
            cost = cost.plus(again.times(share))
        return cost._replace(compute=cost.compute + compute)

    def optimizer_step(self) -> Cost:
        """Return the cost of gradient reduction, optimizer step and weight gather, on the ranks with most weights."""
        role, hardware, elements = self.role, self.hardware, self._most
        pairs = ((self.groups.data, elements.shared), (self.groups.expert_data, elements.experts))
        if role.megatron.use_distributed_optimizer:
            summed = sum(group.gather_s(FLOAT32 * n, hardware) for group, n in pairs if n)
            gathered = sum(group.gather_s(role.dtype_bytes * n, hardware) for group, n in pairs if n)
        else:
            summed = sum(group.reduce_s(FLOAT32 * n, hardware) for group, n in pairs if n)
            gathered = 0.0
        moved = ADAM_BYTES * optimized_elements(role, elements)
        moved += 2 * FLOAT32 * elements.total  # gradients are zeroed, and their norm is computed
        return Cost(data=summed + gathered, memory=hardware.reading_s(moved))

    def _tensor(self, layers: list[int], micro: SequenceStats) -> float:
        """Return the seconds of tensor-parallel collectives (all-reduce, or gather and scatter) in attention, MLP."""
        role, model = self.role, self.role.model
        hidden = micro.tokens / role.layout.cp * model.hidden_size * role.dtype_bytes
        per_reduce = self.groups.tensor.reduce_s(hidden, self.hardware)
        total = per_reduce  # of the embedding or of the output layer
        for layer in layers:
            total += per_reduce
            experts = model.experts
            if experts is None or not model.has_experts(layer):
                total += per_reduce
                continue
            if experts.shared_ffn_hidden_size:
                total += per_reduce
            if role.layout.expert_tp > 1:
                copies = hidden * experts.per_token / role.layout.tp * role.layout.expert_tp
                total += self.groups.expert_tensor.reduce_s(copies, self.hardware)
        return total if role.layout.tp > 1 or role.layout.expert_tp > 1 else 0.0

    def _context(self, layers: int, micro: SequenceStats) -> float:
        """Return the seconds in which every rank gathers the keys and values of all ranks."""
        role, model = self.role, self.role.model
        width = 2 * model.num_key_value_heads * model.head_dim / role.layout.tp
        if model.latent is not None:
            width = model.num_attention_heads * (model.head_dim + model.latent.v_dim) / role.layout.tp
        return layers * self.groups.context.gather_s(micro.tokens * width * role.dtype_bytes, self.hardware)

    def _expert(self, layers: list[int], micro: SequenceStats) -> float:
        """Return the seconds of the all-to-all of tokens to their experts and back."""
        role, experts = self.role, self.role.model.experts
        if experts is None:
            return 0.0
        tokens = micro.tokens / (role.layout.cp * (role.layout.tp if role.sequence_parallel else 1))
        nbytes = tokens * experts.per_token * role.model.hidden_size * role.dtype_bytes
        count = sum(role.model.has_experts(layer) for layer in layers)
        return 2 * count * self.groups.expert.exchange_s(nbytes, self.hardware)

    def _send(self, micro: SequenceStats) -> float:
        """Return the seconds to send activations to the next stage, chunk by chunk."""
        role, layout = self.role, self.role.layout
        tokens = micro.tokens / (layout.cp * (layout.tp if role.sequence_parallel else 1))
        nbytes = tokens * role.model.hidden_size * role.dtype_bytes
        return layout.vpp * self.groups.pipeline.send_s(nbytes, self.hardware)

    def _host_copies(self, planned: PlannedPass) -> Cost:
        """Return the cost to onload and offload states around the pass, and to swap in other weights."""
        megatron = self.role.megatron
        # Unchanged weights are offloaded without a copy.
        copies = int(megatron.param_offload) * (1 + planned.updates)
        swapped = {"ref": self.role.holds_reference, "old_log_prob": self.role.holds_proximal}
        if swapped.get(planned.phase):
            # The other weights in; weights that are not offloaded also out, and in again.
            copies = 1 if megatron.param_offload else 3
        nbytes = 0.0
        if planned.updates and megatron.optimizer_offload:
            nbytes = 2 * optimized_elements(self.role, self._most) * FLOAT32 * (MOMENTS + (megatron.dtype != "float32"))
        return Cost(host=copies * weights_copy_s(self.role, self.hardware) + self.hardware.host_copy_s(nbytes))


def weights_copy_s(role: PlannedRole, hardware: Hardware) -> float:
    """Return the seconds to copy a rank's weights to or from host memory, on the ranks with most weights."""
    stages = {0, role.layout.pp // 2, role.layout.pp - 1}
    elements = max(rank_elements(role, stage).total for stage in stages)
    return hardware.host_copy_s(elements * role.dtype_bytes)


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
    actor = job.role("actor")
    if actor.trains_tower and model.vision is not None:
        elements += tower_parameters(model.vision)
    nbytes = elements * actor.dtype_bytes / job.rollout.tp
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
        cost = model.cost(planned, job.micro_batches(role, planned))
        yield cost.plus(tower_cost(job, role, planned, hardware, lengths))


def sync_cost(job: PlannedJob, hardware: Hardware) -> PhaseCost:
    """Return the cost of a weight sync: its transfers, and onloading the actor's weights."""
    actor = job.role("actor")
    host = weights_copy_s(actor, hardware) if actor.megatron.param_offload else 0.0
    cost = Cost(transfer=sync_s(job, hardware), host=host)
    return PhaseCost.of("update_weights", cost, 0.0, actor.layout.world_size, hardware)
