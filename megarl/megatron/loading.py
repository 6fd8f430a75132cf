"""Micro-batches on the device: the next one is prepared on the host while the device computes the current one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megarl.megatron.context_parallel import MicroBatchPart
from megarl.megatron.layers import PackedSequences
from megarl.megatron.packed import PackedMicroBatch
from megarl.megatron.routing import RoutedTokens


class LoadedMicroBatch(NamedTuple):
    """A micro-batch on the device, complete before its forward pass.

    Attributes:
        part: this rank's part.
        sequences: its sequence boundaries and rotations, computed once for all layers.
        whole: the whole micro-batch, to compute its outputs and loss; None for a chunk of layers without outputs.
        routed: this rank's tokens as its routers see them; None for a dense model.
    """

    part: MicroBatchPart
    sequences: PackedSequences
    whole: PackedMicroBatch | None
    routed: RoutedTokens | None = None


class MicroBatchLoader:
    """Iterator over micro-batches that can load one ahead.

    Args:
        micro_batches: on the host.
        load: copies one to the device without waiting.
    """

    def __init__(
        self, micro_batches: Sequence[PackedMicroBatch], load: Callable[[PackedMicroBatch], LoadedMicroBatch]
    ) -> None:
        self._waiting = iter(micro_batches)
        self._load = load
        self._loaded: deque[LoadedMicroBatch] = deque()

    def __iter__(self) -> MicroBatchLoader:
        return self

    def __next__(self) -> LoadedMicroBatch:
        """Return the next micro-batch; load it if :meth:`load_next` did not."""
        return self._loaded.popleft() if self._loaded else self._load(next(self._waiting))

    def load_next(self) -> None:
        """Load the next micro-batch, if there is one."""
        for micro_batch in self._waiting:
            self._loaded.append(self._load(micro_batch))
            break
