"""A copy of what is to be saved, in host memory, so that training goes on while it is written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.megatron.checkpoint_format import Item

CHUNK_BYTES = 2**28
"""Pinned memory is taken in pieces of this size, because torch rounds each piece up to a power of two."""
ALIGNMENT = 16
"""Bytes; every number format may begin at a multiple of it."""


class HostSnapshot:
    """Host memory that items are copied to, taken at the first save and used again by each that follows.

    One save is on its way at a time, so that one such memory is enough: the other copy is the one that trains.

    Args:
        device: where the items live; for a GPU the memory is page-locked, which lets it copy at full speed.
        chunk_bytes: see :data:`CHUNK_BYTES`.
    """

    def __init__(self, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the memory held."""
        return sum(len(chunk) for chunk in self._chunks)

    def take(self, items: Sequence[Item]) -> list[Item]:
        """The same items with their elements copied; the copies hold until the next call.

        Args:
            items: of this rank.
        """
        copies, chunk, at = [], -1, self._chunk_bytes
        for item in items:
            size = item.data.numel() * item.data.element_size()
            if chunk < 0 or at + size > len(self._chunks[chunk]):
                chunk, at = chunk + 1, 0
                self._make_room(chunk, size)
            there = self._chunks[chunk][at : at + size].view(item.data.dtype).view(item.data.shape)
            there.copy_(item.data, non_blocking=True)
            copies.append(item._replace(data=there))
            at += -(-size // ALIGNMENT) * ALIGNMENT
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return copies

    def _make_room(self, chunk: int, size: int) -> None:
        """Makes sure that the chunk of a number exists and holds ``size`` bytes; chunks before it are untouched."""
        if chunk < len(self._chunks) and len(self._chunks[chunk]) >= size:
            return
        memory = torch.empty(max(size, self._chunk_bytes), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        self._chunks[chunk : chunk + 1] = [memory]
