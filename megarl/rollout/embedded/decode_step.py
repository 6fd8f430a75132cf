"""The forward pass of one decode step: eager, or as a CUDA graph that replays its launches at once."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from megarl.rollout.embedded.decoder import TransformerDecoder
from megarl.rollout.embedded.kv_cache import KVCache, StepAttention

logger = logging.getLogger(__name__)

Replay = Callable[[], object]
"""Repeats captured launches with the present contents of their tensors."""

MAX_GRAPHS = 64
"""Captured graphs that are kept; the oldest one is dropped."""


class DecodeStep:
    """Computes the logits of the next token of every running sequence.

    Args:
        cache: KV cache, with one slot per sequence.
        state: int64 ``[2 or more, slots]``; its first rows are the newest token and its position, by slot.
    """

    def __init__(self, cache: KVCache, state: Tensor) -> None:
        self._cache, self._state = cache, state

    def logits(self, decoder: TransformerDecoder, size: int, routes: Tensor | None = None) -> Tensor:
        """Return float32 logits ``[size, vocab_size]`` of the first ``size`` slots, valid until the next call.

        Args:
            decoder: the model.
            size: number of slots.
            routes: see :meth:`TransformerDecoder.hidden`.
        """
        tokens, positions = self._state[:2, :size]
        hidden = decoder.hidden(tokens, positions, StepAttention(self._cache, positions), routes=routes)
        return decoder.logits(hidden)


class GraphedDecodeStep(DecodeStep):
    """Replays a CUDA graph per number of slots and cache width, to avoid launch overhead.

    Numbers of slots are rounded up to a power of two. The additional slots compute token 0 at position 0 of unused
    slots. The first step of each size is eager, which prepares the libraries; the second one is captured.

    Args:
        cache: see :class:`DecodeStep`.
        state: see :class:`DecodeStep`.
        capture: captures the launches of a function.
    """

    def __init__(self, cache: KVCache, state: Tensor, capture: Callable[[Callable[[], object]], Replay]) -> None:
        super().__init__(cache, state)
        self._capture: Callable[[Callable[[], object]], Replay] | None = capture
        self._graphs: dict[tuple[int, int], Replay | None] = {}
        self._memory: tuple[int, int] | None = None
        self._output: Tensor | None = None

    def logits(self, decoder: TransformerDecoder, size: int, routes: Tensor | None = None) -> Tensor:
        """See :meth:`DecodeStep.logits`; models with experts are not captured."""
        assert routes is None
        rows = min(1 << (size - 1).bit_length(), self._cache.slots)
        self._state[:2, size:rows] = 0
        self._drop_outdated(decoder)
        key = (rows, self._cache.width)
        if key not in self._graphs or self._capture is None:
            self._graphs[key] = None
            return super().logits(decoder, rows)[:size]
        output = self._output_of(rows, decoder)
        replay = self._graphs[key] or self._captured(decoder, rows, output)
        if replay is None:
            return super().logits(decoder, rows)[:size]
        self._graphs[key] = replay
        replay()
        return output[:size]

    def _drop_outdated(self, decoder: TransformerDecoder) -> None:
        """Drop graphs that read memory of an earlier cache or decoder, and the oldest graph if there are too many."""
        memory = (id(decoder), self._cache.address)
        if memory != self._memory:
            self._graphs.clear()
            self._memory = memory
        if len(self._graphs) > MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]

    def _output_of(self, rows: int, decoder: TransformerDecoder) -> Tensor:
        """Memory of the logits that all graphs share; larger memory drops the graphs that write to the smaller one."""
        if self._output is None or len(self._output) < rows:
            self._output = torch.empty(rows, decoder.vocab_size, dtype=torch.float32, device=self._cache.device)
            self._graphs = dict.fromkeys(self._graphs)
        return self._output

    def _captured(self, decoder: TransformerDecoder, rows: int, output: Tensor) -> Replay | None:
        """Capture a step; None if CUDA refuses, after which all steps are eager."""
        assert self._capture is not None
        eager = super().logits
        try:
            return self._capture(lambda: output[:rows].copy_(eager(decoder, rows)))
        except RuntimeError as error:
            logger.warning("the embedded engine decodes without CUDA graphs, since a capture failed: %s", error)
            self._capture = None
            return None


class CudaGraphCapture:
    """Captures CUDA graphs whose intermediate tensors share one memory pool: only one graph runs at a time.

    Args:
        device: device of the launches.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], object]) -> Replay:
        """Capture a function, without running it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), torch.cuda.graph(graph, pool=self._pool):
            function()
        return graph.replay


def decode_step(cache: KVCache, state: Tensor, *, dynamic: bool = False) -> DecodeStep:
    """Return the decode step for the cache's device.

    Args:
        cache: see :class:`DecodeStep`.
        state: see :class:`DecodeStep`.
        dynamic: the shapes of the model's computation depend on its values, as those of experts do: no CUDA graphs.
    """
    if cache.device.type == "cuda" and not dynamic:
        return GraphedDecodeStep(cache, state, CudaGraphCapture(cache.device))
    return DecodeStep(cache, state)
