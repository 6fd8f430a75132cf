"""Time of forward passes and updates of a model in a Megatron layout.

The time of a pipeline stage per micro-batch is the sum of four parts: matrix products (or reading the weights, if that
takes longer), attention, memory-bound operations between them, and the collectives that its layers wait for. The
slowest stage sets the pace: ``m`` micro-batches take ``m + (pp - 1) / vpp`` times its time; the second term is the
pipeline bubble (section 2.2 of https://arxiv.org/abs/2104.04473). Gradients are reduced and weights gathered once per
optimizer step.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from megarl.config.batch import MicroBatches
from megarl.data.packing import common_micro_batch_count, fewest_micro_batches
from megarl.ops.plan.flops import (
    BACKWARD,
    FlopCount,
    SequenceStats,
    forward_flops,
    optimized_elements,
    rank_elements,
    recomputed_flops,
)
from megarl.ops.plan.hardware import CollectiveGroups, Hardware
from megarl.ops.plan.job import PlannedPass, PlannedRole
from megarl.ops.plan.lengths import Ints, Lengths
from megarl.ops.plan.states import FLOAT32, MOMENTS

ADAM_BYTES = 34
"""Bytes read and written per element of a rank's share in an optimizer step.

Gradient, main weight and moments are read; main weight, moments and weight are written.
"""
LOGITS_PASSES = 4
"""Number of times that float32 logits are read or written to compute log-probs."""


class TimeBreakdown(NamedTuple):
    """Seconds by cause.

    Attributes:
        compute: matrix products and attention.
        memory: exposed memory traffic: norms, activations, logits, optimizer, reading weights.
        tensor: tensor-parallel collectives, including those of experts.
        context: exchange of keys and values between context-parallel ranks.
        expert: all-to-all of tokens to their experts and back.
        stages: sends of activations between pipeline stages.
        bubble: pipeline bubble.
        data: gradient reduction and weight gather between data-parallel ranks.
        host: copies of offloaded states.
        latency: latencies, independent of sizes.
        network: weight sync.
    """

    compute: float = 0.0
    memory: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    stages: float = 0.0
    bubble: float = 0.0
    data: float = 0.0
    host: float = 0.0
    latency: float = 0.0
    network: float = 0.0

    @property
    def seconds(self) -> float:
        """Sum over all causes."""
        return sum(self)

    def plus(self, other: TimeBreakdown) -> TimeBreakdown:
        """Return the sum of two breakdowns, by cause."""
        return TimeBreakdown(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> TimeBreakdown:
        """Return the breakdown multiplied by a factor."""
        return TimeBreakdown(*(factor * value for value in self))


class PassTime(NamedTuple):
    """Time of one pass over all samples of a training step.

    Attributes:
        phase: name of the phase.
        role: name of the role.
        cost: seconds by cause.
        flops: model FLOPs, over all devices.
    """

    phase: str
    role: str
    cost: TimeBreakdown
    flops: FlopCount

    def plus(self, other: PassTime) -> PassTime:
        """Return the time of two passes, one after the other, of this pass's phase and role."""
        cost = TimeBreakdown(*(a + b for a, b in zip(self.cost, other.cost, strict=True)))
        return self._replace(cost=cost, flops=self.flops.plus(other.flops))


