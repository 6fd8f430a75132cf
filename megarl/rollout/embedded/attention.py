"""Attention over the KV cache: prompts that arrive, and sequences that grow by one token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.rollout.embedded.kv_cache import KVCache


class Attention(Protocol):
    """Stores the keys and values of new tokens, then attends from the new tokens to all before them."""

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The new tokens' attention in one layer.

        Args:
            layer: number of the layer.
            queries: ``[tokens, heads, head_dim]``.
            keys: ``[tokens, kv_heads, head_dim]``.
            values: like ``keys``.

        Returns:
            ``[tokens, heads * head_dim]``.
        """


class PromptAttention:
    """New tokens of several prompts, packed one behind the other, each prompt into a slot of its own.

    Only the attention itself is padded, to the longest prompt; every other operation runs on packed tokens.

    Args:
        cache: where keys and values go.
        first: the first prompt's slot; the others take the next ones.
        lengths: new tokens of each prompt.
        prefix: tokens that each of these slots already holds; new ones come behind them.
    """

    def __init__(self, cache: KVCache, first: int, lengths: Sequence[int], prefix: int) -> None:
        self._cache, self._first, self._count, self._prefix = cache, first, len(lengths), prefix
        self._width = max(lengths)
        device = cache.device
        sizes = torch.tensor(lengths, device=device)
        prompts = torch.arange(len(lengths), device=device).repeat_interleave(sizes)
        self.ends = sizes.cumsum(0) - 1
        columns = torch.arange(len(prompts), device=device) - (self.ends - sizes + 1)[prompts]
        self.positions = columns + prefix
        self._in_rectangle = prompts * self._width + columns
        self._places = cache.places(prompts + first, self.positions)
        self._mask: Tensor | None = None
        if prefix:
            visible = torch.ones(self._width, prefix + self._width, dtype=torch.bool, device=device)
            self._mask = visible.tril(diagonal=prefix)

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See :class:`Attention`. Behind a prompt's end a rectangle has leftovers, which causality hides."""
        self._cache.write(layer, self._places, keys, values)
        rectangle = queries.new_zeros(self._count * self._width, *queries.shape[1:])
        rectangle.index_copy_(0, self._in_rectangle, queries)
        keys, values = self._cache.read(layer, self._first, self._count)
        length = self._prefix + self._width
        attended = F.scaled_dot_product_attention(
            rectangle.view(self._count, self._width, *queries.shape[1:]).transpose(1, 2),
            keys[:, :, :length],
            values[:, :, :length],
            attn_mask=self._mask,
            is_causal=self._mask is None,
            enable_gqa=True,
        )
        return attended.transpose(1, 2).reshape(self._count * self._width, -1).index_select(0, self._in_rectangle)


class StepAttention:
    """One new token in each of the first slots.

    Args:
        cache: where keys and values go.
        positions: int64 ``[rows]``, the new token's position in each slot.
    """

    def __init__(self, cache: KVCache, positions: Tensor) -> None:
        self._cache = cache
        slots = torch.arange(len(positions), device=positions.device)
        self._places = cache.places(slots, positions)
        hidden = torch.arange(cache.width, device=positions.device) > positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=cache.dtype, device=positions.device)
        self._mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None]

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See :class:`Attention`. Query heads that share a key head stand where several query tokens would."""
        self._cache.write(layer, self._places, keys, values)
        rows, kv_heads = keys.shape[:2]
        stored = self._cache.read(layer, 0, rows)
        grouped = queries.reshape(rows, kv_heads, -1, queries.shape[-1])
        attend = _plain_attention if queries.dtype is torch.float32 else F.scaled_dot_product_attention
        return attend(grouped, *stored, attn_mask=self._mask).reshape(rows, -1)


def _plain_attention(queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor) -> Tensor:
    """Torch's attention for few queries, in three operations.

    With one query per head torch's own kernel spends most of its time between small products: for 128 sequences of
    96 tokens and 4 heads it takes three times as long. In lower precision it is the one that keeps scores in float32.
    """
    scores = queries @ keys.transpose(-1, -2)
    weights = torch.add(attn_mask, scores, alpha=queries.shape[-1] ** -0.5).softmax(-1)
    return weights @ values
