"""The forward pass of the embedded engine, directly on the fused parameters that weight updates write."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.models import ModelConfig, WeightMap
from megarl.models.rope import attention_factor, inverse_frequencies, window_frequencies
from megarl.rollout.embedded.delta_states import DeltaNet
from megarl.rollout.embedded.kv_cache import Attention
from megarl.rollout.embedded.layers import (
    GatedMLP,
    LatentHeads,
    Norm,
    PlainHeads,
    Rotate,
    RoutedExperts,
    added,
    layer_parameters,
    limited,
)


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

    def rotation(self, positions: Tensor) -> Rotate:
        """Return a function that rotates heads at positions ``[tokens]``: their first ``rotary_dim`` elements."""
        cos, sin, width = self._cos[positions][:, None], self._sin[positions][:, None], self._width

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
        weight_map = WeightMap(config)
        self._layers = [
            DecoderLayer(config, layer_parameters(weight_map, params, layer), layer)
            for layer in range(config.num_layers)
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
    ) -> Tensor:
        """Return the last layer's output before the final norm; ``attention`` gets the keys and values of all tokens.

        Args:
            tokens: int64 ``[tokens]``.
            positions: int64 ``[tokens]``.
            outputs: indices of the required output tokens, to which the last layer is limited; None = all.
            routes: int16 ``[tokens, expert layers, experts per token]``, filled with the experts of each token;
                the last layer is then not limited. None = they are not recorded.

        Returns:
            ``[outputs, hidden_size]``.
        """
        x = self._embedding[tokens]
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        full, window = self._tables
        rotate = full.rotation(positions)
        rotate_in_window = rotate if window is full else window.rotation(positions)
        last = self._layers[-1]
        for layer, has_window in zip(self._layers, self._has_window, strict=True):
            limit = outputs if layer is last and routes is None else None
            x = layer(x, rotate_in_window if has_window else rotate, attention, limit, routes)
        return x if outputs is None or routes is None else x[outputs]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits ``[rows, vocab_size]`` of rows of :meth:`hidden`."""
        return F.linear(self._final_norm(hidden), self._head).float()