class PassTimer:
    """Times the passes of a role.

    Args:
        role: the model and its layout.
        hardware: hardware of the job.
        lengths: lengths of the samples.
        devices_per_node: devices per node of the cluster.
    """

    def __init__(self, role: PlannedRole, hardware: Hardware, lengths: Lengths, devices_per_node: int) -> None:
        self.role, self.hardware, self.lengths = role, hardware, lengths
        self.groups = CollectiveGroups.of(role.layout, devices_per_node)
        self._stages = [role.layout.stage_layers(role.model.num_layers, stage) for stage in range(role.layout.pp)]
        # Except for norms and router, stages with equal parts take equal time: one of each kind is enough.
        kinds: dict[tuple[int, int, int, int, bool, bool], int] = {}
        for stage, layers in enumerate(self._stages):
            with_experts = sum(role.model.has_experts(layer) for layer in layers)
            with_window = sum(role.model.has_window(layer) for layer in layers)
            linear, is_last = sum(map(role.model.is_linear, layers)), stage == role.layout.pp - 1
            kinds.setdefault((len(layers), with_experts, with_window, linear, stage == 0, is_last), stage)
        self._kinds = list(kinds.values())
        self._elements = {stage: rank_elements(role, stage) for stage in self._kinds}
        self._most = max(self._elements.values(), key=lambda elements: elements.total)

    def time(self, planned: PlannedPass, micro: MicroBatches) -> PassTime:
        """Return the time of a pass in a training step, and its model FLOPs.

        Args:
            planned: the pass.
            micro: micro-batch sizes.
        """
        steps = max(1, planned.optimizer_steps)
        prompts, responses = self.lengths.rows(max(1, planned.samples // steps))
        rows = SequenceStats.of(prompts, responses, self.role.model)
        layers = range(self.role.model.num_layers)
        flops = forward_flops(self.role, rows, layers, with_head=not planned.hidden_only)
        flops = flops.times(steps * (1 + BACKWARD if planned.updates else 1))
        cost = self._mini_batch(planned, micro, prompts, responses).times(steps).plus(self._host_copies(planned))
        return PassTime(planned.phase, self.role.name, cost, flops)

    def _mini_batch(self, planned: PlannedPass, sizes: MicroBatches, prompts: Ints, responses: Ints) -> TimeBreakdown:
        """Return the time of a mini-batch with its optimizer step, or of all micro-batches of a pass without update."""
        layout = self.role.layout
        share = SequenceStats.of(prompts, responses, self.role.model).part(1 / layout.dp)
        count = self.micro_batches(sizes, prompts + responses)
        micro = share.part(1 / count)
        forward = [self.forward(stage, micro, with_head=not planned.hidden_only) for stage in self._kinds]
        backward = [self.backward(stage, micro) if planned.updates else TimeBreakdown() for stage in self._kinds]
        slowest = max((f.plus(b) for f, b in zip(forward, backward, strict=True)), key=lambda cost: cost.seconds)
        bubble = slowest.seconds * (layout.pp - 1) / layout.vpp
        cost = slowest.times(count)._replace(bubble=bubble)
        if planned.updates:
            overlap = (max(b.seconds for b in backward), max(f.seconds for f in forward))
            cost = cost.plus(self.optimizer_step(*overlap))
        return cost

    def micro_batches(self, sizes: MicroBatches, lengths: Ints) -> int:
        """Return the number of micro-batches of a data-parallel rank, packed as the ranks pack them."""
        share = lengths[:: self.role.layout.dp]
        if sizes.samples is not None:
            return common_micro_batch_count([-(-len(share) // sizes.samples)], sizes.multiple)
        limit = max(sizes.max_tokens or 0, int(share.max()))
        return common_micro_batch_count([_packed(tuple(share.tolist()), limit)], sizes.multiple)

    def forward(self, stage: int, micro: SequenceStats, *, with_head: bool = True) -> TimeBreakdown:
        """Return the time of a micro-batch's forward pass on one rank of a stage.

        Args:
            stage: pipeline stage.
            micro: the micro-batch.
            with_head: compute logits or values on the last stage; False = final hidden states only.
        """
        role, hardware, layout = self.role, self.hardware, self.role.layout
        layers, dtype = self._stages[stage], role.megatron.dtype
        with_head = with_head and stage == layout.pp - 1
        flops = forward_flops(role, micro, layers, with_head=with_head).times(1 / (layout.tp * layout.cp))
        products = flops._replace(attention=0.0).seconds(hardware, dtype)
        weights = hardware.reading_s(self._elements[stage].total * role.dtype_bytes)
        compute = flops.seconds(hardware, dtype)
        memory = max(0.0, weights - products) + hardware.reading_s(self._moved(stage, micro, with_head))
        floor = len(layers) * hardware.latency.layer_us * 1e-6
        return TimeBreakdown(
            compute=compute,
            memory=memory,
            tensor=self._tensor(layers, micro),
            context=self._context(len(layers), micro),
            expert=self._expert(layers, micro),
            stages=self._send(micro),
            latency=max(0.0, floor - compute - memory),
        )

    def backward(self, stage: int, micro: SequenceStats) -> TimeBreakdown:
        """Return the time of a micro-batch's backward pass, including recomputation."""
        role, hardware, layout = self.role, self.hardware, self.role.layout
        forward, layers = self.forward(stage, micro), self._stages[stage]
        # The additional gather and reduction of sequence parallelism overlap with a product of the same layer.
        cost = forward.times(BACKWARD)._replace(
            tensor=forward.tensor, expert=forward.expert, stages=forward.stages, context=2 * forward.context
        )
        recomputed = recomputed_flops(role, micro, layers).times(1 / (layout.tp * layout.cp))
        compute = recomputed.seconds(hardware, role.megatron.dtype)
        if role.megatron.recompute_granularity == "full":
            first = role.megatron.recompute_num_layers or 1
            share = 1.0 if role.megatron.recompute_method != "block" else min(1.0, first / max(1, len(layers)))
            cost = cost.plus(forward._replace(compute=0.0, stages=0.0).times(share))
        return cost._replace(compute=cost.compute + compute)

    def optimizer_step(self, backward_s: float, forward_s: float) -> TimeBreakdown:
        """Return the time of gradient reduction, optimizer step and weight gather, on the ranks with most weights.

        Args:
            backward_s: backward seconds of one micro-batch, which ``overlap_grad_reduce`` hides the reduction behind.
            forward_s: forward seconds of one micro-batch, which ``overlap_param_gather`` hides the gather behind.
        """
        role, hardware, elements = self.role, self.hardware, self._most
        pairs = ((self.groups.data, elements.shared), (self.groups.expert_data, elements.experts))
        if role.megatron.use_distributed_optimizer:
            summed = sum(group.gather_s(FLOAT32 * n, hardware) for group, n in pairs if n)
            gathered = sum(group.gather_s(role.dtype_bytes * n, hardware) for group, n in pairs if n)
        else:
            summed = sum(group.reduce_s(FLOAT32 * n, hardware) for group, n in pairs if n)
            gathered = 0.0
        if role.megatron.overlap_grad_reduce:
            summed = max(0.0, summed - backward_s)
        if role.megatron.overlap_param_gather:
            gathered = max(0.0, gathered - forward_s)
        moved = ADAM_BYTES * optimized_elements(role, elements)
        moved += 2 * FLOAT32 * elements.total  # gradients are zeroed, and their norm is computed
        return TimeBreakdown(data=summed + gathered, memory=hardware.reading_s(moved))

    def _moved(self, stage: int, micro: SequenceStats, with_head: bool) -> float:
        """Return the bytes that memory-bound operations read and write: norms, rotary, gates, residuals, logits."""
        role, layout, model = self.role, self.role.layout, self.role.model
        tokens, split = micro.tokens / layout.cp, layout.tp if role.sequence_parallel else 1
        heads = model.num_attention_heads + 2 * model.num_key_value_heads
        per_layer = 10 * model.hidden_size / split + 2 * heads * model.head_dim / layout.tp
        total = per_layer * len(self._stages[stage])
        experts = model.experts
        for layer in self._stages[stage]:
            if experts is not None and model.has_experts(layer):
                inner = experts.per_token * experts.ffn_hidden_size + experts.shared_ffn_hidden_size
                # each copy of a token is permuted and weighted on the way to its expert and back
                total += (4 * inner + 6 * experts.per_token * model.hidden_size) / layout.tp
            else:
                total += 3 * model.ffn_hidden_size / layout.tp
        logits = 0.0
        if with_head and not role.value_head:
            logits = LOGITS_PASSES * FLOAT32 * micro.outputs / layout.cp * model.vocab_size / layout.tp
        return tokens * total * role.dtype_bytes + logits

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

    def _host_copies(self, planned: PlannedPass) -> TimeBreakdown:
        """Return the time to onload and offload states around the pass, and to swap in other weights."""
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
        return TimeBreakdown(host=copies * weights_copy_s(self.role, self.hardware) + self.hardware.host_copy_s(nbytes))


@lru_cache(maxsize=256)
def _packed(lengths: tuple[int, ...], limit: int) -> int:
    """Return the number of micro-batches of at most ``limit`` tokens that sequences of these lengths fill."""
    if min(lengths) == max(lengths):
        return -(-len(lengths) // (limit // lengths[0]))
    return fewest_micro_batches(lengths, max_tokens=limit)


def weights_copy_s(role: PlannedRole, hardware: Hardware) -> float:
    """Return the seconds to copy a rank's weights to or from host memory, on the ranks with most weights."""
    stages = {0, role.layout.pp // 2, role.layout.pp - 1}
    elements = max(rank_elements(role, stage).total for stage in stages)
    return hardware.host_copy_s(elements * role.dtype_bytes)
