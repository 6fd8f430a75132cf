"""The forward pass of the embedded engine, directly on the fused parameters that weight updates write."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.models import ModelConfig
from megarl.models.rope import attention_factor, inverse_frequencies, window_frequencies
from megarl.rollout.embedded.kv_cache import Attention


class RotaryTable:
    """Rotary position embeddings: float32 cosines and sines of every position, looked up per token.

    Rotations are computed in float32 and rounded once, as in training: rounded angles would add to the difference
    between the engine's log-probs and the trainer's.

    Args:
        config: model config.
        frequencies: radians per position of each pair.
        factor: on the rotated elements.
        length: number of positions.
        device: of the rotated activations.
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

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines ``[tokens, 1, rotary_dim]`` of positions ``[tokens]``."""
        return self._cos[positions][:, None], self._sin[positions][:, None]

    def rotate(self, heads: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Return ``[tokens, heads, head_dim]``, whose first ``rotary_dim`` are rotated by the result of :meth:`at`."""
        cos, sin = angles
        turned, rest = heads[..., : self._width], heads[..., self._width :]
        rotated = torch.addcmul(turned * cos, turned.roll(self._width // 2, -1).to(cos.dtype), sin).to(heads.dtype)
        return torch.cat([rotated, rest], -1) if rest.shape[-1] else rotated


NORMS = {
    (True, False): ("input_layernorm", None, "post_attention_layernorm", None),
    (False, True): (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    (True, True): (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
"""Norms on the input and output of attention, and of the MLP, for models with norms on (inputs, outputs)."""


class DecoderLayer:
    """Parameters of one layer under short names; views of the live parameters, so updates are visible at once."""

    def __init__(self, config: ModelConfig, params: Mapping[str, Tensor], layer: int) -> None:
        prefix = f"model.layers.{layer}."
        names = NORMS[config.input_norms, config.output_norms]
        norms = [None if name is None else params[f"{prefix}{name}.weight"] for name in names]
        self.input_norm, self.attention_norm, self.mlp_norm, self.output_norm = norms
        self.qkv = params[prefix + "self_attn.qkv_proj.weight"]
        self.qkv_bias = params[prefix + "self_attn.qkv_proj.bias"] if config.qkv_bias else None
        self.q_norm = params[prefix + "self_attn.q_norm.weight"] if config.qk_norm else None
        self.k_norm = params[prefix + "self_attn.k_norm.weight"] if config.qk_norm else None
        self.output = params[prefix + "self_attn.o_proj.weight"].t()
        self.gate_up = params[prefix + "mlp.gate_up_proj.weight"]
        self.down = params[prefix + "mlp.down_proj.weight"].t()


class TransformerDecoder:
    """A model of a dense family over packed tokens.

    Args:
        config: model config.
        params: parameters by rollout name, on one device and in one dtype; must outlive the decoder.
        max_length: largest position plus one.
    """

    def __init__(self, config: ModelConfig, params: Mapping[str, Tensor], max_length: int) -> None:
        self._embedding = params["model.embed_tokens.weight"]
        self._final_norm = params["model.norm.weight"]
        head = self._embedding if config.tie_word_embeddings else params["lm_head.weight"]
        # Without the padding rows of the vocabulary, which must never be sampled.
        self._head = head[: config.vocab_size]
        self.vocab_size = config.vocab_size
        self._layers = [DecoderLayer(config, params, layer) for layer in range(config.num_layers)]
        frequencies, by_window = inverse_frequencies(config), window_frequencies(config)
        full = RotaryTable(config, frequencies, attention_factor(config), max_length, head.device)
        window = full if by_window is None else RotaryTable(config, by_window, 1.0, max_length, head.device)
        self._tables = (full, window)
        self._has_window = [config.has_window(layer) for layer in range(config.num_layers)]
        self._norms_over_heads = config.qk_norm_over_heads
        self._heads = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
        self._head_dim, self._eps = config.head_dim, config.rms_norm_eps
        self._zero_centered, self._activation = config.zero_centered_norms, config.activation
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=head.dtype).item()

    def hidden(self, tokens: Tensor, positions: Tensor, attention: Attention, outputs: Tensor | None = None) -> Tensor:
        """Return the last layer's output before the final norm; ``attention`` gets the keys and values of all tokens.

        Args:
            tokens: int64 ``[tokens]``.
            positions: int64 ``[tokens]``.
            attention: attention over the KV cache.
            outputs: indices of the required output tokens, to which the last layer is limited; None = all.

        Returns:
            ``[outputs, hidden_size]``.
        """
        x = self._embedding[tokens]
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        full, window = self._tables
        angles = full.at(positions)
        window_angles = angles if window is full else window.at(positions)
        for number, layer in enumerate(self._layers):
            qkv = F.linear(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias)
            q, k, v = qkv.view(len(x), -1, self._head_dim).split(self._heads, 1)
            q, k = self._normed_heads(q, layer.q_norm), self._normed_heads(k, layer.k_norm)
            turns = window_angles if self._has_window[number] else angles
            attended = attention(number, full.rotate(q, turns), full.rotate(k, turns), v)
            if outputs is not None and layer is self._layers[-1]:
                x, attended = x[outputs], attended[outputs]
            x = self._added(x, attended, layer.output, layer.attention_norm)
            gate, up = F.linear(self._norm(x, layer.mlp_norm), layer.gate_up).chunk(2, -1)
            x = self._added(x, self._activated(gate).mul_(up), layer.down, layer.output_norm)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits ``[rows, vocab_size]`` of rows of :meth:`hidden`."""
        return F.linear(self._norm(hidden, self._final_norm), self._head).float()

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        if self._zero_centered:
            return F.rms_norm(x.float(), (x.shape[-1],), weight.float() + 1.0, self._eps).to(x.dtype)
        return F.rms_norm(x, (x.shape[-1],), weight, self._eps)

    def _activated(self, gate: Tensor) -> Tensor:
        return F.silu(gate) if self._activation == "silu" else F.gelu(gate, approximate="tanh")

    def _normed_heads(self, heads: Tensor, weight: Tensor | None) -> Tensor:
        """Norm of ``[tokens, heads, head_dim]``: of each head, or over all heads."""
        if weight is None or not self._norms_over_heads:
            return self._norm(heads, weight)
        return self._norm(heads.flatten(1), weight).view(heads.shape)

    def _added(self, x: Tensor, inputs: Tensor, weight: Tensor, norm: Tensor | None) -> Tensor:
        """``x`` plus the product of a layer's last matrix, normed if the layer has a norm on its output."""
        return torch.addmm(x, inputs, weight) if norm is None else x + self._norm(inputs @ weight, norm)
