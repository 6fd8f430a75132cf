"""The reshard plan: which training rank sends which rectangle of which parameter to which rollout rank, in which order.

A pure function of the weight map, both layouts and where the ranks live. No layout is special, nothing is gathered, no
rank receives an element that is not its own, and vocabulary padding is never sent. The plan is columns of numbers, one
row per rectangle of a replica and one per parcel and replica; :class:`Move` objects are made for one rank at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from megarl.models import ParallelLayout, WeightMap
from megarl.models.shard_pattern import ShardPattern
from megarl.sharding.choice import choose_sources
from megarl.sharding.parcels import FLOAT32_BYTES, Column, Index, Numbers, ParcelTable, compact, replica_parcels
from megarl.sharding.placement import Placement, RolloutLayout
from megarl.sharding.schedule import schedule_buckets

_PARCELS_PER_BUCKET = 16  # more would fill the buckets better, and make the plan larger


class Move(NamedTuple):
    """One rectangle of ``shape`` elements: from an offset in a training shard to an offset in a rollout shard.

    Where the rollout shard stacks several tensors (a layer's experts), ``dst_start`` and ``shape`` have one number more
    than ``src_start``, which comes first, and the rectangle is one element thick there.
    """

    src_rank: int
    src_param: str
    dst_rank: int
    dst_param: str
    src_start: Index
    dst_start: Index
    shape: Index


class Bucket(NamedTuple):
    """Moves that travel together, and how many bytes the whole bucket is over all ranks."""

    moves: tuple[Move, ...]
    nbytes: int


class BucketSize(NamedTuple):
    """How many bytes a bucket is over all ranks."""

    nbytes: int


@dataclass(frozen=True, eq=False)
class ReshardPlan:
    """All moves of one sync, in buckets to be applied in order; made by :func:`build_plan`.

    In no bucket does a rank send, or receive, more than the bucket size that the plan was built with.

    Attributes:
        rollout: layout of the ranks that receive.
        table: what one replica receives; every replica receives the same.
        source: ``[replicas, parcels]``, the training rank that sends a parcel to a replica.
        bucket: ``[replicas, parcels]``, the bucket in which it does.
        buckets: size of each bucket.
        first_copy_rank: training ranks from here on hold the copy of a tied parameter, under the copy's name.
        float32_params: names, at both ends, of parameters that travel in float32 whatever the format of the others.
    """

    rollout: RolloutLayout
    table: ParcelTable
    source: Column
    bucket: Column
    buckets: tuple[BucketSize, ...]
    first_copy_rank: int
    float32_params: frozenset[str]

    @property
    def nbytes(self) -> int:
        """Bytes moved by one sync, over all ranks."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def sent_by(self, rank: int) -> list[Bucket]:
        """What a training rank sends: one entry per bucket, with this rank's moves, ``nbytes`` being of all ranks.

        The moves between two ranks are in the same order here and in :meth:`received_by`.
        """
        return self._buckets_of(*np.nonzero(self.source == rank))

    def received_by(self, rank: int) -> list[Bucket]:
        """What a rollout rank receives; as :meth:`sent_by`."""
        replica, target = divmod(rank, self.rollout.tp)
        parcels = np.flatnonzero(self.table.target == target)
        return self._buckets_of(np.full_like(parcels, replica), parcels)

    def pair_nbytes(self) -> tuple[Numbers, Numbers, Numbers]:
        """Training ranks, rollout ranks, and the bytes that pass between them in one sync: three equal columns."""
        world = self.rollout.world_size
        pair, at = np.unique(self.source.astype(np.int64) * world + self._destination(), return_inverse=True)
        nbytes = np.bincount(at.ravel(), np.broadcast_to(self.table.parcel_nbytes, self.source.shape).ravel())
        return pair // world, pair % world, nbytes.astype(np.int64)

    def _destination(self) -> Numbers:
        return np.arange(self.rollout.replicas)[:, None] * self.rollout.tp + self.table.target

    def _buckets_of(self, replicas: Numbers, parcels: Numbers) -> list[Bucket]:
        """Buckets of these parcels only; both columns ascend."""
        return buckets_of(self, replicas, parcels, self.source[replicas, parcels], self.bucket[replicas, parcels])


class _Geometry(Protocol):
    """What moves are made of."""

    @property
    def table(self) -> ParcelTable: ...
    @property
    def rollout(self) -> RolloutLayout: ...
    @property
    def first_copy_rank(self) -> int: ...
    @property
    def buckets(self) -> tuple[BucketSize, ...]: ...


def buckets_of(
    plan: _Geometry, replicas: Column | Numbers, parcels: Column | Numbers, sources: Column, buckets: Column
) -> list[Bucket]:
    """The moves of some parcels, given as four equal columns, by bucket.

    Args:
        plan: theirs.
        replicas: to which replica.
        parcels: numbers in the plan's table.
        sources: from which training rank.
        buckets: in which bucket.
    """
    moves: list[list[Move]] = [[] for _ in plan.buckets]
    maker = _MoveMaker(plan.table, plan.rollout, plan.first_copy_rank)
    columns = (column.tolist() for column in (replicas, parcels, sources, buckets))
    for replica, parcel, source, bucket in zip(*columns, strict=True):
        moves[bucket].extend(maker.moves(parcel, source, replica))
    return [Bucket(tuple(own), size.nbytes) for own, size in zip(moves, plan.buckets, strict=True)]


@dataclass(frozen=True, eq=False)
class _MoveMaker:
    """Turns rows of numbers into moves."""

    table: ParcelTable
    rollout: RolloutLayout
    first_copy_rank: int

    def moves(self, parcel: int, source: int, replica: int) -> Iterator[Move]:
        """The moves of one parcel to one replica."""
        table = self.table
        rank = replica * self.rollout.tp + int(table.target[parcel])
        rows = slice(*table.first_row[parcel : parcel + 2].tolist())
        columns = (table.rectangle[rows], table.layer[rows], table.expert[rows])
        for number, layer, expert in zip(*(column.tolist() for column in columns), strict=True):
            rectangle = table.rectangles[number]
            pattern = table.patterns[rectangle.pattern]
            src_name = pattern.copy if pattern.copy and source >= self.first_copy_rank else pattern.megatron
            dst_start, shape = rectangle.dst_start, rectangle.shape
            if pattern.experts:
                dst_start = (expert % (pattern.experts // self.rollout.ep), *dst_start)
                shape = (1, *shape)
            yield Move(
                source,
                src_name.format(layer=layer, expert=expert),
                rank,
                pattern.rollout.format(layer=layer),
                rectangle.src_start,
                dst_start,
                shape,
            )


def build_plan(
    weight_map: WeightMap,
    train: ParallelLayout,
    rollout: RolloutLayout,
    bucket_bytes: int,
    element_bytes: int,
    placement: Placement | None = None,
) -> ReshardPlan:
    """Plans the sync of one model.

    Args:
        weight_map: the model.
        train: layout of the ranks that send.
        rollout: layout of the ranks that receive.
        bucket_bytes: the most that one rank may send, and the most that one may receive, in one bucket.
        element_bytes: size of one element on the wire; of parameters that are kept in float32 it is 4 whatever this.
        placement: where every rank lives; None: all on one node, no two on one device.

    Returns:
        The plan; the same arguments give the same plan in every process. Among ranks that hold the same elements
        (replicas, unsplit parameters, tied copies) the nearest sends, and equally near ones divide the bytes.

    Raises:
        ValueError: ``bucket_bytes`` does not hold one element, the model does not divide over a layout, or the
            placement is one of other layouts.
    """
    patterns = tuple(weight_map.patterns(train, rollout.tp, rollout.ep))
    largest = max(element_bytes, *(FLOAT32_BYTES * pattern.float32 for pattern in patterns))
    if bucket_bytes < largest:
        raise ValueError(f"bucket_bytes={bucket_bytes} must hold at least one element of {largest} bytes")
    table = replica_parcels(patterns, train, rollout, bucket_bytes // _PARCELS_PER_BUCKET, element_bytes)
    source = choose_sources(table, rollout, train.world_size, placement)
    shape, nbytes = source.shape, np.broadcast_to(table.parcel_nbytes, source.shape).ravel()
    destination = (np.arange(rollout.replicas, dtype=np.int32)[:, None] * rollout.tp + table.target).ravel()
    bucket = schedule_buckets(source.ravel(), destination, nbytes, bucket_bytes)
    sizes = np.bincount(bucket, nbytes).astype(np.int64).tolist()
    return ReshardPlan(
        rollout=rollout,
        table=table,
        source=compact(source),
        bucket=compact(bucket.reshape(shape)),
        buckets=tuple(map(BucketSize, sizes)),
        first_copy_rank=train.world_size - train.ranks_per_stage,
        float32_params=_float32_params(patterns),
    )


def _float32_params(patterns: tuple[ShardPattern, ...]) -> frozenset[str]:
    kept = [pattern for pattern in patterns if pattern.float32]
    return frozenset(name.format(layer=layer) for p in kept for layer in p.layers for name in (p.megatron, p.rollout))
