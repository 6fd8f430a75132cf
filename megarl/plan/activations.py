"""What one decoder layer keeps of a micro-batch until its backward.

The formulas follow the layers that megarl builds, tensor by tensor: each function lists what autograd saves, storage
by storage. ``fused`` layers are those of a GPU (Transformer Engine, or torch with one kernel for packed attention), the
others those of a CPU; they differ in attention, in experts, and in what sequence parallelism gathers. Dropout is off,
so there are no masks, and attention is of the flash kind, which keeps one number per token and head instead of scores,
but on a CPU where values are narrower than queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megarl.plan.job import PlannedPass, PlannedRole

FLOAT32, INT64 = 4, 8
NOTHING: frozenset[str] = frozenset()


class Tokens(NamedTuple):
    """Tokens of a micro-batch on one rank.

    Attributes:
        whole: over all context-parallel ranks, padding included.
        here: of this rank's part of the sequences.
        between: of those that this rank has between layers: divided by sequence parallelism.
        outputs: response tokens whose logits or values this rank takes.
        attended: tokens of whole sequences in attention: more than ``here`` where prompts are stored once.
        longest: of one sequence.
        runs: whether sequences are of more than one length.
    """

    whole: int
    here: int
    between: int
    outputs: int
    attended: int
    longest: int
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
    outputs = -(-one.outputs // layout.cp)
    return Tokens(here * layout.cp, here, between, outputs, here + shared_extra, one.longest or one.tokens, runs)


def recomputed_modules(role: PlannedRole) -> frozenset[str]:
    """What the backward computes again of every layer."""
    megatron = role.megatron
    return frozenset(megatron.recompute_modules) if megatron.recompute_granularity == "selective" else NOTHING


@dataclass(frozen=True)
class LayerBytes:
    """Sizes of one decoder layer on one rank, and what it keeps of a micro-batch.

    Args:
        role: the model, its layout, its number format.
        tokens: of the micro-batch.
        fused: see the module.
        again: modules that are computed again, by Megatron's names.
    """

    role: PlannedRole
    tokens: Tokens
    fused: bool
    again: frozenset[str]

    def of(self, layer: int) -> int:
        """Bytes that the layer, by its global number, keeps."""
        model = self.role.model
        attention = self._attention() if model.latent is None else self._latent_attention()
        return attention + (self._experts() if model.has_experts(layer) else self._dense())

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return self.role.dtype_bytes

    @property
    def _hidden(self) -> int:
        """The hidden states between layers."""
        return self.tokens.between * self.role.model.hidden_size * self.width

    def _norm(self) -> int:
        """A norm over the hidden states: its input, and a number per token unless it is computed again."""
        scale = 0 if "layernorm" in self.again and not self.fused else self.tokens.between * FLOAT32
        return self._hidden + scale

    def _normed(self) -> int:
        """A norm's output, where the linear layer behind it reads it; a fused layer keeps it as its own."""
        model = self.role.model
        if self._gathers:
            return self.tokens.here * model.hidden_size * self.width
        return 0 if "layernorm" in self.again and not self.fused else self._hidden

    @property
    def _gathers(self) -> bool:
        """Whether linear layers keep what they gathered over the sequence: a CPU's own, which are for float32."""
        return self.role.sequence_parallel and not self.fused and self.width == FLOAT32

    # ---- attention

    def _attention(self) -> int:
        """Norm, projection, rotation, core attention, and the last projection's input."""
        model, tp = self.role.model, self.role.layout.tp
        heads, groups = model.num_attention_heads // tp, max(1, model.num_key_value_heads // tp)
        here = self.tokens.here * self.width
        query, key = here * heads * model.head_dim, here * groups * model.head_dim
        mixed = query + 2 * key  # one tensor, of which keys and values are views
        total = self._norm() + self._normed() + query
        if model.qk_norm:
            # Queries are a copy of their part of the projection's output where several share a key.
            total += (query if heads != groups else 0) + self.tokens.here * FLOAT32 * (heads + groups)
        if "core_attn" in self.again:
            # Queries and keys are kept before their rotation instead of behind it; keys are views but of a norm.
            unrotated = query if heads != groups or model.qk_norm else 0
            return total + mixed + unrotated + (key if model.qk_norm else 0)
        if self.fused:
            return total + mixed + query + key + self.tokens.here * heads * FLOAT32
        return total + self._cpu_attention(query, key, mixed, heads)

    def _cpu_attention(self, query: int, key: int, mixed: int, heads: int) -> int:
        """Rotated queries and keys, values, outputs (which several runs, halves or shared prompts copy), sums."""
        tokens, normed = self.tokens, self.role.model.qk_norm
        sums = tokens.here * heads * FLOAT32
        if self.role.layout.cp > 1:
            # Keys and values of all ranks, in order; what they were gathered from is kept by norms alone.
            gathered = 2 * key * tokens.whole // tokens.here
            return (mixed if normed else 0) + query + gathered + query + sums
        if tokens.attended > tokens.here:
            spread = (2 * query + 2 * key) * tokens.attended // tokens.here
            return (mixed if normed else 0) + spread + tokens.attended * heads * FLOAT32
        return mixed + query + key + (query if tokens.runs else 0) + sums

    def _latent_attention(self) -> int:
        """Multi-head latent attention: latents and their norms, queries, keys and values of all heads, outputs."""
        model, tp, tokens = self.role.model, self.role.layout.tp, self.tokens
        latent = model.latent
        assert latent is not None
        heads = model.num_attention_heads // tp
        between, here = tokens.between * self.width, tokens.here * self.width
        # The latents' norms are torch's own in both kinds of layers; the layer's own norm is read by two projections.
        read = here if self._gathers else between
        total = self._norm() + (0 if "layernorm" in self.again and not self.fused else self._hidden)
        if latent.q_lora_rank:
            total += (between + read) * latent.q_lora_rank + tokens.between * FLOAT32
        total += between * (latent.kv_lora_rank + latent.rope_dim) + read * latent.kv_lora_rank
        total += tokens.between * FLOAT32
        value = here * heads * latent.v_dim
        total += 2 * here * heads * model.head_dim + value  # queries, keys, values
        total += value  # attention's output, the last projection's input
        if "core_attn" in self.again:
            return total
        if not self.fused and latent.v_dim != model.head_dim:
            return total + tokens.attended * min(tokens.longest, tokens.attended) * heads * self.width
        joined = value if tokens.runs and not self.fused else 0
        return total + joined + tokens.here * heads * FLOAT32

    # ---- what comes behind attention

    def _dense(self) -> int:
        """Norm and gated MLP: the norm's input and output, both halves before the activation, and its output."""
        inner = 0 if "mlp" in self.again else self._gated(self.tokens.here, self.role.model.ffn_hidden_size)
        if "mlp" in self.again and self._gathers:
            return self._norm() + (0 if "layernorm" in self.again else self._hidden)
        return self._norm() + self._normed() + inner

    def _gated(self, tokens: int, ffn: int) -> int:
        """Both halves before the activation, and its output."""
        return tokens * self.width * 3 * (ffn // self.role.layout.tp)

    def _experts(self) -> int:
        """Norm, router, routed and shared experts; as many tokens come to a rank as leave it (balanced routing)."""
        experts, tokens = self.role.model.experts, self.tokens
        assert experts is not None
        if "moe" in self.again:
            return self._norm() + self._hidden
        etp = self.role.layout.expert_tp
        routed = tokens.between * experts.per_token * (etp if self.role.sequence_parallel else 1)
        # before and behind the activation; unfused, what the router weighs is one tensor more
        kept = 2 if "moe_act" in self.again else 3 if self.fused else 4
        inner = kept * (experts.ffn_hidden_size // etp)
        total = self._norm() + self._router()
        total += routed * (self.width * (self.role.model.hidden_size + inner) + FLOAT32 + 2 * INT64)
        if experts.shared_ffn_hidden_size:
            return total + self._shared_experts(experts.shared_ffn_hidden_size, experts.shared_gate)
        return total + (self._hidden if self.width == FLOAT32 else 0)

    def _router(self) -> int:
        """Float32 copies of its input and weight, scores and choices."""
        model, tokens = self.role.model, self.tokens.between
        experts = model.experts
        assert experts is not None
        copies = (tokens + experts.count) * model.hidden_size * FLOAT32 if self.width != FLOAT32 else 0
        return copies + tokens * (experts.count * (2 * FLOAT32 + 1) + experts.per_token * (INT64 + 2 * FLOAT32))

    def _shared_experts(self, ffn: int, gate: bool) -> int:
        gated = self._hidden + self.tokens.between * FLOAT32 if gate else 0
        # Without a copy in float32 the router reads the norm's output, too.
        read = self._normed() + (self._hidden if self._gathers else 0)
        return read + self._gated(self.tokens.here, ffn) + gated
