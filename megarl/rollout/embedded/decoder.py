"""The forward pass of the embedded engine.

Parameters are read by their names in the trainer, which all families share. They are views of the live parameters that
weight updates write, so updates are visible at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.models import ModelConfig, WeightMap
from megarl.models.delta_rule import gated_norm, log_decay
from megarl.models.functional import choose_experts, score_experts, weigh_experts
from megarl.models.model_config import ClampedGate, Experts
from megarl.models.rope import attention_factor, inverse_frequencies, position_rows, window_frequencies
from megarl.rollout.embedded.kv_cache import Attention, TokenInputs

Rotate = Callable[[Tensor], Tensor]
"""Rotates heads ``[tokens, heads, width]`` by the positions of their tokens."""

Attend = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""Computes attention of one layer; :class:`~megarl.rollout.embedded.kv_cache.Attention` without the layer's number."""

KNOWN_PARAMETERS = frozenset(
    prefix + name
    for prefix, names in {
        "": "input_layernorm.weight self_attn_bda.norm.weight pre_mlp_layernorm.weight mlp_bda.norm.weight",
        "self_attention.linear_": "qkv.weight qkv.bias q_proj.weight q_down_proj.weight q_up_proj.weight "
        "kv_down_proj.weight kv_up_proj.weight proj.weight proj.bias",
        "self_attention.": "q_layernorm.weight k_layernorm.weight kv_layernorm.weight core_attention.softmax_offset "
        "in_proj_qkvz.weight in_proj_ba.weight conv1d.weight dt_bias A_log out_norm.weight out_proj.weight",
        "mlp.linear_": "fc1.weight fc2.weight",
        "mlp.router.": "weight bias expert_bias",
        "mlp.experts.local_experts.{expert}.linear_": "fc1.weight fc2.weight fc1.bias fc2.bias",
        "mlp.shared_experts.": "linear_fc1.weight linear_fc2.weight gate_weight",
    }.items()
    for name in names.split()
)
"""Parameters of a layer that the engine computes with; a custom family may declare others."""


