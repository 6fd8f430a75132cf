"""What the backward pass needs of a micro-batch: bytes kept by each layer, and the most that a rank holds at a time.

The formulas follow the layers that megarl builds, tensor by tensor: each function below lists what autograd saves,
storage by storage, in elements per token. ``torch`` is the layer specification of a CPU, ``fused`` that of a GPU
(Transformer Engine, or torch with one kernel for packed attention), which differ in attention and in the experts.
Dropout is always off, so there are no masks; scores are never kept, since all attention here is of the flash kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megarl.models import ModelConfig
from megarl.plan.job import PlannedJob, PlannedPass, PlannedRole

FLOAT32, INT64 = 4, 8
SELECTIVE = ("core_attn", "mlp", "moe", "moe_act", "layernorm", "mla_up_proj")


class Tokens(NamedTuple):
    """Tokens of a micro-batch on one rank.

    Attributes:
        whole: over all context-parallel ranks, padding included.
        here: of this rank's part of the sequences.
        between: of those that this rank has between layers: divided by sequence parallelism.
        outputs: response tokens whose logits or values this rank takes.
        attended: tokens of whole sequences in attention: more than ``here`` where prompts are stored once.
        runs: whether sequences are of more than one length.
    """

    whole: int
    here: int
    between: int
    outputs: int
    attended: int
    runs: bool = True


def tokens_on_rank(role: PlannedRole, one: PlannedPass, shared_extra: int = 0, *, runs: bool = True) -> Tokens:
    """How a pass's largest micro-batch is divided.

    Args:
        role: the model and its layout.
        one: the pass.
        shared_extra: tokens that attention sees besides, where prompts are stored once.
        runs: see :class:`Tokens`.
    """
    layout = role.layout
    here = -(-one.tokens // layout.cp)
    if role.sequence_parallel:
        here = -(-here // layout.tp) * layout.tp
    between = here // layout.tp if role.sequence_parallel else here
    return Tokens(here * layout.cp, here, between, -(-one.outputs // layout.cp), here + shared_extra, runs)


@dataclass(frozen=True)
class LayerShape:
    """Widths of one decoder layer on one rank, in elements per token."""

    hidden: int
    query: int
    key_value: int
    value: int
    heads: int
    ffn: int
    width: int
    qk_norm: bool

    @classmethod
    def of(cls, role: PlannedRole) -> LayerShape:
        """That of a role's model; widths of experts are in :func:`_experts`."""
        model, tp = role.model, role.layout.tp
        kv_heads = max(1, model.num_key_value_heads // tp)
        return cls(
            hidden=model.hidden_size,
            query=model.num_attention_heads // tp * model.head_dim,
            key_value=kv_heads * model.head_dim,
            value=model.num_attention_heads // tp * (model.latent.v_dim if model.latent else model.head_dim),
            heads=model.num_attention_heads // tp,
            ffn=model.ffn_hidden_size // tp,
            width=role.dtype_bytes,
            qk_norm=model.qk_norm,
        )


def layer_bytes(role: PlannedRole, layer: int, tokens: Tokens, *, fused: bool) -> int:
    """Bytes that one decoder layer keeps of a micro-batch until its backward, with the role's selective recomputation.

    Args:
        role: the model, its layout and what it computes again.
        layer: global number.
        tokens: of the micro-batch.
        fused: see the module.
    """
    shape = LayerShape.of(role)
    again = _recomputed(role)
    attention = _latent_attention if role.model.latent is not None else _attention
    has_experts = role.model.has_experts(layer)
    mlp = _experts(role, shape, tokens, again, fused) if has_experts else _dense(shape, tokens, again, fused)
    return attention(role, shape, tokens, again, fused) + mlp


def _recomputed(role: PlannedRole) -> frozenset[str]:
    megatron = role.megatron
    return frozenset(megatron.recompute_modules) if megatron.recompute_granularity == "selective" else frozenset()


def _norm(shape: LayerShape, tokens: Tokens) -> int:
    """Input and scale of a norm over the hidden states; its output is counted where it is read."""
    return tokens.between * (shape.hidden * shape.width + FLOAT32)


def _normed(shape: LayerShape, tokens: Tokens, again: frozenset[str], fused: bool) -> int:
    """A norm's output, the input of the linear layer behind it; a fused layer keeps it as its own."""
    return 0 if "layernorm" in again and not fused else tokens.between * shape.hidden * shape.width


def _attention(role: PlannedRole, shape: LayerShape, tokens: Tokens, again: frozenset[str], fused: bool) -> int:
    """Norm, projection, rotation, core attention, output projection.

    Kept of a token: the norm's input and output, the fused projection's output (values are a view of it), rotated
    queries and keys, attention's output, which is the last projection's input, and one number per head.
    """
    here = tokens.here * shape.width
    mixed = here * (shape.query + 2 * shape.key_value)
    total = _norm(shape, tokens) + _normed(shape, tokens, again, fused)
    if shape.qk_norm:
        # The query to be normed is a copy where several heads share a key; keys are a view of the projection's output.
        copied = shape.query != shape.key_value
        total += (here * shape.query if copied else 0) + tokens.here * FLOAT32 * (
            shape.heads + shape.key_value // role.model.head_dim
        )
    projected = here * shape.query
    if "core_attn" in again:
        # What goes into attention is kept instead: queries and keys before rotation.
        unrotated = here * shape.query if shape.query != shape.key_value or shape.qk_norm else 0
        keys = here * shape.key_value if shape.qk_norm else 0
        return total + mixed + unrotated + keys + projected
    return total + _core(role, shape, tokens, mixed, fused) + projected


def _core(role: PlannedRole, shape: LayerShape, tokens: Tokens, mixed: int, fused: bool) -> int:
    """Rotation and core attention, without the output that the next projection keeps."""
    width, cp = shape.width, role.layout.cp
    sums = tokens.here * shape.heads * FLOAT32
    here = tokens.here * width
    if fused:
        return mixed + here * (shape.query + shape.key_value) + sums
    if cp > 1:
        # Keys and values of all ranks in order; this rank's queries; both halves' outputs, which are then stacked.
        gathered = tokens.whole * width * 2 * shape.key_value
        kept = mixed if shape.qk_norm else 0
        return kept + here * shape.query + gathered + here * shape.query + sums
    if tokens.attended > tokens.here:
        spread = tokens.attended * width * (2 * shape.query + 2 * shape.key_value)
        return (mixed if shape.qk_norm else 0) + spread + tokens.attended * shape.heads * FLOAT32
    joined = here * shape.query if tokens.runs else 0
    return mixed + here * (shape.query + shape.key_value) + joined + sums


def _latent_attention(role: PlannedRole, shape: LayerShape, tokens: Tokens, again: frozenset[str], fused: bool) -> int:
    """Multi-head latent attention: latents, their norms, queries, keys and values of all heads, the output."""
    latent = role.model.latent
    assert latent is not None
    width = shape.width
    between, here = tokens.between * width, tokens.here * width
    total = _norm(shape, tokens) + _normed(shape, tokens, again, fused)
    if latent.q_lora_rank:
        # the latent, its norm's output (and scale)
        total += 2 * between * latent.q_lora_rank + tokens.between * FLOAT32
    total += between * (latent.kv_lora_rank + latent.rope_dim + latent.kv_lora_rank) + tokens.between * FLOAT32
    total += here * (2 * shape.query + shape.value)  # queries, keys, values
    total += here * shape.value  # attention's output
    if "core_attn" in again:
        return total
    joined = here * shape.value if tokens.runs and not fused else 0
    return total + joined + tokens.here * shape.heads * FLOAT32


def _dense(shape: LayerShape, tokens: Tokens, again: frozenset[str], fused: bool) -> int:
    """Norm and gated MLP: the norm's input and output, both halves before the activation, and its output."""
    inner = 0 if "mlp" in again else tokens.here * shape.width * 3 * shape.ffn
    normed = tokens.between * shape.hidden * shape.width if "mlp" in again else _normed(shape, tokens, again, fused)
    return _norm(shape, tokens) + normed + inner


def _experts(role: PlannedRole, shape: LayerShape, tokens: Tokens, again: frozenset[str], fused: bool) -> int:
    """Norm, router, routed and shared experts; as many tokens come to a rank as leave it (balanced routing)."""
    model = role.model
    experts = model.experts
    assert experts is not None
    width, between = shape.width, tokens.between
    if "moe" in again:
        return _norm(shape, tokens) + between * shape.hidden * width
    routed = between * experts.per_token * (role.layout.expert_tp if role.sequence_parallel else 1)
    inner = experts.ffn_hidden_size // role.layout.expert_tp
    total = _norm(shape, tokens) + _router(model, between, width)
    kept = 3 if fused else 4  # before and behind the activation; without a fused kernel also what the router weighs
    if "moe_act" in again:
        kept = 2
    total += routed * width * (shape.hidden + kept * inner) + routed * (FLOAT32 + 2 * INT64)
    if experts.shared_ffn_hidden_size:
        total += _shared_experts(role, shape, tokens)
    elif width == FLOAT32:
        total += between * shape.hidden * width
    return total


def _router(model: ModelConfig, tokens: int, width: int) -> int:
    """Float32 copies of the router's input and weight, scores and choices."""
    experts = model.experts
    assert experts is not None
    copies = (tokens + experts.count) * model.hidden_size * FLOAT32 if width != FLOAT32 else 0
    return copies + tokens * (experts.count * (FLOAT32 + 1) + experts.per_token * (INT64 + 2 * FLOAT32))


def _shared_experts(role: PlannedRole, shape: LayerShape, tokens: Tokens) -> int:
    experts = role.model.experts
    assert experts is not None
    inner = experts.shared_ffn_hidden_size // role.layout.tp
    gate = tokens.between * (shape.hidden * shape.width + FLOAT32) if experts.shared_gate else 0
    return tokens.between * shape.hidden * shape.width + tokens.here * shape.width * 3 * inner + gate


class PassActivations(NamedTuple):
    """Most bytes that a rank holds for a pass at a time, besides states.

    Attributes:
        layers: kept for the backward by decoder layers, of all micro-batches under way.
        ends: kept by embedding, final norm and output layer, likewise.
        logits: logits and what log-probs, entropies or the exact KL keep and make of them, of one micro-batch.
        working: what one layer computes with besides, and the gradient of the largest weight.
    """

    layers: int
    ends: int
    logits: int
    working: int

    @property
    def total(self) -> int:
        """All of it; an upper bound, since these need not come at the same moment."""
        return self.layers + self.ends + self.logits + self.working


def pass_activations(job: PlannedJob, role: PlannedRole, one: PlannedPass, stage: int) -> PassActivations:
    """Activations of a pass on a rank of a pipeline stage.

    Args:
        job: the job.
        role: one of its roles.
        one: one of the role's passes.
        stage: pipeline stage of the rank.
    """
    fused = job.device != "cpu"
    tokens = tokens_on_rank(role, one, 0 if fused else shared_extra(job, role, one))
    last = stage == role.layout.pp - 1
    ends = logits = 0
    if last:
        logits = logits_bytes(role, one, tokens)
    if one.updates:
        ends = _ends(role, tokens, stage)
        layers = kept_by_layers(role, tokens, stage, one.micro_batches, fused=fused)
    else:
        layers = 0
    return PassActivations(layers, ends, logits, working_bytes(role, tokens, one.updates))


def shared_extra(job: PlannedJob, role: PlannedRole, one: PlannedPass) -> int:
    """Tokens that attention sees more than once, where samples of one prompt share it and all are at their longest."""
    phase = {"update_actor": "actor", "update_critic": "critic", "values": "critic", "ref": "ref_log_prob"}
    try:
        micro = job.batches.phase(phase.get(one.phase, one.phase)).micro
    except KeyError:
        return 0
    if not micro.share_prompts or role.layout.cp > 1:
        return 0
    n, prompt, response = job.batches.samples_per_prompt, job.longest_prompt, job.longest_response
    families = one.tokens // (prompt + n * response)
    return families * (n - 1) * prompt


def kept_by_layers(role: PlannedRole, tokens: Tokens, stage: int, micro_batches: int, *, fused: bool) -> int:
    """Bytes that decoder layers keep on a rank of a stage, of all micro-batches under way, at the worst moment."""
    layout, megatron = role.layout, role.megatron
    chunks = [layout.layers(role.model.num_layers, stage, chunk) for chunk in range(layout.vpp)]
    whole = [[layer_bytes(role, layer, tokens, fused=fused) for layer in layers] for layers in chunks]
    if megatron.recompute_granularity == "full":
        pairs = [_full_recompute(role, sizes, tokens) for sizes in whole]
    else:
        pairs = [(sum(sizes), 0) for sizes in whole]
    counts = in_flight(layout.pp, layout.vpp, stage, micro_batches)
    most_again = max((again for _, again in pairs), default=0)
    return sum(count * kept for count, (kept, _) in zip(counts, pairs, strict=True)) + most_again


def _full_recompute(role: PlannedRole, sizes: list[int], tokens: Tokens) -> tuple[int, int]:
    """Bytes that a chunk keeps between forward and backward, and those that come back at a time in its backward."""
    megatron = role.megatron
    number = megatron.recompute_num_layers or 1
    saved = tokens.between * role.model.hidden_size * role.dtype_bytes
    if megatron.recompute_method == "block":
        kept = saved * min(number, len(sizes)) + sum(sizes[number:])
        # While the last of the recomputed layers is computed again, those behind them are done.
        again = max(0, max(sizes[:number], default=0) - sum(sizes[number:]))
        return kept, again
    groups = [sizes[start : start + number] for start in range(0, len(sizes), number)]
    return saved * len(groups), max(map(sum, groups), default=0)


def in_flight(pp: int, vpp: int, stage: int, micro_batches: int) -> list[int]:
    """Micro-batches of which each of a stage's chunks keeps activations, when the stage keeps most.

    One forward, one backward: a stage is as many micro-batches ahead as there are stages behind it. Interleaved, it
    goes through its chunks, ``pp`` micro-batches of each in turn, and is ``2 * (pp - stage - 1) + (vpp - 1) * pp``
    chunks ahead.
    """
    if vpp == 1:
        return [min(micro_batches, pp - stage)]
    ahead = min(micro_batches * vpp, 2 * (pp - stage - 1) + (vpp - 1) * pp + 1)
    counts = [0] * vpp
    for step in range(ahead):
        counts[step // pp % vpp] += 1
    return counts


def _ends(role: PlannedRole, tokens: Tokens, stage: int) -> int:
    """What embedding, final norm and output layer keep, of all micro-batches under way."""
    hidden, width = role.model.hidden_size, role.dtype_bytes
    total = 0
    if stage == 0:
        total += tokens.here * 2 * INT64
    if stage == role.layout.pp - 1:
        total += tokens.between * (hidden * width + FLOAT32)  # the final norm
        total += tokens.outputs * hidden * (FLOAT32 if role.value_head else width)  # what the head reads
    return total


def logits_bytes(role: PlannedRole, one: PlannedPass, tokens: Tokens) -> int:
    """Most bytes of logits and what is made of them, of one micro-batch on the last stage.

    Log-probs are taken in float32: logits, a float32 copy and the shifted ones; with entropies the probabilities
    besides. The backward has probabilities, the gradient in float32 and in the weights' format, and with entropies
    three more while it makes their slope.
    """
    width = role.dtype_bytes
    if role.value_head:
        return tokens.outputs * FLOAT32 * 4
    columns = padded_vocab(role) // role.layout.tp
    copy = 0 if width == FLOAT32 else FLOAT32
    forward = width + FLOAT32 + (FLOAT32 if one.with_entropy else copy)
    backward = 0
    if one.updates:
        backward = FLOAT32 + FLOAT32 + (3 * FLOAT32 if one.with_entropy else (0 if width == FLOAT32 else width))
    extra = 0
    if one.full_kl:
        # logits of both models, their log-softmax in float32, and the ratio
        extra = 2 * width + 3 * FLOAT32 + (2 * FLOAT32 if one.updates else 0)
    return tokens.outputs * columns * max(forward, backward) + tokens.outputs * columns * extra


def padded_vocab(role: PlannedRole) -> int:
    """Rows of the vocabulary, padded as the role's layout asks for."""
    from megarl.models import WeightMap

    return WeightMap(role.model).padded_vocab(role.layout.tp)


def working_bytes(role: PlannedRole, tokens: Tokens, backward: bool) -> int:
    """What one layer computes with at a time: its widest tensors, twice in the backward."""
    shape, experts = LayerShape.of(role), role.model.experts
    mlp = tokens.here * shape.width * 4 * shape.ffn
    if experts is not None:
        routed = tokens.between * experts.per_token
        mlp = max(mlp, routed * shape.width * (2 * shape.hidden + 4 * experts.ffn_hidden_size))
    norm = tokens.between * shape.hidden * 3 * FLOAT32
    gathered = tokens.here * shape.hidden * shape.width if role.sequence_parallel else 0
    residual = 2 * tokens.between * shape.hidden * shape.width
    return residual + gathered + max(mlp, norm) * (2 if backward else 1)
