"""Peak activation memory of a pass: saved layers, recomputed layers, logits and working memory.

The formulas follow the layers that megarl builds, tensor by tensor; each method of :class:`LayerBytes` lists the
storages that autograd saves. ``fused`` layers run on a GPU (Transformer Engine, or torch with one kernel for packed
attention), the others on a CPU. They differ in attention, in experts, and in the tensors that sequence parallelism
gathers. Dropout is off, so no masks are saved. Attention is flash attention, which saves one number per token and head
instead of scores; the exception is a CPU layer whose values are narrower than its queries.

A pipeline stage saves several micro-batches at a time. With recomputation, the peak is at one of two moments: at the
end of the last forward, logits included, or in the backward, when the logits are freed and the first layers are
recomputed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from megarl.models import ModelConfig, ParallelLayout, WeightMap
from megarl.models.adapters import AdapterMap, AdapterSplit, LoraOptions
from megarl.models.model_config import LinearAttention
from megarl.models.partition import logits_chunk_rows
from megarl.models.sequence_cost import CHUNK
from megarl.ops.plan.job import PlannedJob, PlannedPass, PlannedRole
from megarl.ops.plan.tower import saved_bytes

FLOAT32, INT64 = 4, 8
NOTHING: frozenset[str] = frozenset()


class RankTokens(NamedTuple):
    """Tokens of a micro-batch on one rank."""

    padded_total: int  # tokens over all context-parallel ranks, with padding
    local: int  # tokens of this rank's part of the sequences
    between_layers: int  # tokens of this rank between layers, divided by sequence parallelism
    outputs: int  # response tokens whose logits or values this rank computes
    attended: int  # tokens of full sequences in attention; larger than local with shared prompts
    longest: int  # tokens of the longest sequence
    mixed_lengths: bool = True  # whether sequences differ in length


def tokens_on_rank(role: PlannedRole, planned: PlannedPass, shared_extra: int = 0) -> RankTokens:
    """Divide a pass's largest micro-batch over the ranks; shared prompts add ``shared_extra`` tokens in attention."""
    layout = role.layout
    local = -(-planned.tokens // layout.cp)
    if role.sequence_parallel:
        local = -(-local // layout.tp) * layout.tp
    between_layers = local // layout.tp if role.sequence_parallel else local
    outputs, longest = -(-planned.outputs // layout.cp), planned.longest or planned.tokens
    return RankTokens(local * layout.cp, local, between_layers, outputs, local + shared_extra, longest)


class AdaptedOutput(NamedTuple):
    """The output of an adapted linear layer, which DoRA saves for the gradient of its magnitudes."""

    in_mlp: bool  # the layer belongs to the MLP or the experts
    is_expert: bool  # the layer belongs to each routed expert
    is_split: bool  # tensor-parallel ranks have different rows, of all tokens
    rows: int  # rows over all ranks, of one expert


@lru_cache(maxsize=16)
def adapted_outputs(model: ModelConfig, value_head: bool, lora: LoraOptions) -> Mapping[int, Sequence[AdaptedOutput]]:
    """Return the adapted linear layers of each decoder layer, by its global number."""
    weights, whole = WeightMap(model, value_head), ParallelLayout()
    rows = {param.name: param.shape[0] for param in weights.megatron_params(whole, 0)}
    result = defaultdict[int, list[AdaptedOutput]](list)
    for adapter in AdapterMap(weights, lora).adapters(whole, 0):
        parts = adapter.weight.split(".")
        if parts[0] == "decoder" and (not adapter.is_expert or ".local_experts.0." in adapter.weight):
            is_split = adapter.split is AdapterSplit.COLUMN
            output = AdaptedOutput(parts[3] == "mlp", adapter.is_expert, is_split, rows[adapter.weight])
            result[int(parts[2])].append(output)
    return result


@dataclass(frozen=True)
class LayerBytes:
    """Activation sizes of one decoder layer on one rank."""

    role: PlannedRole
    tokens: RankTokens
    fused: bool  # see the module docstring
    recomputed: frozenset[str]  # modules, by Megatron's names

    def of(self, layer: int) -> int:
        """Return the bytes that a layer saves, by its global number."""
        model = self.role.model
        if model.linear is not None and model.is_linear(layer):
            attention = self._delta_net(model.linear)
        else:
            attention = self._attention(layer) if model.latent is None else self._latent_attention()
        both = model.input_norms and model.output_norms
        output_norms = 2 * (self._hidden + self.tokens.between_layers * FLOAT32) if both else 0
        mlp = self._experts() if model.has_experts(layer) else self._dense()
        return attention + output_norms + mlp + self._rescaled(layer)

    @property
    def width(self) -> int:
        """Bytes per element."""
        return self.role.dtype_bytes

    @property
    def _hidden(self) -> int:
        return self.tokens.between_layers * self.role.model.hidden_size * self.width

    def _norm(self) -> int:
        """Return the bytes of a norm over the hidden states: its input, and one number per token unless recomputed."""
        scale = 0 if "layernorm" in self.recomputed and not self.fused else self.tokens.between_layers * FLOAT32
        return self._hidden + scale

    def _normed(self) -> int:
        """Return the bytes of a norm's output, which the next linear layer saves; a fused layer saves it only once."""
        model = self.role.model
        if self._gathers:
            return self.tokens.local * model.hidden_size * self.width
        return 0 if "layernorm" in self.recomputed and not self.fused else self._hidden

    @property
    def _gathers(self) -> bool:
        """Whether linear layers save the tensor gathered over the sequence: CPU layers in float32."""
        return self.role.sequence_parallel and not self.fused and self.width == FLOAT32

    def _rescaled(self, layer: int) -> int:
        """Return the bytes of the outputs that DoRA rescales."""
        model, layout, tokens, lora = self.role.model, self.role.layout, self.tokens, self.role.lora
        if lora is None or not lora.has_magnitudes:
            return 0
        recomputes_mlp = ("moe" if model.has_experts(layer) else "mlp") in self.recomputed
        total = 0
        for output in adapted_outputs(model, self.role.value_head, lora).get(layer, ()):
            if output.in_mlp and recomputes_mlp:
                continue
            if output.is_expert:
                elements = self._routed * output.rows // (layout.expert_tp if output.is_split else 1)
            elif output.is_split:
                elements = tokens.local * output.rows // layout.tp
            else:
                elements = tokens.between_layers * output.rows
            total += elements * self.width
        return total

    # ---- attention

    def _attention(self, layer: int) -> int:
        """Return the bytes of norm, projection, rotary embedding, core attention and the output projection's input."""
        model, tp = self.role.model, self.role.layout.tp
        heads, groups = model.num_attention_heads // tp, max(1, model.num_key_value_heads // tp)
        local = self.tokens.local * self.width
        query, key = local * heads * model.head_dim, local * groups * model.head_dim
        mixed = query + 2 * key  # one tensor; keys and values are views of it
        total = self._norm() + self._normed() + query
        if model.output_gate:
            # The gate is a view of the projection's output, or copied; its sigmoid; the output before the gate.
            mixed += query
            total += (query if heads != groups and groups > 1 else 0) + 2 * query
        if model.qk_norm:
            # Queries of several keys are copied out of the projection's output if several heads share a key.
            statistics = 2 if model.qk_norm_over_heads else heads + groups
            copied = query if heads != groups and groups > 1 else 0
            total += copied + self.tokens.local * FLOAT32 * statistics
        if "core_attn" in self.recomputed:
            # Queries and keys are saved before instead of after the rotary embedding; keys are views unless normed.
            unrotated = query if heads != groups or model.qk_norm else 0
            return total + mixed + unrotated + (key if model.qk_norm else 0)
        if self.fused:
            return total + mixed + query + key + self.tokens.local * heads * FLOAT32
        window = model.window.size if model.window is not None and model.has_window(layer) else self.tokens.longest
        # The chunks of a window are copied into one output.
        chunks = query if self.tokens.longest > window else 0
        return total + self._cpu_attention(query, key, mixed, heads) + chunks

    def _cpu_attention(self, query: int, key: int, mixed: int, heads: int) -> int:
        """Return the bytes of rotated queries and keys, values, outputs and softmax sums.

        Sequences of mixed lengths, context-parallel halves and shared prompts add copies.
        """
        tokens, normed = self.tokens, self.role.model.qk_norm
        sums = tokens.local * heads * FLOAT32
        if self.role.layout.cp > 1:
            # Keys and values of all ranks, in order; only norms save the local ones.
            gathered = 2 * key * tokens.padded_total // tokens.local
            return (mixed if normed else 0) + query + gathered + query + sums
        if tokens.attended > tokens.local:
            spread = (2 * query + 2 * key) * tokens.attended // tokens.local
            return (mixed if normed else 0) + spread + tokens.attended * heads * FLOAT32
        return mixed + query + key + (query if tokens.mixed_lengths else 0) + sums

    def _delta_net(self, linear: LinearAttention) -> int:
        """Return the bytes of norm, projections, convolution, delta rule, gated norm and the last projection's input.

        Torch's delta rule saves its inputs and computes its products again; flash-linear-attention's saves normed
        queries and keys, and the solution of each chunk's system.
        """
        tp, tokens = self.role.layout.tp, self.tokens
        mixed, heads = linear.mixed_width // tp, linear.value_heads // tp
        values = heads * linear.value_dim
        total = self._norm() + self._normed() * (2 if self._gathers else 1)
        total += tokens.local * (mixed + values + 2 * heads) * self.width  # the projections' outputs
        # The gated norm: its input, normed, weighted, the activated gate, and its output.
        halves = 1 if self.width == FLOAT32 else 2
        total += tokens.local * values * (FLOAT32 * (2 + 2 // halves + (halves - 1)) + self.width)
        total += tokens.local * heads * FLOAT32
        if "core_attn" in self.recomputed:
            return total
        gates = 3 * heads * FLOAT32
        if self.fused:
            normed = 2 * heads * linear.key_dim + heads * CHUNK
            return total + tokens.attended * ((mixed + normed) * self.width + gates)
        # Inputs of the convolution with each sequence's history, its output before and after the activation.
        return total + tokens.attended * (3 * mixed * self.width + gates)

    def _latent_attention(self) -> int:
        """Return the bytes of multi-head latent attention: latents, norms, queries, keys, values and outputs."""
        model, tp, tokens = self.role.model, self.role.layout.tp, self.tokens
        latent = model.latent
        assert latent is not None
        heads = model.num_attention_heads // tp
        between_layers, local = tokens.between_layers * self.width, tokens.local * self.width
        # Both kinds of layers use torch's norm for latents; two projections read the output of the layer norm.
        read = local if self._gathers else between_layers
        total = self._norm() + (0 if "layernorm" in self.recomputed and not self.fused else self._hidden)
        if latent.q_lora_rank:
            total += (between_layers + read) * latent.q_lora_rank + tokens.between_layers * FLOAT32
        total += between_layers * (latent.kv_lora_rank + latent.rope_dim) + read * latent.kv_lora_rank
        total += tokens.between_layers * FLOAT32
        value = local * heads * latent.v_dim
        total += 2 * local * heads * model.head_dim + value  # queries, keys, values
        total += value  # attention's output, the last projection's input
        if "core_attn" in self.recomputed:
            return total
        if not self.fused and latent.v_dim != model.head_dim:
            return total + tokens.attended * min(tokens.longest, tokens.attended) * heads * self.width
        joined = value if tokens.mixed_lengths and not self.fused else 0
        return total + joined + tokens.local * heads * FLOAT32

    # ---- MLP and experts

    def _dense(self) -> int:
        """Return the bytes of norm and gated MLP: norm input and output, both halves before the activation, output."""
        inner = 0 if "mlp" in self.recomputed else self._gated(self.tokens.local, self.role.model.ffn_hidden_size)
        if "mlp" in self.recomputed and self._gathers:
            return self._norm() + (0 if "layernorm" in self.recomputed else self._hidden)
        return self._norm() + self._normed() + inner

    def _gated(self, tokens: int, ffn: int) -> int:
        return tokens * self.width * 3 * (ffn // self.role.layout.tp)

    @property
    def _routed(self) -> int:
        """Tokens of all experts of a rank, with balanced routing."""
        experts = self.role.model.experts
        assert experts is not None
        gathered = self.role.layout.expert_tp if self.role.sequence_parallel else 1
        return self.tokens.between_layers * experts.per_token * gathered

    def _experts(self) -> int:
        """Return the bytes of norm, router, routed and shared experts, with balanced routing."""
        experts = self.role.model.experts
        assert experts is not None
        if "moe" in self.recomputed:
            return self._norm() + self._hidden
        etp = self.role.layout.expert_tp
        # before and after the activation; without a fused one, one more tensor, weighted by the router
        fused = self.fused and experts.clamped is None
        tensors = 2 if "moe_act" in self.recomputed else 3 if fused else 4
        inner = tensors * (experts.ffn_hidden_size // etp)
        total = self._norm() + self._router()
        total += self._routed * (self.width * (self.role.model.hidden_size + inner) + FLOAT32 + 2 * INT64)
        if experts.shared_ffn_hidden_size:
            # Without a float32 copy, the router also reads the norm's output.
            total += self._normed() + (self._hidden if self._gathers else 0)
            total += self._hidden + self.tokens.between_layers * FLOAT32 if experts.shared_gate else 0
            return total + self._gated(self.tokens.local, experts.shared_ffn_hidden_size)
        return total + (self._hidden if self.width == FLOAT32 else 0)

    def _router(self) -> int:
        """Return the bytes of float32 copies of router input and weight, of scores and choices."""
        model, tokens = self.role.model, self.tokens.between_layers
        experts = model.experts
        assert experts is not None
        copies = (tokens + experts.count) * model.hidden_size * FLOAT32 if self.width != FLOAT32 else 0
        return copies + tokens * (experts.count * (2 * FLOAT32 + 1) + experts.per_token * (INT64 + 2 * FLOAT32))


class PassActivations(NamedTuple):
    """Bytes of a pass on a rank, in addition to weights, gradients and optimizer state."""

    layers: int  # saved by layers for the backward, over all micro-batches in flight
    recomputed: int  # recomputed at a time, by full or selective recomputation
    ends: int  # saved by embedding, final norm, the head's input and the exact KL, for one micro-batch
    logits: int  # logits, and tensors of log-probs, entropies or the exact KL, for one micro-batch
    working: int  # working memory of one layer

    @property
    def total(self) -> int:
        """Bytes at the peak: at the end of a forward or in the backward."""
        return self.layers + max(self.ends + self.logits, self.recomputed + self.working)

    @property
    def at_logits(self) -> bool:
        """Whether the peak is at the logits."""
        return self.ends + self.logits >= self.recomputed + self.working


def pass_activations(job: PlannedJob, role: PlannedRole, planned: PlannedPass, stage: int) -> PassActivations:
    """Return the activations of a pass on a rank of a stage, for the largest allowed micro-batches."""
    fused = job.device != "cpu"
    return role_activations(role, planned, stage, fused=fused, shared=0 if fused else shared_extra(job, role, planned))


def role_activations(
    role: PlannedRole, planned: PlannedPass, stage: int, *, fused: bool, shared: int = 0
) -> PassActivations:
    """Return the activations of a pass of a role outside a job; ``shared`` prompts add tokens in attention."""
    tokens = tokens_on_rank(role, planned, shared)
    layers = recomputed = ends = logits = 0
    if planned.updates:
        layers, recomputed = kept_by_layers(role, tokens, stage, planned.micro_batches, fused=fused)
        ends = end_bytes(role, tokens, stage)
        if stage == 0 and role.trains_tower and role.model.vision is not None:
            recomputes = role.megatron.recompute_granularity == "full"
            tower = saved_bytes(role.model.vision, role.dtype_bytes, recomputes=recomputes)
            flights = in_flight(role.layout.pp, role.layout.vpp, stage, planned.micro_batches)[0]
            layers += flights * planned.tokens * tower.saved
            recomputed = max(recomputed, planned.tokens * tower.recomputed)
    if stage == role.layout.pp - 1:
        # The micro-batch has the hidden states of all context-parallel ranks, and this rank copies its part.
        ends += planned.kl_hidden_bytes * (planned.outputs + tokens.outputs)
        logits = logits_bytes(role, planned, tokens)
    working = working_bytes(role, tokens, backward=planned.updates, fused=fused)
    return PassActivations(layers, recomputed, ends, logits, working)


def shared_extra(job: PlannedJob, role: PlannedRole, planned: PlannedPass) -> int:
    """Return the additional tokens in attention if samples share their prompt and all have maximum length."""
    if not job.micro_batches(role, planned).share_prompts:
        return 0
    n, prompt, response = job.batches.samples_per_prompt, job.longest_prompt, job.longest_response
    return planned.tokens // (prompt + n * response) * (n - 1) * prompt


def kept_by_layers(
    role: PlannedRole, tokens: RankTokens, stage: int, micro_batches: int, *, fused: bool
) -> tuple[int, int]:
    """Return a stage's bytes saved over all micro-batches in flight, and the bytes recomputed at a time."""
    layout = role.layout
    chunks = [layout.layers(role.model.num_layers, stage, chunk) for chunk in range(layout.vpp)]
    if role.megatron.recompute_granularity == "full":
        full = LayerBytes(role, tokens, fused, NOTHING)
        pairs = [_full_recompute(role, [full.of(layer) for layer in layers], tokens) for layers in chunks]
    else:
        pairs = [_selective(role, layers, tokens, fused) for layers in chunks]
    counts = in_flight(layout.pp, layout.vpp, stage, micro_batches)
    saved = sum(count * size for count, (size, _) in zip(counts, pairs, strict=True))
    # Cosine and sine of every token in float32, shared by a chunk's layers of one kind.
    kinds = 1 if role.model.window is None or role.model.window.rope_theta is None else 2
    tables = 0 if fused else sum(counts) * kinds * tokens.local * role.model.rotary_dim * FLOAT32
    return saved + tables, max((recomputed for _, recomputed in pairs), default=0)


def _selective(role: PlannedRole, layers: range, tokens: RankTokens, fused: bool) -> tuple[int, int]:
    """Return the bytes that a chunk saves, and the largest recomputed module; modules are recomputed one by one."""
    selective = role.megatron.recompute_granularity == "selective"
    modules = frozenset(role.megatron.recompute_modules) if selective else NOTHING
    saved = LayerBytes(role, tokens, fused, modules)
    sizes = [
        LayerBytes(role, tokens, fused, modules - {module}).of(layer) - saved.of(layer)
        for layer in layers
        for module in modules
    ]
    return sum(saved.of(layer) for layer in layers), max(sizes, default=0)


def _full_recompute(role: PlannedRole, sizes: list[int], tokens: RankTokens) -> tuple[int, int]:
    """Return the bytes that a chunk saves between forward and backward, and the bytes recomputed at a time."""
    megatron = role.megatron
    number = megatron.recompute_num_layers or 1
    saved = tokens.between_layers * role.model.hidden_size * role.dtype_bytes
    if megatron.recompute_method == "block":
        # When the last recomputed layer is recomputed, the backward of all later layers is done.
        later = sum(sizes[number:])
        recomputed = max(sizes[:number], default=saved) - saved - later
        return saved * min(number, len(sizes)) + later, max(0, recomputed)
    groups = [sizes[start : start + number] for start in range(0, len(sizes), number)]
    return saved * len(groups), max((sum(group) - saved for group in groups), default=0)


def in_flight(pp: int, vpp: int, stage: int, micro_batches: int) -> list[int]:
    """Return the maximum number of micro-batches in flight for each chunk of a stage.

    With 1F1B, a stage runs as many forwards ahead as stages follow it. The interleaved schedule runs ``pp``
    micro-batches of each chunk in turn. It runs ``2 * (pp - stage - 1) + (vpp - 1) * pp`` forwards ahead, plus the
    current one.
    """
    if vpp == 1:
        return [min(micro_batches, pp - stage)]
    ahead = min(micro_batches * vpp, 2 * (pp - stage - 1) + (vpp - 1) * pp + 1)
    counts = [0] * vpp
    for step in range(ahead):
        counts[step // pp % vpp] += 1
    return counts


def end_bytes(role: PlannedRole, tokens: RankTokens, stage: int) -> int:
    """Return the bytes that embedding, final norm and head save for a micro-batch."""
    hidden, width = role.model.hidden_size, role.dtype_bytes
    total = 0
    if stage == 0:
        total += tokens.local * INT64
    if stage == role.layout.pp - 1:
        total += tokens.between_layers * (hidden * width + FLOAT32)
        total += tokens.outputs * (hidden * (FLOAT32 if role.value_head else width) + INT64)
    return total


def padded_vocab(role: PlannedRole) -> int:
    """Return the vocabulary size, padded for the role's layout."""
    return WeightMap(role.model).padded_vocab(role.layout.tp)


def logits_bytes(role: PlannedRole, planned: PlannedPass, tokens: RankTokens) -> int:
    """Return the peak bytes of logits and the tensors computed from them, for one micro-batch on the last stage.

    The gradient overwrites the logits. All else is float32, for a chunk of tokens at a time: the shifted logits and
    their exponentials; in the backward the gradient too, and with entropies one more tensor. The exact KL adds the
    reference's logits and a tensor in the forward. The gradient of the output layer's weight comes after all of these.
    A pass for hidden states has no logits; it gathers the states of all context-parallel ranks.
    """
    if planned.hidden_only:
        return planned.outputs * role.model.hidden_size * role.dtype_bytes
    if role.value_head:
        return tokens.outputs * FLOAT32 * 4
    width = role.dtype_bytes
    columns = padded_vocab(role) // role.layout.tp
    moments = [2 * FLOAT32]
    if planned.updates:
        moments.append((4 if planned.with_entropy else 3) * FLOAT32)
    if planned.full_kl:
        moments.append(3 * FLOAT32 + width)
    chunk = min(tokens.outputs, logits_chunk_rows(columns)) * columns
    weight_gradient = columns * width * role.model.hidden_size if planned.updates else 0
    return tokens.outputs * columns * width + max(chunk * max(moments), weight_gradient)


def working_bytes(role: PlannedRole, tokens: RankTokens, *, backward: bool, fused: bool) -> int:
    """Return the working memory of one layer: widest tensors, or their gradients and the largest weight gradient."""
    model, layout, width = role.model, role.layout, role.dtype_bytes
    mlp = tokens.local * width * 3 * (model.ffn_hidden_size // layout.tp)
    if model.experts is not None:
        inner = 3 * model.experts.ffn_hidden_size // layout.expert_tp
        mlp = max(mlp, tokens.between_layers * model.experts.per_token * width * (2 * model.hidden_size + inner))
    norm = tokens.between_layers * model.hidden_size * 3 * FLOAT32
    gathered = tokens.local * model.hidden_size * width if role.sequence_parallel else 0
    # Without a backward, none of these tensors counts as saved by layers.
    hidden = (2 if backward else 5) * tokens.between_layers * model.hidden_size * width
    return hidden + gathered + max(mlp, norm) + (_largest_weight(role, fused) * width if backward else 0)


def _largest_weight(role: PlannedRole, fused: bool) -> int:
    """Return the elements of the largest weights of a layer; the gradients of fused experts are computed together."""
    model, layout = role.model, role.layout
    dense = 2 * model.ffn_hidden_size // layout.tp * model.hidden_size
    if model.experts is None:
        return dense
    together = model.experts.count // layout.ep if fused else 1
    expert = 2 * model.experts.ffn_hidden_size // layout.expert_tp * model.hidden_size * together
    return expert if all(model.experts.layers) else max(dense, expert)
