"""Gated delta net layers of the embedded engine, and the states of its sequences.

A layer's state of a sequence is a matrix per value head, and the last inputs of the convolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.models import ModelConfig
from megarl.models.delta_rule import (
    ChunkPlan,
    causal_convolution,
    chunked_delta_rule,
    delta_rule_step,
    gated_norm,
    log_decay,
)
from megarl.models.model_config import LinearAttention


class TokenInputs:
    """Inputs of the delta rule for new tokens.

    Args:
        qkv: ``[tokens, channels]``, before the convolution.
        g: ``[tokens, value heads]``, logarithm of the decay.
        b: ``[tokens, value heads]``, learning rate.
        weight: ``[channels, width]``, of the convolution.
    """

    def __init__(self, linear: LinearAttention, qkv: Tensor, g: Tensor, b: Tensor, weight: Tensor) -> None:
        self.qkv, self.g, self.b, self.weight = qkv, g, b, weight
        self._keys, self._values = linear.key_heads, linear.value_heads
        width = linear.key_heads * linear.key_dim
        self._widths = [width, width, linear.value_heads * linear.value_dim]

    def heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys ``[tokens, key heads, key_dim]``, and values, from the convolution's output."""
        query, key, value = F.silu(convolved).split(self._widths, -1)
        query, key = (part.unflatten(-1, (self._keys, -1)) for part in (query, key))
        return query, key, value.unflatten(-1, (self._values, -1))


class DeltaStates:
    """States with one slot per sequence: in each layer the convolution's last inputs, and a float32 matrix per head."""

    def __init__(self, config: ModelConfig, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        assert config.linear is not None
        self.linear = linear = config.linear
        numbers = [layer for layer in range(config.num_layers) if config.is_linear(layer)]
        self._index = {layer: number for number, layer in enumerate(numbers)}
        inputs = (slots, linear.conv_width - 1, linear.mixed_width)
        matrices = (slots, linear.value_heads, linear.key_dim, linear.value_dim)
        self._inputs = [torch.zeros(inputs, dtype=dtype, device=device) for _ in numbers]
        self._matrices = [torch.zeros(matrices, device=device) for _ in numbers]

    def grow(self, slots: int) -> None:
        """Add slots up to a number; the content stays."""
        for parts in (self._inputs, self._matrices):
            for number, part in enumerate(parts):
                missing = slots - len(part)
                if missing > 0:
                    parts[number] = torch.cat([part, part.new_zeros(missing, *part.shape[1:])])

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots to other slots; no target may be a source."""
        for part in (*self._inputs, *self._matrices):
            part.index_copy_(0, targets, part.index_select(0, sources))

    def snapshot(self, slot: int) -> list[Tensor]:
        """Return copies of a slot, for :meth:`restore`."""
        return [part[slot].clone() for part in (*self._inputs, *self._matrices)]

    def restore(self, snapshot: list[Tensor], first: int, count: int) -> None:
        """Write a snapshot to ``count`` neighboring slots."""
        for part, saved in zip((*self._inputs, *self._matrices), snapshot, strict=True):
            part[first : first + count] = saved

    def prompts(self, layer: int, tokens: TokenInputs, plan: ChunkPlan, first: int, continues: bool) -> Tensor:
        """Compute the delta rule over prompts, each in its own slot, and set the states.

        Args:
            first: slot of the first prompt.
            continues: the slots hold the states of a prefix; otherwise the prompts begin here.

        Returns:
            ``[tokens, value heads, value_dim]`` float32.
        """
        number, slots = self._index[layer], slice(first, first + len(plan.order))
        inputs, matrices = self._inputs[number][slots], self._matrices[number][slots]
        convolved, last = causal_convolution(tokens.qkv, tokens.weight, plan, inputs if continues else None)
        values, after = chunked_delta_rule(
            *tokens.heads(convolved), tokens.g, tokens.b, plan, matrices if continues else None, with_state=True
        )
        assert after is not None
        inputs.copy_(last)
        matrices.copy_(after)
        return values

    def step(self, layer: int, tokens: TokenInputs) -> Tensor:
        """Compute the delta rule for one new token in each of the first slots, and update the states."""
        number, rows = self._index[layer], len(tokens.qkv)
        inputs, matrices = self._inputs[number][:rows], self._matrices[number][:rows]
        held = torch.cat([inputs, tokens.qkv[:, None]], 1)
        inputs.copy_(held[:, 1:])
        return delta_rule_step(*tokens.heads((held * tokens.weight.t()).sum(1)), tokens.g, tokens.b, matrices)


class Recurrence(Protocol):
    """Computes the delta rule of new tokens from the states of their sequences, and updates the states."""

    def recur(self, layer: int, tokens: TokenInputs) -> Tensor:
        """Return ``[tokens, value heads, value_dim]`` float32 of one layer."""


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

    def __call__(self, x: Tensor, recurrence: Recurrence, outputs: Tensor | None) -> Tensor:
        """Compute the output projection's input ``[outputs, value heads * value_dim]`` from ``[tokens, hidden]``."""
        qkv, gate, b, a = self._projected(x)
        tokens = TokenInputs(self._linear, qkv, log_decay(a, self._a_log, self._dt_bias), b.sigmoid(), self._conv)
        values = recurrence.recur(self._layer, tokens)
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