class Norm:
    """RMS norm over the last dimension; the identity without a weight. By default ``eps`` is the model's."""

    def __init__(self, config: ModelConfig, weight: Tensor | None, eps: float | None = None) -> None:
        self.weight, self._eps = weight, config.rms_norm_eps if eps is None else eps
        self._zero_centered = config.zero_centered_norms

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x`` with a root mean square of 1, times the weight."""
        if self.weight is None:
            return x
        if self._zero_centered:
            return F.rms_norm(x.float(), self.weight.shape, self.weight.float() + 1.0, self._eps).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self._eps)


class PlainHeads:
    """Queries, keys and values of attention with one key-value head per group of query heads."""

    def __init__(self, config: ModelConfig, params: Mapping[str, Tensor]) -> None:
        self._qkv = params["self_attention.linear_qkv.weight"]
        self._bias = params.get("self_attention.linear_qkv.bias")
        self._sinks = params.get("self_attention.core_attention.softmax_offset")
        self._q_norm = Norm(config, params.get("self_attention.q_layernorm.weight"))
        self._k_norm = Norm(config, params.get("self_attention.k_layernorm.weight"))
        self._over_heads = config.qk_norm_over_heads
        self._gated, queries = config.output_gate, config.num_attention_heads * (2 if config.output_gate else 1)
        self._heads = [queries, config.num_key_value_heads, config.num_key_value_heads]
        self._head_dim = config.head_dim

    def __call__(self, x: Tensor, rotate: Rotate, attend: Attend, outputs: Tensor | None) -> Tensor:
        """Compute the input ``[outputs, heads * head_dim]`` of the output projection from ``[tokens, hidden]``."""
        qkv = F.linear(x, self._qkv, self._bias)
        q, k, v = qkv.view(len(x), -1, self._head_dim).split(self._heads, 1)
        gate: Tensor | None = None
        if self._gated:
            q, gate = q.unflatten(1, (-1, 2)).unbind(2)
        q, k = rotate(self._normed(q, self._q_norm)), rotate(self._normed(k, self._k_norm))
        attended = attend(q, k, v, self._sinks)
        if gate is None:
            return limited(attended, outputs)
        gate = limited(gate, outputs).flatten(1)
        return (limited(attended, outputs) * gate.float().sigmoid()).to(x.dtype)

    def _normed(self, heads: Tensor, norm: Norm) -> Tensor:
        return norm(heads.flatten(1)).view(heads.shape) if self._over_heads else norm(heads)


class LatentHeads:
    """Queries and keys of multi-head latent attention (https://arxiv.org/abs/2405.04434) in the latent space.

    The projection from the latent to the heads' keys is applied to the queries instead, and that to the values after
    the attention. So all heads share one key: the latent and the rotated part. Its first elements, the latent, are the
    values, and the cache holds nothing else.
    """

    def __init__(self, config: ModelConfig, params: Mapping[str, Tensor]) -> None:
        assert config.latent is not None
        self._latent = latent = config.latent
        self._heads, self._head_dim = config.num_attention_heads, config.head_dim
        prefix = "self_attention."
        self._q_down = params.get(prefix + "linear_q_down_proj.weight")
        self._q_norm = Norm(config, params.get(prefix + "q_layernorm.weight"), latent.norm_eps)
        self._q_up = params[prefix + ("linear_q_proj.weight" if self._q_down is None else "linear_q_up_proj.weight")]
        self._kv_down = params[prefix + "linear_kv_down_proj.weight"]
        self._kv_norm = Norm(config, params[prefix + "kv_layernorm.weight"], latent.norm_eps)
        up = params[prefix + "linear_kv_up_proj.weight"].view(self._heads, -1, latent.kv_lora_rank)
        self._key_up, self._value_up = up.split([latent.nope_dim, latent.v_dim], 1)

    def __call__(self, x: Tensor, rotate: Rotate, attend: Attend, outputs: Tensor | None) -> Tensor:
        """Compute the input ``[outputs, heads * v_dim]`` of the output projection from ``[tokens, hidden]``."""
        attended = limited(attend(*self._queries_and_keys(x, rotate), None, None), outputs)
        latents = attended.view(len(attended), self._heads, self._latent.kv_lora_rank)
        return torch.einsum("thl,hvl->thv", latents, self._value_up).flatten(1)

    def _queries_and_keys(self, x: Tensor, rotate: Rotate) -> tuple[Tensor, Tensor]:
        """Queries ``[tokens, heads, latent + rotated]`` and keys ``[tokens, 1, latent + rotated]``."""
        latent = self._latent
        queries = F.linear(x if self._q_down is None else self._q_norm(F.linear(x, self._q_down)), self._q_up)
        queries = queries.view(len(x), self._heads, self._head_dim)
        q_plain, q_rotated = queries.split([latent.nope_dim, latent.rope_dim], -1)
        compressed, k_rotated = F.linear(x, self._kv_down)[:, None].split([latent.kv_lora_rank, latent.rope_dim], -1)
        in_latent = torch.einsum("thn,hnl->thl", q_plain, self._key_up)
        q_rotated, k_rotated = (rotate(self._in_halves(part)) for part in (q_rotated, k_rotated))
        return torch.cat([in_latent, q_rotated], -1), torch.cat([self._kv_norm(compressed), k_rotated], -1)

    def _in_halves(self, heads: Tensor) -> Tensor:
        """Reorder interleaved pairs to halves, in queries and keys: their products stay the same."""
        return heads.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self._latent.interleaved else heads


class DeltaNet:
    """A gated delta net in place of a layer's attention, up to the output projection."""

    def __init__(self, config: ModelConfig, params: Mapping[str, Tensor], layer: int) -> None:
        assert config.linear is not None
        self._linear, self._layer, self._eps = config.linear, layer, config.rms_norm_eps
        prefix = "self_attention."
        self._qkvz, self._ba = params[prefix + "in_proj_qkvz.weight"], params[prefix + "in_proj_ba.weight"]
        self._conv = params[prefix + "conv1d.weight"][:, 0]
        self._a_log, self._dt_bias = params[prefix + "A_log"], params[prefix + "dt_bias"]
        self._norm = params[prefix + "out_norm.weight"]

    def __call__(self, x: Tensor, attention: Attention, outputs: Tensor | None) -> Tensor:
        """Compute the output projection's input ``[outputs, value heads * value_dim]`` from ``[tokens, hidden]``."""
        qkv, gate, b, a = self._projected(x)
        tokens = TokenInputs(self._linear, qkv, log_decay(a, self._a_log, self._dt_bias), b.sigmoid(), self._conv)
        values = attention.recur(self._layer, tokens)
        if outputs is not None:
            values, gate = values[outputs], gate[outputs]
        return gated_norm(values, gate.view(values.shape), self._norm, self._eps).flatten(1)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs of the convolution, output gates, learning rates and decays, ``[tokens, ...]`` of all heads."""
        linear, qkvz, ba = self._linear, F.linear(x, self._qkvz), F.linear(x, self._ba)
        if not linear.grouped:
            mixed = linear.mixed_width
            b, a = ba.chunk(2, -1)
            return qkvz[:, :mixed], qkvz[:, mixed:].contiguous(), b, a
        values = linear.values_per_key * linear.value_dim
        by_head = qkvz.unflatten(-1, (linear.key_heads, -1)).split([linear.key_dim, linear.key_dim, values, values], -1)
        query, key, value, gate = (part.flatten(1) for part in by_head)
        b, a = (part.flatten(1) for part in ba.unflatten(-1, (linear.key_heads, -1)).chunk(2, -1))
        return torch.cat([query, key, value], -1), gate, b, a


class GatedMLP:
    """A gated MLP with ``gate_up [2 * ffn, hidden]`` and ``down [hidden, ffn]``."""

    def __init__(self, gate_up: Tensor, down: Tensor, activation: str = "silu") -> None:
        self._gate_up, self._down, self._activation = gate_up, down.t(), activation

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[tokens, hidden]``."""
        return self._inner(x) @ self._down

    def add_to(self, residual: Tensor, x: Tensor, norm: Norm, routes: Tensor | None) -> Tensor:
        """Return the residual plus the normed output for ``x``; there are no routes to record."""
        return added(residual, self._inner(x), self._down, norm)

    def _inner(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self._gate_up).chunk(2, -1)
        gate = F.silu(gate) if self._activation == "silu" else F.gelu(gate, approximate="tanh")
        return gate.mul_(up)


class ClampedMLP:
    """An expert with biases and a clamped activation, see :class:`~megarl.models.model_config.ClampedGate`.

    Args:
        gate_up: ``[2 * ffn, hidden]``, with alternating rows of gate and up.
        down: ``[hidden, ffn]``.
    """

    def __init__(
        self, clamped: ClampedGate, gate_up: Tensor, gate_up_bias: Tensor, down: Tensor, down_bias: Tensor
    ) -> None:
        self._gate_up, self._down, self._clamped = (gate_up, gate_up_bias), (down, down_bias), clamped

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[tokens, hidden]``."""
        both, limit = F.linear(x, *self._gate_up), self._clamped.limit
        gate, up = both[:, ::2].clamp(max=limit), both[:, 1::2].clamp(-limit, limit)
        return F.linear((up + 1.0) * gate * (gate * self._clamped.alpha).sigmoid(), *self._down)


class RoutedExperts:
    """The experts of a layer: those that the router selects for each token, and shared ones.

    Tokens are sorted by expert, and each expert with tokens computes all of its own at once.

    Args:
        layer: index among the layers with experts.
    """

    def __init__(self, config: ModelConfig, params: Mapping[str, Tensor], layer: int) -> None:
        assert config.experts is not None
        self._rule, self._layer = config.experts, layer
        self._router, self._correction = params["mlp.router.weight"], params.get("mlp.router.expert_bias")
        self._router_bias = params.get("mlp.router.bias")
        self._experts = _experts(config.experts, params)
        shared = [params.get(f"mlp.shared_experts.{name}") for name in ("linear_fc1.weight", "linear_fc2.weight")]
        self._shared = None if shared[0] is None or shared[1] is None else GatedMLP(shared[0], shared[1])
        self._shared_gate = params.get("mlp.shared_experts.gate_weight")

    def add_to(self, residual: Tensor, x: Tensor, norm: Norm, routes: Tensor | None) -> Tensor:
        """Return the residual plus the normed output for ``x``, and record the selected experts in ``routes``."""
        output = self._routed(x, routes)
        if self._shared is not None:
            always = self._shared(x)
            output += always if self._shared_gate is None else always * F.linear(x, self._shared_gate).sigmoid()
        return residual + norm(output)

    def _routed(self, x: Tensor, routes: Tensor | None) -> Tensor:
        """Weighted sum of the selected experts' outputs; choice, weights and sum are in float32."""
        bias = None if self._router_bias is None else self._router_bias.float()
        scores = score_experts(F.linear(x.float(), self._router.float(), bias), self._rule)
        chosen = choose_experts(scores, self._rule, self._correction)
        if routes is not None:
            routes[:, self._layer] = chosen
        weights = weigh_experts(scores, chosen, self._rule).flatten()
        order = chosen.flatten().argsort(stable=True)
        tokens = order // self._rule.per_token
        parts = x[tokens].split(chosen.flatten().bincount(minlength=self._rule.count).tolist())
        outputs = [expert(part) for expert, part in zip(self._experts, parts, strict=True) if len(part)]
        if not outputs:  # a prefix needs the last layer's keys and values only
            return x
        weighted = torch.cat(outputs).float() * weights[order, None]
        return torch.zeros_like(x, dtype=torch.float32).index_add_(0, tokens, weighted).to(x.dtype)


def _experts(rule: Experts, params: Mapping[str, Tensor]) -> Sequence[GatedMLP | ClampedMLP]:
    """Build the routed experts from the parameters that stack all of them."""
    kinds = ("weight", "bias") if rule.biases else ("weight",)
    names = [f"mlp.experts.local_experts.{{expert}}.linear_fc{part}.{kind}" for part in (1, 2) for kind in kinds]
    stacked = zip(*(params[name] for name in names), strict=True)
    if rule.clamped is None:
        return [GatedMLP(*each) for each in stacked]
    return [ClampedMLP(rule.clamped, *each) for each in stacked]


def limited(rows: Tensor, outputs: Tensor | None) -> Tensor:
    """Return the rows at the required outputs; None = all."""
    return rows if outputs is None else rows[outputs]


def added(residual: Tensor, inputs: Tensor, weight: Tensor, norm: Norm, bias: Tensor | None = None) -> Tensor:
    """Return the residual plus the last matrix's output, with a bias or a norm on it, not both."""
    if bias is not None:
        residual = residual + bias
    if norm.weight is None:
        return torch.addmm(residual, inputs, weight)
    return residual + norm(inputs @ weight)


class RotaryTable:
    """Rotary position embeddings: float32 cosines and sines of every position, looked up per token.

    Rotations are computed in float32 and rounded once, as in training: rounded angles would add to the difference
    between the engine's log-probs and the trainer's.

    Args:
        frequencies: radians per position of each pair.
        factor: on the rotated elements.
    """

    def __init__(
        self, config: ModelConfig, frequencies: Tensor, factor: float, length: int, device: torch.device
    ) -> None:
        angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        self._cos = torch.cat([cos, cos], -1).to(device)
        # The sine of the first half is negative: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin).
        self._sin = torch.cat([-sin, sin], -1).to(device)
        self._width = config.rotary_dim
        rows = position_rows(config)
        # For `rotation`: each element's row of positions, and its own index.
        self._elements: tuple[Tensor, Tensor] | None = None
        if rows is not None:
            self._elements = torch.cat([rows, rows]).to(device), torch.arange(self._width, device=device)

    def rotation(self, positions: Tensor) -> Rotate:
        """Return a function that rotates heads: their first ``rotary_dim`` elements.

        Args:
            positions: ``[tokens]``, or ``[3, tokens]`` in time, height and width.
        """
        index: Any = positions
        if positions.dim() == 2:
            assert self._elements is not None, "a model of text only has one position per token"
            rows, elements = self._elements
            index = positions[rows].t(), elements
        cos, sin, width = self._cos[index][:, None], self._sin[index][:, None], self._width

        def rotate(heads: Tensor) -> Tensor:
            turned, rest = heads[..., :width], heads[..., width:]
            rotated = torch.addcmul(turned * cos, turned.roll(width // 2, -1).to(cos.dtype), sin).to(heads.dtype)
            return torch.cat([rotated, rest], -1) if rest.shape[-1] else rotated

        return rotate


class DecoderLayer:
    """One layer: attention or a gated delta net, then an MLP or experts."""

    def __init__(self, config: ModelConfig, params: Mapping[str, Tensor], layer: int) -> None:
        self._number = layer
        self._input_norm = Norm(config, params.get("input_layernorm.weight"))
        self._delta = DeltaNet(config, params, layer) if config.is_linear(layer) else None
        self._heads: PlainHeads | LatentHeads | None = None
        if self._delta is None:
            self._heads = PlainHeads(config, params) if config.latent is None else LatentHeads(config, params)
        projection = "linear_proj" if self._delta is None else "out_proj"
        self._output = params[f"self_attention.{projection}.weight"].t()
        self._output_bias = params.get(f"self_attention.{projection}.bias")
        self._attention_norm = Norm(config, params.get("self_attn_bda.norm.weight"))
        self._mlp_norm = Norm(config, params.get("pre_mlp_layernorm.weight"))
        self._output_norm = Norm(config, params.get("mlp_bda.norm.weight"))
        self._mlp: GatedMLP | RoutedExperts
        if config.experts is not None and config.has_experts(layer):
            self._mlp = RoutedExperts(config, params, sum(config.experts.layers[:layer]))
        else:
            self._mlp = GatedMLP(params["mlp.linear_fc1.weight"], params["mlp.linear_fc2.weight"], config.activation)

    def __call__(
        self, x: Tensor, rotate: Rotate, attention: Attention, outputs: Tensor | None, routes: Tensor | None
    ) -> Tensor:
        """Compute the layer for ``[tokens, hidden_size]``; see :meth:`TransformerDecoder.hidden`."""
        normed = self._input_norm(x)
        if self._heads is not None:
            mixed = self._heads(normed, rotate, partial(attention, self._number), outputs)
        else:
            assert self._delta is not None
            mixed = self._delta(normed, attention, outputs)
        x = added(limited(x, outputs), mixed, self._output, self._attention_norm, self._output_bias)
        return self._mlp.add_to(x, self._mlp_norm(x), self._output_norm, routes)


class TransformerDecoder:
    """A model of any family over packed tokens; it reads live parameters; positions are below ``max_length``."""

    def __init__(self, config: ModelConfig, params: Mapping[str, Tensor], max_length: int) -> None:
        self._embedding = params["model.embed_tokens.weight"]
        self._final_norm = Norm(config, params["model.norm.weight"])
        head = self._embedding if config.tie_word_embeddings else params["lm_head.weight"]
        # Without the padding rows of the vocabulary, which must never be sampled.
        self._head = head[: config.vocab_size]
        by_layer = map(WeightMap(config).layer_rollout_names, range(config.num_layers))
        self._layers = [
            DecoderLayer(config, {name: params[rollout] for name, rollout in names.items()}, layer)
            for layer, names in enumerate(by_layer)
        ]
        frequencies, by_window = inverse_frequencies(config), window_frequencies(config)
        full = RotaryTable(config, frequencies, attention_factor(config), max_length, head.device)
        window = full if by_window is None else RotaryTable(config, by_window, 1.0, max_length, head.device)
        self._tables = (full, window)
        self._has_window = [config.has_window(layer) for layer in range(config.num_layers)]
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=head.dtype).item()

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        outputs: Tensor | None = None,
        routes: Tensor | None = None,
        image_rows: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return the last layer's output before the final norm; ``attention`` gets the keys and values of all tokens.

        Args:
            tokens: int64 ``[tokens]``; the ids of ``image_rows`` have no effect.
            positions: int64 ``[tokens]`` for rotary embeddings, or ``[3, tokens]`` in time, height and width.
            outputs: indices of the required output tokens, to which the last layer is limited; None = all.
            routes: int16 ``[tokens, expert layers, experts per token]``, filled with the experts of each token;
                the last layer is then not limited. None = they are not recorded.
            image_rows: indices ``[n]`` of tokens of images, and their features ``[1 + deepstack, n, hidden_size]``
                (:meth:`megarl.models.vision_tower.ImageFeatures.rows`); None without.

        Returns:
            ``[outputs, hidden_size]``.
        """
        x = self._embedding[tokens if image_rows is None else tokens.clamp(min=0)]
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        if image_rows is not None:
            at, features = image_rows
            x = x.index_copy(0, at, features[0])
        full, window = self._tables
        rotate = full.rotation(positions)
        rotate_in_window = rotate if window is full else window.rotation(positions)
        last = self._layers[-1]
        for number, (layer, has_window) in enumerate(zip(self._layers, self._has_window, strict=True), 1):
            limit = outputs if layer is last and routes is None else None
            x = layer(x, rotate_in_window if has_window else rotate, attention, limit, routes)
            if image_rows is not None and number < len(image_rows[1]):
                x = x.index_add(0, image_rows[0], image_rows[1][number])
        return x if outputs is None or routes is None else x[outputs]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits ``[rows, vocab_size]`` for rows of :meth:`hidden`."""
        return F.linear(self._final_norm(hidden), self._head).float()
