"""What a rank keeps of a model between micro-batches, to the byte: weights, gradients, optimizer state.

What a rank holds is read from the weight map. With the distributed optimizer Megatron lays weights and gradients into
buffers: each parameter begins at a multiple of 64 elements, each bucket is padded so that it divides over the
data-parallel ranks at a multiple of 128, and a rank has the optimizer's state of those elements that lie in its share
of each bucket. Gradients are float32. Where weights are bfloat16, the optimizer has float32 copies of its share; Adam's
two running means are float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megarl.models import LocalParam, ModelConfig, ParallelLayout, WeightMap
from megarl.plan.job import DTYPE_BYTES, PlannedRole

FLOAT32 = 4
MOMENTS = 2
"""Adam's running means of the gradient and of its square."""
PARAM_START, BUCKET_END = 64, 128
"""Elements to whose multiples Megatron pads where parameters begin, and where buckets end."""
SMALLEST_BUCKET, BUCKET_PER_RANK = 40_000_000, 1_000_000
"""Megatron's bucket has at least so many elements, and at least so many per data-parallel rank."""


@dataclass(frozen=True)
class RankStates:
    """Bytes that a rank keeps of a role's model, all parts on the device.

    Attributes:
        parameters: elements of its weights, without padding; frozen ones included.
        weights: of the weights as they are computed with, and of what pads them.
        gradients: of the gradient buffers.
        main_weights: of the optimizer's float32 copies of its share of the weights.
        moments: of Adam's running means.
        largest_bucket: of the gradients that are summed at a time over data-parallel ranks.
    """

    parameters: int
    weights: int
    gradients: int = 0
    main_weights: int = 0
    moments: int = 0
    largest_bucket: int = 0

    @property
    def optimizer(self) -> int:
        """Main weights and moments."""
        return self.main_weights + self.moments

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer


class _Placed(NamedTuple):
    """A parameter in its buffer."""

    start: int
    stop: int


@dataclass(frozen=True)
class _Buffer:
    """Megatron's buffer of one kind of parameters of one chunk: where each lies, and the buckets ``[start, stop)``."""

    placed: tuple[_Placed, ...]
    buckets: tuple[tuple[int, int], ...]

    @cached_property
    def numel(self) -> int:
        return self.buckets[-1][1] if self.buckets else 0

    def share(self, rank: int, ranks: int) -> int:
        """Elements of parameters, padding left out, in the share of one of ``ranks`` data-parallel ranks."""
        total = 0
        for start, stop in self.buckets:
            size = (stop - start) // ranks
            first, last = start + rank * size, start + (rank + 1) * size
            total += sum(max(0, min(one.stop, last) - max(one.start, first)) for one in self.placed)
        return total


