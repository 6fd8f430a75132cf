"""The most that a rank holds of a pass's micro-batches: what layers keep, what comes back, logits, working memory.

A stage of a pipeline keeps several micro-batches at a time. With recomputation it holds most either when the last
forward ends, logits included, or in the backward, when these are gone and the first layers are computed again.
"""

from __future__ import annotations

from typing import NamedTuple

from megarl.models import WeightMap
from megarl.plan.activations import (
    FLOAT32,
    INT64,
    NOTHING,
    LayerBytes,
    Tokens,
    recomputed_modules,
    tokens_on_rank,
)
from megarl.plan.job import PlannedJob, PlannedPass, PlannedRole


class PassActivations(NamedTuple):
    """Bytes that a rank holds for a pass, besides states.

    Attributes:
        layers: kept for the backward, of all micro-batches under way.
        again: that come back at a time, where layers or parts of them are computed again.
        ends: kept by embedding, final norm and the head's input, of one micro-batch.
        logits: logits, and what log-probs, entropies or the exact KL keep and make of them, of one micro-batch.
        working: what one layer computes with at a time.
    """

    layers: int
    again: int
    ends: int
    logits: int
    working: int

    @property
    def total(self) -> int:
        """At the worst moment: at the end of a forward, or in the backward behind it."""
        return self.layers + self.behind_layers

    @property
    def behind_layers(self) -> int:
        """What the worst moment has besides what layers keep."""
        return max(self.ends + self.logits, self.again + self.working)

    @property
    def at_logits(self) -> bool:
        """Whether the worst moment is that of the logits."""
        return self.ends + self.logits >= self.again + self.working


def pass_activations(job: PlannedJob, role: PlannedRole, one: PlannedPass, stage: int) -> PassActivations:
    """Activations of a pass on a rank of a pipeline stage, of the largest micro-batches that there can be.

    Args:
        job: the job.
        role: one of its roles.
        one: one of the role's passes.
        stage: pipeline stage of the rank.
    """
    fused = job.device != "cpu"
    return role_activations(role, one, stage, fused=fused, shared=0 if fused else shared_extra(job, role, one))


def role_activations(
    role: PlannedRole, one: PlannedPass, stage: int, *, fused: bool, shared: int = 0
) -> PassActivations:
    """As :func:`pass_activations`, of a role by itself.

    Args:
        role: the model and its layout.
        one: what it computes.
        stage: pipeline stage of the rank.
        fused: whose layers; see :mod:`megarl.plan.activations`.
        shared: tokens that attention sees besides, where prompts are stored once.
    """
    tokens = tokens_on_rank(role, one, shared)
    layers = again = ends = logits = 0
    if one.updates:
        layers, again = kept_by_layers(role, tokens, stage, one.micro_batches, fused=fused)
        ends = _ends(role, tokens, stage)
    if stage == role.layout.pp - 1:
        logits = logits_bytes(role, one, tokens)
    working = working_bytes(role, tokens, backward=one.updates, fused=fused)
    return PassActivations(layers, again, ends, logits, working)


def saved_bytes(role: PlannedRole, one: PlannedPass, stage: int, *, fused: bool, runs: bool = True) -> int:
    """Bytes that autograd keeps alive on a rank of a stage at the worst moment, without working memory.

    Args:
        role: the model and its layout.
        one: an update.
        stage: pipeline stage of the rank.
        fused: whose layers; see :mod:`megarl.plan.activations`.
        runs: whether sequences are of more than one length.
    """
    tokens = tokens_on_rank(role, one, runs=runs)
    layers, again = kept_by_layers(role, tokens, stage, one.micro_batches, fused=fused)
    last = stage == role.layout.pp - 1 and not role.value_head
    numbers = padded_vocab(role) // role.layout.tp * FLOAT32 + INT64 + FLOAT32
    return layers + max(_ends(role, tokens, stage) + (tokens.outputs * numbers if last else 0), again)


