"""Bytes of weights, gradients and optimizer state of a rank, exact to the byte.

The weight map gives the parameters of a rank. With the distributed optimizer, Megatron places weights and gradients in
buffers. Each parameter starts at a multiple of 64 elements. Each bucket is padded so that the data-parallel ranks
divide it at a multiple of 128. A rank holds the optimizer state of the elements in its share of each bucket. Gradients
are float32. For bfloat16 weights, the optimizer has float32 copies of its share. Adam's two running means are float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megarl.base.formatting import DTYPE_BYTES
from megarl.models import LocalParam, ModelConfig, ParallelLayout, WeightMap
from megarl.models.adapters import AdapterMap
from megarl.models.declaration import FP8_BLOCK
from megarl.models.tower_class import tower_parameters
from megarl.ops.plan.job import PlannedRole

FLOAT32 = 4
MOMENTS = 2  # Adam's running means of the gradient and of its square
PARAM_START, BUCKET_END = 64, 128  # Megatron's alignment, in elements, of parameter starts and bucket ends
SMALLEST_BUCKET, BUCKET_PER_RANK = 40_000_000, 1_000_000
"""Minimum elements of a Megatron bucket, in total and per data-parallel rank."""


@dataclass(frozen=True)
class RankStates:
    """Bytes of a role's model on a rank, with everything on the device."""

    parameters: int  # weight elements, without padding, frozen weights included
    weights: int  # weights in their compute dtype, with padding, frozen weights and adapters included
    gradients: int = 0  # gradient buffers
    main_weights: int = 0  # the optimizer's float32 copies of its share of the weights
    moments: int = 0  # Adam's running means
    frozen: int = 0  # bytes of the weights under adapters, which checkpoints do not contain

    @property
    def optimizer(self) -> int:
        """Bytes of main weights and moments."""
        return self.main_weights + self.moments

    @property
    def total(self) -> int:
        """Bytes of weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class _Buffer:
    """Megatron's buffer of one kind of parameters of one chunk: ranges of parameters and buckets ``[start, stop)``."""

    placed: tuple[tuple[int, int], ...]
    buckets: tuple[tuple[int, int], ...]

    @cached_property
    def numel(self) -> int:
        return self.buckets[-1][1] if self.buckets else 0

    def share(self, rank: int, ranks: int) -> int:
        """Return the parameter elements, without padding, in the share of param of ``ranks`` data-parallel ranks."""
        total = 0
        for start, stop in self.buckets:
            size = (stop - start) // ranks
            first, last = start + rank * size, start + (rank + 1) * size
            total += sum(max(0, min(end, last) - max(begin, first)) for begin, end in self.placed)
        return total


_COUNTED: dict[str, RankStates] = {}
_MOST_COUNTED = 4096