class StateCounter:
    """Counts a role's states rank by rank.

    Args:
        role: the model, its layout and how it is held.
    """

    def __init__(self, role: PlannedRole) -> None:
        self.role = role
        self._map = WeightMap(role.model, role.value_head)

    def of(self, rank: int) -> RankStates:
        """States of a rank."""
        layout, width = self.role.layout, self.role.dtype_bytes
        params = self._map.megatron_params(layout, rank)
        numbers = [math.prod(param.shape) for param in params]
        exact = sum(n for n, param in zip(numbers, params, strict=True) if self._is_float32(param))
        if not self.role.trains:
            return RankStates(sum(numbers), (sum(numbers) - exact) * width + exact * FLOAT32)
        distributed = self.role.megatron.use_distributed_optimizer
        numel = share = largest = 0
        for buffer, among, ranks in self._buffers(params, rank):
            numel += buffer.numel
            share += buffer.share(among, ranks) if distributed else buffer.numel
            largest = max(largest, *(stop - start for start, stop in buffer.buckets))
        return RankStates(
            parameters=sum(numbers),
            weights=numel * width + exact * FLOAT32,
            gradients=numel * FLOAT32,
            main_weights=0 if width == FLOAT32 else share * FLOAT32,
            moments=MOMENTS * share * FLOAT32,
            largest_bucket=largest * FLOAT32,
        )

    def _buffers(self, params: Sequence[LocalParam], rank: int) -> list[tuple[_Buffer, int, int]]:
        """The buffers of a rank's chunks, each with the rank's place among those that share it, and their number."""
        layout, result = self.role.layout, []
        where, among = layout.coordinate(rank), layout.expert_coordinate(rank)
        dense_place = (where.dp * layout.cp + where.cp, layout.dp * layout.cp)
        expert_place = (among.edp, layout.expert_dp)
        for chunk, held in enumerate(_by_chunk(params, layout, self.role.model, where.pp)):
            trained = [param for param in held if not self._is_float32(param)]
            for own_experts in (False, True):
                kind = [param for param in trained if self._counts_as_expert(param) is own_experts]
                if kind:
                    place, ranks = expert_place if own_experts else dense_place
                    bucketed = where.pp == 0 and chunk == 0
                    result.append((self._buffer(kind, ranks, bucketed), place, ranks))
        return result

    def _buffer(self, params: Sequence[LocalParam], ranks: int, bucketed: bool) -> _Buffer:
        """Lays parameters out, the last first, roughly in the order in which their gradients come about."""
        megatron, layout = self.role.megatron, self.role.layout
        padded = megatron.use_distributed_optimizer
        size = math.inf
        if megatron.overlap_grad_reduce and bucketed:
            size = max(SMALLEST_BUCKET, BUCKET_PER_RANK * layout.dp * layout.cp)
        placed: list[_Placed] = []
        buckets: list[tuple[int, int]] = []
        at = opened = 0

        def close(end: int) -> int:
            stop = _pad(end, math.lcm(ranks, BUCKET_END)) if padded else end
            buckets.append((opened, stop))
            return stop

        for param in reversed(params):
            at = _pad(at, PARAM_START) if padded else at
            alone = padded and self._is_shared_embedding(param)
            if alone and at > opened:
                at = opened = close(at)
            placed.append(_Placed(at, at + math.prod(param.shape)))
            at = placed[-1].stop
            if alone or at - opened >= size:
                at = opened = close(at)
        if at > opened:
            close(at)
        return _Buffer(tuple(placed), tuple(buckets))

    def _is_shared_embedding(self, param: LocalParam) -> bool:
        """Whether it is one of the two copies of a tied embedding, on the first and the last stage."""
        tied = self.role.model.tie_word_embeddings and not self.role.value_head and self.role.layout.pp > 1
        return tied and param.name in ("embedding.word_embeddings.weight", "output_layer.weight")

    def _counts_as_expert(self, param: LocalParam) -> bool:
        """Whether its gradient is summed over an expert's replicas: where experts are divided otherwise than layers."""
        layout = self.role.layout
        return ".mlp.experts." in param.name and (layout.ep > 1 or layout.expert_tp != layout.tp)

    def _is_float32(self, param: LocalParam) -> bool:
        return any(self._map.is_float32(piece.hf_name) for piece in param.pieces)


def rollout_weight_bytes(model: ModelConfig, tp: int, rank: int, dtype: str) -> int:
    """Bytes of the weights of one rank of the rollout engine; rows that pad the last rank's vocabulary are left out."""
    total = 0
    for pattern in WeightMap(model).patterns(ParallelLayout(), tp):
        pieces = pattern.targets[rank % len(pattern.targets)]
        numel = sum(math.prod(piece.local_shape) for piece in pieces)
        width = FLOAT32 if pattern.float32 else DTYPE_BYTES[dtype]
        total += numel * len(pattern.layers) * max(1, pattern.experts) * width
    return total


def _by_chunk(
    params: Sequence[LocalParam], layout: ParallelLayout, model: ModelConfig, stage: int
) -> list[list[LocalParam]]:
    """A rank's parameters chunk by chunk; what is before the layers is in its first, what is behind in its last."""
    chunk_of = {layer: chunk for chunk in range(layout.vpp) for layer in layout.layers(model.num_layers, stage, chunk)}
    chunks: list[list[LocalParam]] = [[] for _ in range(layout.vpp)]
    for param in params:
        parts = param.name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            chunks[chunk_of[int(parts[2])]].append(param)
        else:
            chunks[0 if parts[0] == "embedding" else -1].append(param)
    return chunks


def _pad(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
