"""Peak activation memory of a pass: saved layers, recomputed layers, logits and working memory.

A pipeline stage saves several micro-batches at a time. With recomputation, the peak is at one of two moments: at the
end of the last forward, logits included, or in the backward, when the logits are freed and the first layers are
recomputed.
"""

from __future__ import annotations

from typing import NamedTuple

from megarl.models import WeightMap
from megarl.models.partition import logits_chunk_rows
from megarl.ops.plan.job import PlannedJob, PlannedPass, PlannedRole
from megarl.ops.plan.layer_activations import (
    FLOAT32,
    INT64,
    NOTHING,
    LayerBytes,
    RankTokens,
    recomputed_modules,
    tokens_on_rank,
)


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
    """Return the activations of a pass, for a role outside a job.

    Args:
        fused: kind of layers; see :mod:`megarl.ops.plan.layer_activations`.
        shared: additional tokens in attention with shared prompts.
    """
    tokens = tokens_on_rank(role, planned, shared)
    layers = recomputed = ends = logits = 0
    if planned.updates:
        layers, recomputed = kept_by_layers(role, tokens, stage, planned.micro_batches, fused=fused)
        ends = end_bytes(role, tokens, stage)
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
    tables = 0 if fused else sum(counts) * _rotation_table(role, tokens)
    return saved + tables, max((recomputed for _, recomputed in pairs), default=0)


def _rotation_table(role: PlannedRole, tokens: RankTokens) -> int:
    """Return the bytes of cosine and sine of every token in float32, shared by a chunk's layers of one kind."""
    kinds = 1 if role.model.window is None or role.model.window.rope_theta is None else 2
    return kinds * tokens.local * role.model.rotary_dim * FLOAT32


def _selective(role: PlannedRole, layers: range, tokens: RankTokens, fused: bool) -> tuple[int, int]:
    """Return the bytes that a chunk saves, and the largest recomputed module; modules are recomputed one by one."""
    modules = recomputed_modules(role)
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