class StateCounter:
    """Counts the states of a role, rank by rank."""

    def __init__(self, role: PlannedRole) -> None:
        self.role = role
        self._map = WeightMap(role.model, role.value_head)
        self._adapters = AdapterMap(self._map, role.lora) if role.lora is not None else None

    def of(self, rank: int) -> RankStates:
        """Return the states of a rank.

        Plans of one model differ in few of the facts that decide its states, and a search makes hundreds.
        """
        role, megatron = self.role, self.role.megatron
        facts = (role.model, role.value_head, role.lora, role.layout, role.trains, role.dtype_bytes, rank)
        key = repr((*facts, megatron.use_distributed_optimizer, megatron.overlap_grad_reduce))  # a model has no hash
        if key not in _COUNTED:
            if len(_COUNTED) >= _MOST_COUNTED:
                _COUNTED.clear()
            _COUNTED[key] = self._count_rank(rank)
        return _COUNTED[key]

    def _count_rank(self, rank: int) -> RankStates:
        layout, width = self.role.layout, self.role.dtype_bytes
        params = self._map.megatron_params(layout, rank)
        numbers = [math.prod(param.shape) for param in params]
        exact = sum(n for n, param in zip(numbers, params, strict=True) if self._is_float32(param))
        frozen = 0
        if self._adapters is not None:
            in_full = [p for p in params if any(piece.hf_name in self._adapters.in_full for piece in p.pieces)]
            frozen = (sum(numbers) - exact - _count(in_full)) * width + exact * FLOAT32
            params = self._adapters.megatron_params(layout, rank)
            numbers, exact = [sum(numbers) - _count(in_full), *(math.prod(param.shape) for param in params)], 0
        if not self.role.trains:
            return RankStates(sum(numbers), (sum(numbers) - exact) * width + exact * FLOAT32)
        distributed = self.role.megatron.use_distributed_optimizer
        numel = share = 0
        for buffer, among, ranks in self._buffers(params, rank):
            numel += buffer.numel
            share += buffer.share(among, ranks) if distributed else buffer.numel
        return RankStates(
            parameters=sum(numbers),
            weights=numel * width + exact * FLOAT32 + frozen,
            gradients=numel * FLOAT32,
            main_weights=0 if width == FLOAT32 else share * FLOAT32,
            moments=MOMENTS * share * FLOAT32,
            frozen=frozen,
        )

    def _buffers(self, params: Sequence[LocalParam], rank: int) -> list[tuple[_Buffer, int, int]]:
        """Return the buffers of a rank, each with the rank's index in its data-parallel group and the group's size."""
        layout, result = self.role.layout, []
        coordinate, expert_coordinate = layout.coordinate(rank), layout.expert_coordinate(rank)
        dense_place = (coordinate.dp * layout.cp + coordinate.cp, layout.dp * layout.cp)
        expert_place = (expert_coordinate.edp, layout.expert_dp)
        apart = layout.ep > 1 or layout.expert_tp != layout.tp  # experts' gradients are reduced over their own replicas
        for chunk, chunk_params in enumerate(_by_chunk(params, layout, self.role.model, coordinate.pp)):
            trained = [param for param in chunk_params if not self._is_float32(param)]
            for is_expert in (False, True):
                members = [param for param in trained if (apart and ".mlp.experts." in param.name) is is_expert]
                if members:
                    index, ranks = expert_place if is_expert else dense_place
                    bucketed = coordinate.pp == 0 and chunk == 0
                    result.append((self._buffer(members, ranks, bucketed), index, ranks))
        return result

    def _buffer(self, params: Sequence[LocalParam], ranks: int, bucketed: bool) -> _Buffer:
        """Place parameters in a buffer, the last first, roughly in the order in which gradients are computed."""
        megatron, layout = self.role.megatron, self.role.layout
        padded = megatron.use_distributed_optimizer
        size = math.inf
        if megatron.overlap_grad_reduce and bucketed:
            size = max(SMALLEST_BUCKET, BUCKET_PER_RANK * layout.dp * layout.cp)
        placed: list[tuple[int, int]] = []
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
            placed.append((at, at + math.prod(param.shape)))
            at = placed[-1][1]
            if alone or at - opened >= size:
                at = opened = close(at)
        if at > opened:
            close(at)
        return _Buffer(tuple(placed), tuple(buckets))

    def _is_shared_embedding(self, param: LocalParam) -> bool:
        """Whether a parameter is one of the two copies of a tied embedding, on the first or last stage."""
        tied = self.role.model.tie_word_embeddings and not self.role.value_head and self.role.layout.pp > 1
        return tied and param.name in ("embedding.word_embeddings.weight", "output_layer.weight")

    def _is_float32(self, param: LocalParam) -> bool:
        return any(self._map.is_float32(piece.hf_name) for piece in param.pieces)


def tower_bytes(model: ModelConfig, width: int) -> int:
    """Return the weight bytes of a model's vision tower, which no rank splits; 0 for a model of text.

    Args:
        width: bytes of an element.
    """
    return 0 if model.vision is None else width * tower_parameters(model.vision)


def rollout_weight_bytes(model: ModelConfig, tp: int, rank: int, dtype: str, *, fp8: bool = False) -> int:
    """Return the weight bytes of an engine's rank, with ``fp8`` matrices of linear layers in blockwise FP8.

    The vision tower counts in full, also where the engine splits it.
    """
    total = tower_bytes(model, DTYPE_BYTES[dtype])
    for pattern in WeightMap(model).patterns(ParallelLayout(), tp):
        pieces = pattern.targets[rank % len(pattern.targets)]
        if fp8 and pattern.linear:
            blocks = [math.prod(-(-size // FP8_BLOCK) for size in piece.shape) for piece in pieces]
            nbytes = sum(math.prod(piece.shape) for piece in pieces) + FLOAT32 * sum(blocks)
        else:
            width = FLOAT32 if pattern.float32 else DTYPE_BYTES[dtype]
            nbytes = sum(math.prod(piece.local_shape) for piece in pieces) * width
        total += nbytes * len(pattern.layers) * max(1, pattern.experts)
    return total


def _by_chunk(
    params: Sequence[LocalParam], layout: ParallelLayout, model: ModelConfig, stage: int
) -> list[list[LocalParam]]:
    """Group a rank's parameters by chunk: embedding and tower in the first chunk, final norm and head in the last."""
    chunk_of = {layer: chunk for chunk in range(layout.vpp) for layer in layout.layers(model.num_layers, stage, chunk)}
    chunks: list[list[LocalParam]] = [[] for _ in range(layout.vpp)]
    for param in params:
        parts = param.name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            chunks[chunk_of[int(parts[2])]].append(param)
        else:
            chunks[0 if parts[0] in ("embedding", "vision_tower") else -1].append(param)
    return chunks


def _count(params: Sequence[LocalParam]) -> int:
    return sum(math.prod(param.shape) for param in params)


def _pad(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
