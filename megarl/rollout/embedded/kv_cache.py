"""Keys and values of the sequences being generated."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.models import ModelConfig


class KVCache:
    """One slot per sequence, in each layer ``[slots, length, kv_heads, head_dim]`` for keys and the same for values.

    A token's heads lie together, so a token is written, and a sequence moved, as one stretch of memory.

    Args:
        config: the model.
        slots: sequences held at a time.
        length: tokens per slot.
        dtype: number format.
        device: where to hold them.
    """

    def __init__(self, config: ModelConfig, slots: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slots, self.length = slots, length
        shape = (slots, length, config.num_key_value_heads, config.head_dim)

        # Zeros, not garbage: attention multiplies what it masks by zero, and NaN would survive that.
        def allocate() -> list[Tensor]:
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]

        self.keys, self.values = allocate(), allocate()

    def write(self, layer: int, at: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes tokens ``[tokens, kv_heads, head_dim]`` at ``at = slot * length + position``, ``[tokens]``."""
        for cache, new in ((self.keys[layer], keys), (self.values[layer], values)):
            cache.view(-1, *cache.shape[2:]).index_copy_(0, at, new)

    def read(self, layer: int, first: int, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Views ``[count, kv_heads, length, head_dim]`` of the first ``length`` tokens of neighbouring slots."""
        window = slice(first, first + count)
        keys, values = self.keys[layer][window, :length], self.values[layer][window, :length]
        return keys.transpose(1, 2), values.transpose(1, 2)

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copies the first ``length`` tokens of slots to other slots; no target may be a source."""
        for cache in (*self.keys, *self.values):
            window = cache[:, :length]
            window.index_copy_(0, targets, window.index_select(0, sources))

    def snapshot(self, slot: int, length: int) -> list[Tensor]:
        """Copies of the first ``length`` tokens of a slot, for :meth:`restore`."""
        return [cache[slot, :length].clone() for cache in (*self.keys, *self.values)]

    def restore(self, snapshot: list[Tensor], first: int, count: int) -> None:
        """Puts a snapshot at the start of ``count`` neighbouring slots."""
        for cache, saved in zip((*self.keys, *self.values), snapshot, strict=True):
            cache[first : first + count, : saved.shape[0]] = saved
