"""Which rectangles one engine replica receives, and which training ranks hold each: the geometry of a reshard plan.

Source and destination shards are rectangles of the same Hugging Face tensors, so what moves is the intersection of two
rectangles. Layers and experts are alike: rectangles are intersected once per :class:`~megarl.models.ShardPattern` and
laid out over layers and experts as columns of numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.models import ParallelLayout, Piece
from megarl.models.declaration import Home
from megarl.models.shard_pattern import ShardPattern
from megarl.sharding.placement import RolloutLayout

Index = tuple[int, ...]
Numbers = NDArray[np.int64]
Column = NDArray[np.int32] | NDArray[np.uint16]
"""Counting numbers, in 16 bits where they suffice: short to send, and sorted in linear time."""

FLOAT32_BYTES = 4


class Rectangle(NamedTuple):
    """What one source shard contributes to one target shard, in every layer and expert of a pattern.

    ``source`` and ``target`` are positions among the pattern's shards; ``dst_start`` lacks the number of the expert.
    """

    pattern: int
    source: int
    target: int
    src_start: Index
    dst_start: Index
    shape: Index


@dataclass(frozen=True, eq=False)
class ParcelTable:
    """All rectangles that a replica receives, as columns; a parcel is a run of rows that has one source.

    Attributes:
        patterns: the parameters, by number.
        rectangles: the geometry, by number.
        rectangle: ``[rows]``, number of the geometry.
        layer: ``[rows]``.
        expert: ``[rows]``, number among all of its layer; 0 for what is not of an expert.
        first_row: ``[parcels + 1]``, where each parcel begins; the last number is that of all rows.
        target: ``[parcels]``, the receiving rank of the replica; ascending.
        holders: ``[parcels]``, which entry of ``holder_sets``.
        parcel_nbytes: ``[parcels]``.
        holder_sets: training ranks, ascending, any of which can send the same.
    """

    patterns: tuple[ShardPattern, ...]
    rectangles: tuple[Rectangle, ...]
    rectangle: Column
    layer: Column
    expert: Column
    first_row: Numbers
    target: Column
    holders: Column
    parcel_nbytes: Numbers
    holder_sets: tuple[Numbers, ...]

    def select(self, parcels: Numbers) -> ParcelTable:
        """The table of some parcels alone, in this order, with what their moves are made of and nothing else.

        Args:
            parcels: ``[selected]``, numbers of parcels here; the new ones count from 0.
        """
        first, counts = self.first_row[parcels], np.diff(self.first_row)[parcels]
        bounds = np.append(0, np.cumsum(counts))
        rows = np.repeat(first - bounds[:-1], counts) + np.arange(bounds[-1])
        used, rectangle = np.unique(self.rectangle[rows], return_inverse=True)
        return ParcelTable(
            patterns=tuple(pattern._replace(layers=(), sources=(), targets=()) for pattern in self.patterns),
            rectangles=tuple(self.rectangles[number] for number in used.tolist()),
            rectangle=compact(rectangle.astype(np.int32)),
            layer=self.layer[rows],
            expert=self.expert[rows],
            first_row=bounds,
            target=self.target[parcels],
            holders=self.holders[:0],
            parcel_nbytes=self.parcel_nbytes[parcels],
            holder_sets=(),
        )


def replica_parcels(
    patterns: tuple[ShardPattern, ...],
    train: ParallelLayout,
    rollout: RolloutLayout,
    parcel_bytes: int,
    element_bytes: int,
) -> ParcelTable:
    """What one replica receives.

    Args:
        patterns: the model (:meth:`megarl.models.WeightMap.patterns` of both layouts).
        train: layout of the ranks that send.
        rollout: layout of the ranks that receive.
        parcel_bytes: rectangles are cut to at most this (but hold one element at least), and parcels hold less than
            twice of it.
        element_bytes: size of an element of what is not kept in float32.

    Raises:
        ValueError: the ranks of a pipeline stage do not divide into the trainer's expert parallelism.
    """
    rows = _Rows(_Holders(train, patterns), rollout)
    for number, pattern in enumerate(patterns):
        size = FLOAT32_BYTES if pattern.float32 else element_bytes
        for rectangle in _rectangles(number, pattern, max(1, parcel_bytes // size)):
            rows.add(pattern, rectangle, size)
    return rows.table(patterns, parcel_bytes)


def compact(column: Column) -> Column:
    """The same numbers in as few bits as hold them."""
    return column.astype(np.uint16) if column.max(initial=0) < 2**16 else column


def _rectangles(number: int, pattern: ShardPattern, limit: int) -> Iterator[Rectangle]:
    """Every intersection of a source with a target shard, in parts of at most ``limit`` elements."""
    by_tensor: dict[str, list[tuple[int, Piece]]] = {}
    for source, pieces in enumerate(pattern.sources):
        for piece in pieces:
            by_tensor.setdefault(piece.hf_name, []).append((source, piece))
    for target, wanted in enumerate(pattern.targets):
        for piece in wanted:
            for source, held in by_tensor.get(piece.hf_name, ()):
                low = tuple(map(max, piece.start, held.start))
                shape = tuple(b - a for a, b in zip(low, map(min, piece.stop, held.stop), strict=True))
                if min(shape) > 0:
                    src, dst = _within(low, held), _within(low, piece)
                    for at, extent in _tiles(shape, limit):
                        yield Rectangle(number, source, target, _add(src, at), _add(dst, at), extent)


def _within(low: Index, piece: Piece) -> Index:
    """Offset in the local tensor of a place in the Hugging Face tensor."""
    return tuple(a - b + c for a, b, c in zip(low, piece.start, piece.at, strict=True))


def _add(left: Index, right: Index) -> Index:
    return tuple(a + b for a, b in zip(left, right, strict=True))


def _tiles(shape: Index, limit: int) -> Iterator[tuple[Index, Index]]:
    """Offsets and extents that cut a rectangle into parts of at most ``limit`` elements, along the first dimensions."""
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
        """Numbers of the sets that hold a source shard: ``[layers, experts]``, one expert where there are none."""
        shard = source if len(pattern.sources) > 1 else None
        key = (pattern.home, pattern.copy, pattern.layers, pattern.experts, shard)
        if key not in self._tables:
            groups = self._train.ep if pattern.experts else 1
            table = np.array(
                [
                    [self._number(stages, group if pattern.experts else None, shard) for group in range(groups)]
                    for stages in self._stages(pattern)
                ],
                dtype=np.int32,
            )
            used = self._stage_of[list(pattern.layers)] if pattern.home is Home.LAYER else np.zeros(1, np.int32)
            self._tables[key] = np.repeat(table[used], max(1, pattern.experts // groups), axis=1)
        return self._tables[key]

    def _stages(self, pattern: ShardPattern) -> list[tuple[int, ...]]:
        """For each stage that may hold a layer, or once for what is outside the layers: where it is held."""
        last = self._train.pp - 1
        if pattern.home is Home.LAYER:
            return [(stage,) for stage in range(self._train.pp)]
        if pattern.home is Home.FIRST:
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
    """Collects rows, one chunk per rectangle."""

    holders: _Holders
    rollout: RolloutLayout
    rectangles: list[Rectangle] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    chunks: list[NDArray[np.int32]] = field(default_factory=list)

    def add(self, pattern: ShardPattern, rectangle: Rectangle, element_bytes: int) -> None:
        """Adds a rectangle in every layer and for every expert of its pattern."""
        holders = self.holders.of(pattern, rectangle.source)
        layers, experts = np.asarray(pattern.layers, dtype=np.int32), np.arange(holders.shape[1], dtype=np.int32)
        target = np.full_like(experts, rectangle.target)
        if pattern.experts:
            target += experts // (pattern.experts // self.rollout.ep) * len(pattern.targets)
        columns = (target, holders, len(self.rectangles), layers[:, None], experts)
        self.chunks.append(np.stack([np.broadcast_to(column, holders.shape).ravel() for column in columns]))
        self.rectangles.append(rectangle)
        self.sizes.append(prod(rectangle.shape) * element_bytes)

    def table(self, patterns: tuple[ShardPattern, ...], parcel_bytes: int) -> ParcelTable:
        """The rows in an order in which those between the same ranks are neighbours, cut into parcels."""
        columns = np.concatenate(self.chunks, axis=1)
        # Within one pair of ranks: layer by layer, and what belongs to one tensor together.
        columns = columns[:, np.lexsort((columns[4], columns[2], columns[3], columns[1], columns[0]))]
        target, holders, rectangle, layer, expert = columns
        nbytes = np.asarray(self.sizes, dtype=np.int64)[rectangle]
        first = _parcels(target, holders, nbytes, parcel_bytes)
        return ParcelTable(
            patterns=patterns,
            rectangles=tuple(self.rectangles),
            rectangle=compact(rectangle),
            layer=compact(layer),
            expert=compact(expert),
            first_row=np.append(first, len(nbytes)),
            target=compact(target[first]),
            holders=compact(holders[first]),
            parcel_nbytes=np.add.reduceat(nbytes, first),
            holder_sets=tuple(self.holders.sets),
        )


def _parcels(target: NDArray[np.int32], holders: NDArray[np.int32], nbytes: Numbers, parcel_bytes: int) -> Numbers:
    """First row of each parcel: runs between the same ranks, cut before a row at which ``parcel_bytes`` are full."""
    begins = np.ones(len(nbytes), dtype=bool)
    begins[1:] = (target[1:] != target[:-1]) | (holders[1:] != holders[:-1])
    before = np.cumsum(nbytes) - nbytes
    before -= np.repeat(before[begins], np.diff(np.append(np.flatnonzero(begins), len(nbytes))))
    filled = before // max(1, parcel_bytes)
    begins[1:] |= filled[1:] != filled[:-1]
    return np.flatnonzero(begins)
