"""Seconds of the passes of a model in a layout of Megatron's: forwards, and updates with all that belongs to them.

A pipeline stage takes, per micro-batch, the time of its matrix products (or of reading its weights, where that is
more), of attention, of what lies between them and only moves memory, and of the collectives that its layers wait for.
The slowest stage paces the rest: ``m`` micro-batches take ``m + (pp - 1) / vpp`` times its time, of which the second
part is the bubble (section 2.2 of https://arxiv.org/abs/2104.04473). Gradients are summed and weights gathered once per
optimizer step.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from megarl.config.batch import MicroBatches
from megarl.data.packing import common_count, fewest_micro_batches
from megarl.plan.flops import BACKWARD, Rows, Work, forward_work, optimized_elements, rank_elements, recomputed_work
from megarl.plan.groups import Groups
from megarl.plan.hardware import Hardware
from megarl.plan.job import PlannedPass, PlannedRole
from megarl.plan.lengths import Ints, Lengths
from megarl.plan.states import FLOAT32, MOMENTS

ADAM_BYTES = 34
"""Moved per element of a rank's share in a step: gradient, main weight and moments read, the latter three written, and
the weight."""
LOGITS_PASSES = 4
"""How often the logits, in float32, are read or written until there are log-probs."""


class Cost(NamedTuple):
    """Seconds by what they are spent on.

    Attributes:
        compute: matrix products and attention.
        memory: moving memory where no product hides it: norms, activations, logits, optimizer, reading weights.
        tensor: tensor-parallel collectives, an expert's among them.
        context: keys and values between context-parallel ranks.
        expert: tokens to their experts and back.
        stages: activations between pipeline stages.
        bubble: waiting for other stages.
        data: gradients and weights between data-parallel ranks.
        host: copies of what rests in host memory.
        latency: what does not depend on sizes.
        network: of weight syncs.
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
        """All together."""
        return sum(self)

    def plus(self, other: Cost) -> Cost:
        """The sum, cause by cause."""
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: float) -> Cost:
        """Multiplied."""
        return Cost(*(factor * value for value in self))


class PassTime(NamedTuple):
    """A pass over a training step's samples.

    Attributes:
        phase: its name.
        role: whose.
        cost: seconds by cause.
        work: the model's own operations, over all devices.
    """

    phase: str
    role: str
    cost: Cost
    work: Work


