"""Keys and values of the sequences being generated."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.models import ModelConfig

# Widths are multiples of this many tokens.
WIDTH_MULTIPLE = 32


class KVCache:
    """One slot per sequence, in each layer ``[slots, kv_heads, width, head_dim]`` for keys and the same for values.

    Every step reads the whole of it, and memory is read several times faster without gaps: so all slots are as wide
    as the longest sequence needs, and no wider. :meth:`fit` changes the width.

    Args:
        config: the model.
        slots: sequences held at a time.
        length: most tokens per slot.
        dtype: number format.
        device: where to hold them.
    """

    def __init__(self, config: ModelConfig, slots: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slots, self.length, self.width = slots, length, min(WIDTH_MULTIPLE, length)
        self._heads, self._head_dim = config.num_key_value_heads, config.head_dim
        size = math.prod((slots, self._heads, length, self._head_dim))

        # Zeros, not garbage: attention multiplies what it masks by zero, and NaN would survive that.
        def allocate() -> list[Tensor]:
            return [torch.zeros(size, dtype=dtype, device=device) for _ in range(config.num_layers)]

        self._keys, self._values = allocate(), allocate()

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._keys[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Number format."""
        return self._keys[0].dtype

    def fit(self, length: int, used: int) -> None:
        """Makes every slot wide enough for so many tokens, and not much wider; the first ``used`` keep their tokens.

        Moving the tokens takes as long as a few steps, so the width only shrinks by a quarter or more.
        """
        width = min(self.length, -(-length // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
        if 3 * self.width <= 4 * width and width <= self.width:
            return
        kept = min(width, self.width)
        for layer in range(len(self._keys)):
            for cache in (self._keys[layer], self._values[layer]):
                tokens = self._slots_of(cache)[:used, :, :kept].clone()
                self._slots_of(cache, width)[:used, :, :kept] = tokens
        self.width = width

    def grow(self, slots: int, length: int) -> None:
        """Makes room for more slots, or longer ones; what it holds stays."""
        self.slots, self.length = max(slots, self.slots), max(length, self.length)
        size = math.prod((self.slots, self._heads, self.length, self._head_dim))
        for caches in (self._keys, self._values):
            for layer, cache in enumerate(caches):
                caches[layer] = F.pad(cache, (0, size - len(cache)))

    def places(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Where :meth:`write` puts tokens: for ``[tokens]`` slots and positions, ``[tokens * kv_heads]``."""
        heads = torch.arange(self._heads, device=slots.device)
        return ((slots[:, None] * self._heads + heads) * self.width + positions[:, None]).flatten()

    def write(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes tokens ``[tokens, kv_heads, head_dim]``; ``places`` as of the present width."""
        for cache, new in ((self._keys[layer], keys), (self._values[layer], values)):
            cache.view(-1, self._head_dim).index_copy_(0, places, new.reshape(-1, self._head_dim))

    def read(self, layer: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Views ``[count, kv_heads, width, head_dim]`` of neighbouring slots, without gaps."""
        window = slice(first, first + count)
        return self._slots_of(self._keys[layer])[window], self._slots_of(self._values[layer])[window]

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copies the first ``length`` tokens of slots to other slots; no target may be a source."""
        for cache in (*self._keys, *self._values):
            window = self._slots_of(cache)[:, :, :length]
            window.index_copy_(0, targets, window.index_select(0, sources))

    def snapshot(self, slot: int, length: int) -> list[Tensor]:
        """Copies of the first ``length`` tokens of a slot, for :meth:`restore`."""
        return [self._slots_of(cache)[slot, :, :length].clone() for cache in (*self._keys, *self._values)]

    def restore(self, snapshot: list[Tensor], first: int, count: int) -> None:
        """Puts a snapshot at the start of ``count`` neighbouring slots."""
        for cache, saved in zip((*self._keys, *self._values), snapshot, strict=True):
            self._slots_of(cache)[first : first + count, :, : saved.shape[1]] = saved

    def _slots_of(self, cache: Tensor, width: int | None = None) -> Tensor:
        """``[slots, kv_heads, width, head_dim]``, from the start of a layer's memory."""
        shape = (self.slots, self._heads, width or self.width, self._head_dim)
        return cache[: math.prod(shape)].view(shape)
