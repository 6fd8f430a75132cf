"""Transfers into one engine replica, and the training ranks that can send each: the geometry of a reshard plan.

Source and destination shards are rectangles of the same Hugging Face tensors. Their intersections are the overlaps.
Layers have the same geometry, and so have experts. Therefore overlaps are computed once per
:class:`~megarl.models.ShardPattern` and repeated over layers and experts as columns of numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.models import ParallelLayout, Piece
from megarl.models.declaration import PipelineStage
from megarl.models.weight_map import ShardPattern
from megarl.sharding.placement import RolloutLayout

Index = tuple[int, ...]
Numbers = NDArray[np.int64]
Column = NDArray[np.int32] | NDArray[np.uint16]
"""Non-negative numbers, in 16 bits if they fit: small to send, and sorted in linear time."""

FLOAT32_BYTES = 4


class Overlap(NamedTuple):
    """Intersection of one source shard and one target shard, in every layer and expert of a pattern.

    ``source`` and ``target`` are positions among the pattern's shards. ``dst_start`` has no expert dimension.
    """

    pattern: int
    source: int
    target: int
    src_start: Index
    dst_start: Index
    shape: Index


@dataclass(frozen=True, eq=False)
class TransferTable:
    """All transfers into one replica, as columns; a transfer is a run of rows that one rank can send.

    Attributes:
        overlap: ``[rows]``, index into ``overlaps``.
        layer: ``[rows]``, layer number.
        expert: ``[rows]``, expert number within its layer; 0 for other parameters.
        first_row: ``[transfers + 1]``, first row of each transfer, then the number of rows.
        target: ``[transfers]``, receiving rank within the replica; ascending.
        holders: ``[transfers]``, index into ``holder_sets``.
        transfer_nbytes: ``[transfers]``, size in bytes.
        holder_sets: sets of training ranks that hold the same elements; ascending.
    """

    patterns: tuple[ShardPattern, ...]
    overlaps: tuple[Overlap, ...]
    overlap: Column
    layer: Column
    expert: Column
    first_row: Numbers
    target: Column
    holders: Column
    transfer_nbytes: Numbers
    holder_sets: tuple[Numbers, ...]

    def select(self, transfers: Numbers) -> TransferTable:
        """Return the table of these transfer numbers, in order, without unused overlaps; it counts from 0."""
        first, counts = self.first_row[transfers], np.diff(self.first_row)[transfers]
        bounds = np.append(0, np.cumsum(counts))
        rows = np.repeat(first - bounds[:-1], counts) + np.arange(bounds[-1])
        used, overlap = np.unique(self.overlap[rows], return_inverse=True)
        return TransferTable(
            patterns=tuple(pattern._replace(layers=(), sources=(), targets=()) for pattern in self.patterns),
            overlaps=tuple(self.overlaps[number] for number in used.tolist()),
            overlap=compact(overlap.astype(np.int32)),
            layer=self.layer[rows],
            expert=self.expert[rows],
            first_row=bounds,
            target=self.target[transfers],
            holders=self.holders[:0],
            transfer_nbytes=self.transfer_nbytes[transfers],
            holder_sets=(),
        )


def replica_transfers(
    patterns: tuple[ShardPattern, ...],
    train: ParallelLayout,
    rollout: RolloutLayout,
    transfer_bytes: int,
    element_bytes: int,
) -> TransferTable:
    """Compute the transfers into one replica.

    Args:
        patterns: :meth:`megarl.models.WeightMap.patterns` of both layouts.
        transfer_bytes: maximum size of an overlap (at least one element); a transfer holds less than twice as much.
        element_bytes: size of a sent element, except in parameters kept in float32.

    Raises:
        ValueError: the ranks of a pipeline stage do not divide into the trainer's expert parallelism.
    """
    rows = _Rows(_Holders(train, patterns), rollout)
    for number, pattern in enumerate(patterns):
        size = FLOAT32_BYTES if pattern.float32 else element_bytes
        for overlap in _overlaps(number, pattern, max(1, transfer_bytes // size)):
            rows.add(pattern, overlap, size)
    return rows.table(patterns, transfer_bytes)


def compact(column: Column) -> Column:
    """Convert a column to 16 bits if its numbers fit."""
    return column.astype(np.uint16) if column.max(initial=0) < 2**16 else column


def _overlaps(number: int, pattern: ShardPattern, limit: int) -> Iterator[Overlap]:
    """Yield every intersection of a source and a target shard, cut into tiles of at most ``limit`` elements."""
    by_tensor: dict[str, list[tuple[int, Piece]]] = {}
    for source, pieces in enumerate(pattern.sources):
        for piece in pieces:
            by_tensor.setdefault(piece.hf_name, []).append((source, piece))
    for target, target_pieces in enumerate(pattern.targets):
        for piece in target_pieces:
            for source, held in by_tensor.get(piece.hf_name, ()):
                low = tuple(map(max, piece.start, held.start))
                shape = tuple(b - a for a, b in zip(low, map(min, piece.stop, held.stop), strict=True))
                if min(shape) > 0:
                    src, dst = _within(low, held), _within(low, piece)
                    for at, extent in _tiles(shape, limit):
                        yield Overlap(number, source, target, _add(src, at), _add(dst, at), extent)


def _within(low: Index, piece: Piece) -> Index:
    return tuple(a - b + c for a, b, c in zip(low, piece.start, piece.at, strict=True))


def _add(left: Index, right: Index) -> Index:
    return tuple(a + b for a, b in zip(left, right, strict=True))


def _tiles(shape: Index, limit: int) -> Iterator[tuple[Index, Index]]:
    """Yield offsets and shapes of tiles of at most ``limit`` elements, cut along the first dimensions."""
    if prod(shape) <= limit:
        yield (0,) * len(shape), shape
        return
    rows, *rest = shape
    row = prod(rest)
    if row <= limit:
        step = limit // row
        for first in range(0, rows, step):
            yield (first, *(0,) * len(rest)), (min(step, rows - first), *rest)
        return
    for index in range(rows):
        for at, extent in _tiles(tuple(rest), limit):
            yield (index, *at), (1, *extent)


class _Holders:
    """Numbers the sets of training ranks that hold the same shards."""

    def __init__(self, train: ParallelLayout, patterns: Sequence[ShardPattern]) -> None:
        if any(pattern.experts for pattern in patterns) and train.ranks_per_stage % (train.ep * train.expert_tp):
            raise ValueError(
                f"training layout {train.describe()}: the {train.ranks_per_stage} ranks of a stage do not divide into "
                f"{train.ep} x {train.expert_tp}, groups of experts times ranks that share an expert"
            )
        self._train = train
        num_layers = 1 + max(layer for pattern in patterns for layer in pattern.layers)
        self._numbers: dict[tuple[object, ...], int] = {}
        self._tables: dict[tuple[object, ...], NDArray[np.int32]] = {}
        self._stage_of = np.zeros(num_layers, dtype=np.int32)
        for stage in range(train.pp):
            self._stage_of[train.stage_layers(num_layers, stage)] = stage
        self.sets: list[Numbers] = []

    def of(self, pattern: ShardPattern, source: int) -> NDArray[np.int32]:
        """Return the holder set (ranks with this shard) by layer and expert, ``[layers, experts]``; dense: one."""
        shard = source if len(pattern.sources) > 1 else None
        key = (pattern.stage, pattern.copy, pattern.layers, pattern.experts, shard)
        if key not in self._tables:
            groups = self._train.ep if pattern.experts else 1
            table = np.array(
                [
                    [self._number(stages, group if pattern.experts else None, shard) for group in range(groups)]
                    for stages in self._stages(pattern)
                ],
                dtype=np.int32,
            )
            in_layers = pattern.stage is PipelineStage.LAYER
            used = self._stage_of[list(pattern.layers)] if in_layers else np.zeros(1, np.int32)
            self._tables[key] = np.repeat(table[used], max(1, pattern.experts // groups), axis=1)
        return self._tables[key]

    def _stages(self, pattern: ShardPattern) -> list[tuple[int, ...]]:
        """Return the pipeline stages that hold a parameter: one entry per stage for layers, one entry otherwise."""
        last = self._train.pp - 1
        if pattern.stage is PipelineStage.LAYER:
            return [(stage,) for stage in range(self._train.pp)]
        if pattern.stage is PipelineStage.FIRST:
            return [(0, last) if pattern.copy else (0,)]
        return [(last,)]

    def _number(self, stages: tuple[int, ...], expert_group: int | None, shard: int | None) -> int:
        key = (stages, expert_group, shard)
        if key not in self._numbers:
            self._numbers[key] = len(self.sets)
            within = self._within_stage(expert_group, shard)
            self.sets.append(np.concatenate([within + stage * self._train.ranks_per_stage for stage in stages]))
        return self._numbers[key]

    def _within_stage(self, expert_group: int | None, shard: int | None) -> Numbers:
        train = self._train
        if expert_group is None:
            ranks = np.arange(train.ranks_per_stage).reshape(-1, train.tp)
        else:
            among = np.arange(train.ranks_per_stage).reshape(train.expert_dp, train.ep, train.expert_tp)
            ranks = among[:, expert_group]
        return (ranks if shard is None else ranks[:, shard]).ravel()


@dataclass
class _Rows:
    """Collects the rows of a table, one chunk per overlap."""

    holders: _Holders
    rollout: RolloutLayout
    overlaps: list[Overlap] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    chunks: list[NDArray[np.int32]] = field(default_factory=list)

    def add(self, pattern: ShardPattern, overlap: Overlap, element_bytes: int) -> None:
        """Add an overlap in every layer and for every expert of its pattern."""
        holders = self.holders.of(pattern, overlap.source)
        layers, experts = np.asarray(pattern.layers, dtype=np.int32), np.arange(holders.shape[1], dtype=np.int32)
        target = np.full_like(experts, overlap.target)
        if pattern.experts:
            target += experts // (pattern.experts // self.rollout.ep) * len(pattern.targets)
        columns = (target, holders, len(self.overlaps), layers[:, None], experts)
        self.chunks.append(np.stack([np.broadcast_to(column, holders.shape).ravel() for column in columns]))
        self.overlaps.append(overlap)
        self.sizes.append(prod(overlap.shape) * element_bytes)

    def table(self, patterns: tuple[ShardPattern, ...], transfer_bytes: int) -> TransferTable:
        """Sort the rows so that rows between the same ranks are neighbors, and cut them into transfers."""
        columns = np.concatenate(self.chunks, axis=1)
        # Within one pair of ranks: by layer, then by tensor.
        columns = columns[:, np.lexsort((columns[4], columns[2], columns[3], columns[1], columns[0]))]
        target, holders, overlap, layer, expert = columns
        nbytes = np.asarray(self.sizes, dtype=np.int64)[overlap]
        first = _transfer_starts(target, holders, nbytes, transfer_bytes)
        return TransferTable(
            patterns=patterns,
            overlaps=tuple(self.overlaps),
            overlap=compact(overlap),
            layer=compact(layer),
            expert=compact(expert),
            first_row=np.append(first, len(nbytes)),
            target=compact(target[first]),
            holders=compact(holders[first]),
            transfer_nbytes=np.add.reduceat(nbytes, first),
            holder_sets=tuple(self.holders.sets),
        )


def _transfer_starts(
    target: NDArray[np.int32], holders: NDArray[np.int32], nbytes: Numbers, transfer_bytes: int
) -> Numbers:
    """Return the first row of each transfer: runs between the same ranks, cut once they hold ``transfer_bytes``."""
    begins = np.ones(len(nbytes), dtype=bool)
    begins[1:] = (target[1:] != target[:-1]) | (holders[1:] != holders[:-1])
    before = np.cumsum(nbytes) - nbytes
    before -= np.repeat(before[begins], np.diff(np.append(np.flatnonzero(begins), len(nbytes))))
    filled = before // max(1, transfer_bytes)
    begins[1:] |= filled[1:] != filled[:-1]
    return np.flatnonzero(begins)
