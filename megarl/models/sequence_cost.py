"""Compute cost of a sequence, per token and per pair of tokens, and of an image in a vision tower."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from megarl.models.model_config import LinearAttention, ModelConfig, Vision
from megarl.models.tower_class import tower_class, tower_shapes

CHUNK = 64
"""Maximum tokens of a chunk of the gated delta rule."""


class SequenceCost(NamedTuple):
    """Cost of a sequence of ``n`` tokens: ``(linear + recurrent) * n + quadratic * n**2``, plus ``windowed`` pairs.

    Attributes:
        linear: cost per token.
        quadratic: cost per pair of tokens in layers with full attention.
        windowed: cost per pair of tokens in layers with sliding-window attention.
        window: size of the window.
        recurrent: cost per token of the states of gated delta net layers.
    """

    linear: float = 1.0
    quadratic: float = 0.0
    windowed: float = 0.0
    window: int = 0
    recurrent: float = 0.0

    def of(self, lengths: Sequence[int]) -> list[float]:
        """Estimate the cost of sequences of ``lengths`` tokens."""
        import numpy as np

        tokens = np.asarray(lengths, dtype=np.int64)
        outside = np.maximum(0, tokens - self.window)
        pairs = self.quadratic * tokens**2 + self.windowed * (tokens**2 - outside**2)
        costs: list[float] = (self.linear * tokens + (pairs + self.recurrent * tokens)).tolist()
        return costs

    def attention(self, length: int) -> float:
        """Estimate a sequence's cost in attention and states, for ``length`` tokens."""
        pairs = self.quadratic * length**2 + self.windowed * squares_in_window(length, self.window)
        return pairs + self.recurrent * length


def squares_in_window(length: int, window: int) -> int:
    """Return twice the number of token pairs of a sequence that are less than ``window`` tokens apart."""
    return length**2 - max(0, length - window) ** 2


TOKENS = SequenceCost()
"""Every token costs 1."""


def sequence_cost(config: ModelConfig, *, value_head: bool = False) -> SequenceCost:
    """Count the floating-point operations of one sequence's forward pass; a backward pass has twice as many.

    ``linear = 2 * weights`` counts the weight matrices that a token passes: in every layer the attention projections
    and the three matrices of the gated MLP (or the router and the token's experts), and the output layer. For plain
    attention and a dense MLP that is
    ``layers * hidden * (2 * (heads + kv_heads) * head_dim + 3 * ffn) + hidden * vocabulary``.
    ``quadratic = layers * heads * (head_dim + value_dim)`` counts a query's products with the keys up to its position,
    half of all pairs, and with as many values, two operations per element. Layers with sliding-window attention count
    in ``windowed`` instead. Gated delta nets count in ``recurrent``: per value head three products with the state, half
    of the pairs within a chunk, and the solution of its triangular system; and the convolution. Embedding, norms and
    softmax are not counted.
    """
    layers = [layer_cost(config, layer) for layer in range(config.num_layers)]
    parts = zip(*layers, head_cost(config, value_head=value_head), strict=True)
    linear, quadratic, windowed, _, recurrent = (sum(column) for column in parts)
    return SequenceCost(linear, quadratic, windowed, config.window.size if config.window else 0, recurrent)


def layer_cost(config: ModelConfig, layer: int) -> SequenceCost:
    """Count the floating-point operations of a forward pass through one decoder layer, by its global number."""
    if config.linear is not None and config.is_linear(layer):
        linear = config.linear
        values = linear.value_heads * linear.value_dim
        projections = config.hidden_size * (linear.mixed_width + 2 * values + 2 * linear.value_heads)
        weights = projections + _mlp_weights(config, layer)
        return SequenceCost(2.0 * weights, recurrent=_recurrent_cost(linear))
    value_dim = config.latent.v_dim if config.latent else config.head_dim
    weights = _attention_weights(config) + _mlp_weights(config, layer)
    pair = float(config.num_attention_heads * (config.head_dim + value_dim))
    if config.window is not None and config.has_window(layer):
        return SequenceCost(2.0 * weights, windowed=pair, window=config.window.size)
    return SequenceCost(2.0 * weights, pair)


def head_cost(config: ModelConfig, *, value_head: bool = False) -> SequenceCost:
    """Count the floating-point operations of the output layer, or of a scalar head."""
    return SequenceCost(2.0 * config.hidden_size * (1 if value_head else config.vocab_size))


def tower_flops(vision: Vision, tokens: float) -> float:
    """Count the floating-point operations of a vision tower's forward pass over one image of ``tokens`` tokens.

    Two per weight and patch, in the mergers per weight and token; and per pair of patches, in Qwen2.5-VL mostly of the
    same window, two products with ``hidden_size`` elements. Position embeddings, norms and softmax are not counted.
    """
    config = tower_class(vision).config_class(**vision.settings)
    patches_per_token = config.spatial_merge_size**2
    patches = patches_per_token * tokens
    weights = sum(
        math.prod(shape) / (patches_per_token if "merger" in name else 1)
        for name, shape in tower_shapes(vision).items()
        if len(shape) > 1 and not name.endswith("pos_embed.weight")
    )
    full = len(getattr(config, "fullatt_block_indexes", range(config.depth)))
    attended = full * patches
    if full < config.depth:
        attended += (config.depth - full) * min(patches, (config.window_size // config.patch_size) ** 2)
    return float(patches * (2 * weights + 4 * config.hidden_size * attended))


def _attention_weights(config: ModelConfig) -> int:
    """Attention weights of one layer."""
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.latent
    if latent is None:
        gates = heads if config.output_gate else 0
        return hidden * config.head_dim * (2 * (heads + config.num_key_value_heads) + gates)
    queries = heads * config.head_dim * (latent.q_lora_rank or hidden) + hidden * latent.q_lora_rank
    compressed = hidden * (latent.kv_lora_rank + latent.rope_dim)
    expanded = latent.kv_lora_rank * heads * (latent.nope_dim + latent.v_dim)
    return queries + compressed + expanded + heads * latent.v_dim * hidden


def _recurrent_cost(linear: LinearAttention) -> float:
    """Floating-point operations of one token in convolution and delta rule."""
    key, value = linear.key_dim, linear.value_dim
    pairs = CHUNK * (2 * key + value) + CHUNK * (key + value)  # products of queries and keys, values; triangular system
    return linear.value_heads * (6.0 * key * value + pairs) + 2.0 * linear.conv_width * linear.mixed_width


def _mlp_weights(config: ModelConfig, layer: int) -> int:
    """MLP weights of one layer that one token passes."""
    experts = config.experts
    if experts is None or not config.has_experts(layer):
        return 3 * config.hidden_size * config.ffn_hidden_size
    inner = experts.per_token * experts.ffn_hidden_size + experts.shared_ffn_hidden_size
    return config.hidden_size * (3 * inner + experts.count)