def shared_extra(job: PlannedJob, role: PlannedRole, one: PlannedPass) -> int:
    """Tokens that attention sees more than once, where samples of one prompt share it and all are at their longest."""
    names = {"update_actor": "actor", "update_critic": "critic", "values": "critic", "ref": "ref_log_prob"}
    phase = names.get(one.phase, one.phase)
    plans = {plan.name: plan for plan in job.batches.phases}
    if phase not in plans or not plans[phase].micro.share_prompts:
        return 0
    n, prompt, response = job.batches.samples_per_prompt, job.longest_prompt, job.longest_response
    return one.tokens // (prompt + n * response) * (n - 1) * prompt


def kept_by_layers(
    role: PlannedRole, tokens: Tokens, stage: int, micro_batches: int, *, fused: bool
) -> tuple[int, int]:
    """Bytes of a stage's decoder layers.

    Returns:
        What they keep of all micro-batches under way, and what comes back at a time in the backward.
    """
    layout = role.layout
    chunks = [layout.layers(role.model.num_layers, stage, chunk) for chunk in range(layout.vpp)]
    if role.megatron.recompute_granularity == "full":
        whole = LayerBytes(role, tokens, fused, NOTHING)
        pairs = [_full_recompute(role, [whole.of(layer) for layer in layers], tokens) for layers in chunks]
    else:
        pairs = [_selective(role, layers, tokens, fused) for layers in chunks]
    counts = in_flight(layout.pp, layout.vpp, stage, micro_batches)
    kept = sum(count * size for count, (size, _) in zip(counts, pairs, strict=True))
    tables = 0 if fused else sum(counts) * _rotation_table(role, tokens)
    return kept + tables, max((again for _, again in pairs), default=0)


def _rotation_table(role: PlannedRole, tokens: Tokens) -> int:
    """Cosine and sine of every token, which all layers of a chunk share."""
    latent = role.model.latent
    return tokens.here * (latent.rope_dim if latent else role.model.head_dim) * role.dtype_bytes


def _selective(role: PlannedRole, layers: range, tokens: Tokens, fused: bool) -> tuple[int, int]:
    """What a chunk keeps, and the largest module that comes back; modules come back one after the other."""
    modules = recomputed_modules(role)
    kept = LayerBytes(role, tokens, fused, modules)
    back = [
        LayerBytes(role, tokens, fused, modules - {module}).of(layer) - kept.of(layer)
        for layer in layers
        for module in modules
    ]
    return sum(kept.of(layer) for layer in layers), max(back, default=0)


def _full_recompute(role: PlannedRole, sizes: list[int], tokens: Tokens) -> tuple[int, int]:
    """What a chunk keeps between forward and backward, and what comes back at a time in its backward."""
    megatron = role.megatron
    number = megatron.recompute_num_layers or 1
    saved = tokens.between * role.model.hidden_size * role.dtype_bytes
    if megatron.recompute_method == "block":
        # When the last of the recomputed layers comes back, those behind them are done.
        behind = sum(sizes[number:])
        again = max(sizes[:number], default=saved) - saved - behind
        return saved * min(number, len(sizes)) + behind, max(0, again)
    groups = [sizes[start : start + number] for start in range(0, len(sizes), number)]
    return saved * len(groups), max((sum(group) - saved for group in groups), default=0)