class PassModel:
    """Times the passes of a role.

    Args:
        role: the model and its layout.
        hardware: what it runs on.
        lengths: of the samples.
        devices_per_node: of the cluster.
    """

    def __init__(self, role: PlannedRole, hardware: Hardware, lengths: Lengths, devices_per_node: int) -> None:
        self.role, self.hardware, self.lengths = role, hardware, lengths
        self.groups = Groups.of(role.layout, devices_per_node)
        self._stages = [role.layout.stage_layers(role.model.num_layers, stage) for stage in range(role.layout.pp)]
        # Norms and router aside, stages with equal parts take equal time: one of each kind is enough.
        kinds: dict[tuple[int, int, bool, bool], int] = {}
        for stage, layers in enumerate(self._stages):
            with_experts = sum(role.model.has_experts(layer) for layer in layers)
            kinds.setdefault((len(layers), with_experts, stage == 0, stage == role.layout.pp - 1), stage)
        self._kinds = list(kinds.values())
        self._elements = {stage: rank_elements(role, stage) for stage in self._kinds}
        self._most = max(self._elements.values(), key=lambda elements: elements.total)

    def time(self, one: PlannedPass, micro: MicroBatches) -> PassTime:
        """Seconds of a pass in a training step, and the model's own operations in it.

        Args:
            one: the pass.
            micro: how a rank's samples are cut.
        """
        steps = max(1, one.optimizer_steps)
        prompts, responses = self.lengths.rows(max(1, one.samples // steps))
        rows = Rows.of(prompts, responses)
        work = forward_work(self.role, rows, range(self.role.model.num_layers), with_head=True)
        work = work.times(steps * (1 + BACKWARD if one.updates else 1))
        cost = self._mini_batch(one, micro, prompts, responses).times(steps).plus(self._host_copies(one))
        return PassTime(one.phase, self.role.name, cost, work)

    def _mini_batch(self, one: PlannedPass, cut: MicroBatches, prompts: Ints, responses: Ints) -> Cost:
        """All micro-batches of a mini-batch, or of a whole step without updates, and the optimizer's step."""
        layout = self.role.layout
        share = Rows.of(prompts, responses).part(1 / layout.dp)
        count = self.micro_batches(cut, prompts + responses)
        micro = share.part(1 / count)
        forward = [self.forward(stage, micro) for stage in self._kinds]
        backward = [self.backward(stage, micro) if one.updates else Cost() for stage in self._kinds]
        slowest = max((f.plus(b) for f, b in zip(forward, backward, strict=True)), key=lambda cost: cost.seconds)
        bubble = slowest.seconds * (layout.pp - 1) / layout.vpp
        cost = slowest.times(count)._replace(bubble=bubble)
        if one.updates:
            hidden = (max(b.seconds for b in backward), max(f.seconds for f in forward))
            cost = cost.plus(self.optimizer_step(*hidden))
        return cost

    def micro_batches(self, cut: MicroBatches, lengths: Ints) -> int:
        """Micro-batches of a data-parallel rank's share of some samples, packed as the ranks pack them."""
        share = lengths[:: self.role.layout.dp]
        if cut.samples is not None:
            return common_count([-(-len(share) // cut.samples)], cut.multiple)
        limit = max(cut.max_tokens or 0, int(share.max()))
        return common_count([_packed(tuple(share.tolist()), limit)], cut.multiple)

    def forward(self, stage: int, micro: Rows) -> Cost:
        """One micro-batch's forward pass through a stage, on one of its ranks."""
        role, hardware, layout = self.role, self.hardware, self.role.layout
        layers, dtype = self._stages[stage], role.megatron.dtype
        work = forward_work(role, micro, layers, with_head=stage == layout.pp - 1).times(1 / (layout.tp * layout.cp))
        products = work._replace(attention=0.0).seconds(hardware, dtype)
        weights = hardware.reading_s(self._elements[stage].total * role.dtype_bytes)
        compute = work.seconds(hardware, dtype)
        memory = max(0.0, weights - products) + hardware.reading_s(self._moved(stage, micro))
        floor = len(layers) * hardware.latency.layer_us * 1e-6
        return Cost(
            compute=compute,
            memory=memory,
            tensor=self._tensor(layers, micro),
            context=self._context(len(layers), micro),
            expert=self._expert(layers, micro),
            stages=self._send(micro),
            latency=max(0.0, floor - compute - memory),
        )

    def backward(self, stage: int, micro: Rows) -> Cost:
        """Its backward pass, and what that computes again."""
        role, hardware, layout = self.role, self.hardware, self.role.layout
        forward, layers = self.forward(stage, micro), self._stages[stage]
        # The gather that sequence parallelism adds hides behind a product of the same layer, as does a sum.
        cost = forward.times(BACKWARD)._replace(
            tensor=forward.tensor, expert=forward.expert, stages=forward.stages, context=2 * forward.context
        )
        again = recomputed_work(role, micro, layers).times(1 / (layout.tp * layout.cp))
        compute = again.seconds(hardware, role.megatron.dtype)
        if role.megatron.recompute_granularity == "full":
            first = role.megatron.recompute_num_layers or 1
            share = 1.0 if role.megatron.recompute_method != "block" else min(1.0, first / max(1, len(layers)))
            cost = cost.plus(forward._replace(compute=0.0, stages=0.0).times(share))
        return cost._replace(compute=cost.compute + compute)

    def optimizer_step(self, backward_s: float, forward_s: float) -> Cost:
        """Sums gradients, steps, gathers weights: on the ranks with most weights.

        Args:
            backward_s: of one micro-batch, behind which the sum hides with ``overlap_grad_reduce``.
            forward_s: of one micro-batch, behind which the gather hides with ``overlap_param_gather``.
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
        moved += 2 * FLOAT32 * elements.total  # gradients are set to zero, and their norm is taken
        return Cost(data=summed + gathered, memory=hardware.reading_s(moved))

    def _moved(self, stage: int, micro: Rows) -> float:
        """Bytes that the operations between the products read and write: norms, rotation, gates, residuals, logits."""
        role, layout, model = self.role, self.role.layout, self.role.model
        tokens, outside = micro.tokens / layout.cp, layout.tp if role.sequence_parallel else 1
        heads = model.num_attention_heads + 2 * model.num_key_value_heads
        per_layer = 10 * model.hidden_size / outside + 2 * heads * model.head_dim / layout.tp
        total = per_layer * len(self._stages[stage])
        experts = model.experts
        for layer in self._stages[stage]:
            if experts is not None and model.has_experts(layer):
                inner = experts.per_token * experts.ffn_hidden_size + experts.shared_ffn_hidden_size
                # to the experts and back, each copy of a token is permuted and weighed
                total += (4 * inner + 6 * experts.per_token * model.hidden_size) / layout.tp
            else:
                total += 3 * model.ffn_hidden_size / layout.tp
        logits = 0.0
        if stage == layout.pp - 1 and not role.value_head:
            logits = LOGITS_PASSES * FLOAT32 * micro.outputs / layout.cp * model.vocab_size / layout.tp
        return tokens * total * role.dtype_bytes + logits

    def _tensor(self, layers: list[int], micro: Rows) -> float:
        """An all-reduce, or a gather and a scatter of the same size, behind attention and behind the MLP."""
        role, model = self.role, self.role.model
        hidden = micro.tokens / role.layout.cp * model.hidden_size * role.dtype_bytes
        one = self.groups.tensor.reduce_s(hidden, self.hardware)
        total = one  # the embedding's, or what the output layer gathers
        for layer in layers:
            total += one
            experts = model.experts
            if experts is None or not model.has_experts(layer):
                total += one
                continue
            if experts.shared_ffn_hidden_size:
                total += one
            if role.layout.expert_tp > 1:
                copies = hidden * experts.per_token / role.layout.tp * role.layout.expert_tp
                total += self.groups.expert_tensor.reduce_s(copies, self.hardware)
        return total if role.layout.tp > 1 or role.layout.expert_tp > 1 else 0.0

    def _context(self, layers: int, micro: Rows) -> float:
        """Every rank gathers the keys and values of all."""
        role, model = self.role, self.role.model
        width = 2 * model.num_key_value_heads * model.head_dim / role.layout.tp
        if model.latent is not None:
            width = model.num_attention_heads * (model.head_dim + model.latent.v_dim) / role.layout.tp
        return layers * self.groups.context.gather_s(micro.tokens * width * role.dtype_bytes, self.hardware)

    def _expert(self, layers: list[int], micro: Rows) -> float:
        """Tokens to their experts and back."""
        role, experts = self.role, self.role.model.experts
        if experts is None:
            return 0.0
        tokens = micro.tokens / (role.layout.cp * (role.layout.tp if role.sequence_parallel else 1))
        nbytes = tokens * experts.per_token * role.model.hidden_size * role.dtype_bytes
        count = sum(role.model.has_experts(layer) for layer in layers)
        return 2 * count * self.groups.expert.exchange_s(nbytes, self.hardware)

    def _send(self, micro: Rows) -> float:
        """Activations to the next stage, chunk by chunk."""
        role, layout = self.role, self.role.layout
        tokens = micro.tokens / (layout.cp * (layout.tp if role.sequence_parallel else 1))
        nbytes = tokens * role.model.hidden_size * role.dtype_bytes
        return layout.vpp * self.groups.pipeline.send_s(nbytes, self.hardware)

    def _host_copies(self, one: PlannedPass) -> Cost:
        """What rests in host memory comes before the phase and goes after it; a reference is swapped in and out."""
        megatron = self.role.megatron
        copies = 2 if megatron.param_offload else 0
        if one.phase == "ref" and self.role.holds_reference:
            copies += 3  # the actor's own out, the reference's in, and the actor's in again
        nbytes = 0.0
        if one.updates and megatron.optimizer_offload:
            nbytes = 2 * optimized_elements(self.role, self._most) * FLOAT32 * (MOMENTS + (megatron.dtype != "float32"))
        return Cost(host=copies * weights_copy_s(self.role, self.hardware) + self.hardware.host_copy_s(nbytes))


@lru_cache(maxsize=256)
def _packed(lengths: tuple[int, ...], limit: int) -> int:
    """Micro-batches of so many tokens that rows of these lengths fill."""
    if min(lengths) == max(lengths):
        return -(-len(lengths) // (limit // lengths[0]))
    return fewest_micro_batches(lengths, max_tokens=limit)


def weights_copy_s(role: PlannedRole, hardware: Hardware) -> float:
    """Seconds of copying a rank's weights to or from host memory, on the ranks with most."""
    stages = {0, role.layout.pp // 2, role.layout.pp - 1}
    elements = max(rank_elements(role, stage).total for stage in stages)
    return hardware.host_copy_s(elements * role.dtype_bytes)
