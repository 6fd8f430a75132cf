"""Delta encoding of weight messages: only words that changed since the previous sync travel.

At RL learning rates 1 to 3 % of the bfloat16 weights change per step. Sender and receiver each keep the last bytes of
every message in host memory. The sender compares a message with them, word by word, and sends the changed words with
their distances; the receiver writes them into its copy. The result is equal bit for bit. A word is the smallest element
of the message, 2 bytes for bfloat16.

Encoded bytes::

    values     changed words, in order
    distances  int16 per value: words since the previous value; 0 for the first

A word at least every :data:`MAX_DISTANCE` words is sent, changed or not, so that distances fit into 16 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megarl.base.errors import WeightSyncError

MAX_DISTANCE = 2**15 - 1
"""Largest distance of two sent words."""
_DISTANCE_BYTES = 2
_WORDS = {2: torch.int16, 4: torch.int32}

MessageKey = tuple[int, int]
"""Peer rank and bucket of a message."""


class Encoding(NamedTuple):
    """Form of the bytes of a message.

    Attributes:
        number: 0 for a full message, then the number of deltas since that message.
        words: number of sent words of a delta; None = all bytes of the message.
        word_bytes: size of a word.
    """

    number: int
    words: int | None
    word_bytes: int


class _Kept(NamedTuple):
    """The last bytes of a message, and the number of deltas since its last full transfer."""

    data: Tensor
    number: int


class DeltaEncoder:
    """The sending side of all messages of one training rank.

    Args:
        full_freq: syncs between full messages; 0 = only the first one is full.
    """

    def __init__(self, full_freq: int = 0) -> None:
        self._full_freq = full_freq
        self._kept: dict[MessageKey, _Kept] = {}

    @property
    def nbytes(self) -> int:
        """Host memory of the copies."""
        return sum(kept.data.numel() for kept in self._kept.values())

    def encode(self, key: MessageKey, data: Tensor, word_bytes: int) -> tuple[Encoding, Tensor]:
        """Encode a message, in place.

        Args:
            key: receiver and bucket.
            data: bytes of the message, ``[n]`` uint8; overwritten.
            word_bytes: size of a word; divides ``n``.

        Returns:
            The encoding, and the bytes to send, the first part of ``data``.
        """
        kept = self._kept.get(key)
        if kept is None or (self._full_freq and kept.number + 1 >= self._full_freq):
            return self._full(key, data, word_bytes)
        words = data.view(_WORDS[word_bytes])
        before = kept.data.view(words.dtype)
        changed = words != before.to(words.device, non_blocking=True)
        changed[::MAX_DISTANCE] = True
        positions = changed.nonzero().flatten()
        size = len(positions)
        if size * (word_bytes + _DISTANCE_BYTES) >= len(data):
            return self._full(key, data, word_bytes)
        values, distances = words[positions], positions.diff(prepend=positions[:1]).to(torch.int16)
        before[positions.to(before.device)] = values.to(before.device)
        self._kept[key] = kept._replace(number=kept.number + 1)
        parts = torch.cat([values.view(torch.uint8), distances.view(torch.uint8)])
        return Encoding(kept.number + 1, size, word_bytes), data[: len(parts)].copy_(parts)

    def reset(self) -> None:
        """Forget all messages after a failed sync: the next ones are full."""
        self._kept.clear()

    def _full(self, key: MessageKey, data: Tensor, word_bytes: int) -> tuple[Encoding, Tensor]:
        self._kept[key] = _Kept(_host_copy(data, self._kept.get(key)), 0)
        return Encoding(0, None, word_bytes), data


class DeltaDecoder:
    """The receiving side of all messages of one rollout rank."""

    def __init__(self) -> None:
        self._kept: dict[MessageKey, _Kept] = {}

    @property
    def nbytes(self) -> int:
        """Host memory of the copies."""
        return sum(kept.data.numel() for kept in self._kept.values())

    def decode(self, key: MessageKey, data: Tensor, encoding: Encoding) -> Tensor:
        """Restore a message.

        Args:
            key: sender and bucket.
            data: the sent bytes, uint8; read-only.
            encoding: their form.

        Returns:
            All bytes of the message on the device of ``data``, valid until the next call for this key.

        Raises:
            WeightSyncError: the delta refers to a message that this side does not have, or has another size.
        """
        kept = self._kept.get(key)
        if encoding.words is None:
            self._kept[key] = _Kept(_host_copy(data, kept), 0)
            return data
        held = None if kept is None else kept.number
        if kept is None or encoding.number != kept.number + 1:
            raise WeightSyncError(
                f"delta {encoding.number} of bucket {key[1]} from training rank {key[0]} follows number "
                f"{encoding.number - 1}, this process holds {'none' if held is None else held}",
                code="sync.delta-order",
            )
        split = encoding.words * encoding.word_bytes
        if len(data) != split + encoding.words * _DISTANCE_BYTES:
            raise WeightSyncError(
                f"delta of bucket {key[1]} from training rank {key[0]} has {len(data)} bytes, {encoding.words} words",
                code="sync.delta-size",
            )
        received = data.cpu()
        positions = received[split:].view(torch.int16).long().cumsum(0)
        words = kept.data.view(_WORDS[encoding.word_bytes])
        words[positions] = received[:split].view(words.dtype)
        self._kept[key] = kept._replace(number=encoding.number)
        return kept.data.to(data.device)

    def reset(self) -> None:
        """Forget all messages after a failed sync."""
        self._kept.clear()


def _host_copy(data: Tensor, kept: _Kept | None) -> Tensor:
    """Copy bytes to host memory, pinned if they come from a GPU; reuses the memory of ``kept``."""
    if kept is None or len(kept.data) != len(data):
        return torch.empty(len(data), dtype=torch.uint8, pin_memory=data.is_cuda).copy_(data)
    return kept.data.copy_(data)