def in_flight(pp: int, vpp: int, stage: int, micro_batches: int) -> list[int]:
    """Micro-batches of which each of a stage's chunks keeps activations, when the stage keeps most.

    One forward, one backward: a stage is as many micro-batches ahead as there are stages behind it. Interleaved, it
    goes through its chunks, ``pp`` micro-batches of each in turn, and is ``2 * (pp - stage - 1) + (vpp - 1) * pp``
    of them ahead; one more is under way.
    """
    if vpp == 1:
        return [min(micro_batches, pp - stage)]
    ahead = min(micro_batches * vpp, 2 * (pp - stage - 1) + (vpp - 1) * pp + 1)
    counts = [0] * vpp
    for step in range(ahead):
        counts[step // pp % vpp] += 1
    return counts


def _ends(role: PlannedRole, tokens: Tokens, stage: int) -> int:
    """What embedding, final norm and the head keep of a micro-batch."""
    hidden, width = role.model.hidden_size, role.dtype_bytes
    total = 0
    if stage == 0:
        total += tokens.here * INT64
    if stage == role.layout.pp - 1:
        total += tokens.between * (hidden * width + FLOAT32)
        total += tokens.outputs * (hidden * (FLOAT32 if role.value_head else width) + INT64)
    return total


def padded_vocab(role: PlannedRole) -> int:
    """Rows of the vocabulary, padded as the role's layout asks for."""
    return WeightMap(role.model).padded_vocab(role.layout.tp)


def logits_bytes(role: PlannedRole, one: PlannedPass, tokens: Tokens) -> int:
    """Most bytes of logits and what is made of them, of one micro-batch on the last stage.

    Everything behind the logits is float32: the forward has their copy and the shifted ones, with entropies the
    probabilities and their product with the shifted ones instead of the copy. The backward has the probabilities and
    the gradient, also in the weights' format, or with entropies three tensors more while it makes their slope. The
    exact KL has the logits of both models, a log-softmax done and one under way; its backward comes first. With few
    tokens the gradient of the output layer's weight takes more than all of this.
    """
    if role.value_head:
        return tokens.outputs * FLOAT32 * 4
    width = role.dtype_bytes
    copy = 0 if width == FLOAT32 else 1
    moments = [width + FLOAT32 * (3 if one.with_entropy else 1 + copy)]
    if one.updates:
        moments.append(FLOAT32 * 5 if one.with_entropy else FLOAT32 * 2 + copy * width)
    if one.full_kl:
        moments.append(2 * width + FLOAT32 * (3 + copy + one.updates))
    if one.full_kl and one.updates:
        moments.append(FLOAT32 * 5 + (width if one.with_entropy else 0))
    columns = padded_vocab(role) // role.layout.tp
    behind = columns * width * (tokens.outputs + role.model.hidden_size) if one.updates else 0
    return max(tokens.outputs * columns * max(moments), behind)


def working_bytes(role: PlannedRole, tokens: Tokens, *, backward: bool, fused: bool) -> int:
    """What one layer computes with at a time: its widest tensors, or their gradients and that of the largest weight."""
    model, layout, width = role.model, role.layout, role.dtype_bytes
    mlp = tokens.here * width * 3 * (model.ffn_hidden_size // layout.tp)
    if model.experts is not None:
        inner = 3 * model.experts.ffn_hidden_size // layout.expert_tp
        mlp = max(mlp, tokens.between * model.experts.per_token * width * (2 * model.hidden_size + inner))
    norm = tokens.between * model.hidden_size * 3 * FLOAT32
    gathered = tokens.here * model.hidden_size * width if role.sequence_parallel else 0
    # Without a backward nothing of this is counted among what layers keep.
    around = (2 if backward else 5) * tokens.between * model.hidden_size * width
    return around + gathered + max(mlp, norm) + (_largest_weight(role, fused) * width if backward else 0)


def _largest_weight(role: PlannedRole, fused: bool) -> int:
    """Elements of the largest weights of a layer whose gradients come at a time; fused experts' come all together."""
    model, layout = role.model, role.layout
    dense = 2 * model.ffn_hidden_size // layout.tp * model.hidden_size
    if model.experts is None:
        return dense
    together = model.experts.count // layout.ep if fused else 1
    expert = 2 * model.experts.ffn_hidden_size // layout.expert_tp * model.hidden_size * together
    return expert if all(model.experts.layers) else max(dense, expert)
