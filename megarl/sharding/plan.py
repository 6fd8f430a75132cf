"""The reshard plan: which training rank sends which slice to which rollout rank, and in which bucket.

The plan is a pure function of the weight map, both layouts and the placement of the ranks. It needs no process. It
covers every pair of layouts, gathers nothing, and sends no vocabulary padding. Every rank receives only its shard.

Terms of this package, from the model to the wire:

- *shard*: the part of a parameter that one rank holds.
- *overlap*: the intersection of a training shard and a rollout shard, shared by all layers and experts.
- *transfer op* (:class:`TransferOp`): one overlap in one layer, from one training rank to one rollout rank.
- *transfer*: consecutive ops with the same destination and the same possible senders; the unit of scheduling.
- *bucket* (:class:`Bucket`): the ops of one round, bounded in bytes per rank.
- *wave* (:class:`SyncWave`): replicas that receive their weights at the same time, in buckets of their own.
- *message* (:class:`megarl.sharding.sender.Message`): the bytes that one rank sends to one rank in a bucket.
- *tensor slice*: a received op: parameter name, offset, values.

A plan stores columns of numbers: one row per op of a replica, and one entry per transfer and replica. The
:class:`TransferOp` objects are created for one rank at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megarl.models import ParallelLayout, WeightMap
from megarl.sharding.placement import Placement, RolloutLayout
from megarl.sharding.schedule import choose_sources, schedule_buckets
from megarl.sharding.transfers import FLOAT32_BYTES, Column, Index, Numbers, TransferTable, compact, replica_transfers

NO_VERSION = -1
"""Version of weights that are absent or incomplete."""

_TRANSFERS_PER_BUCKET = 16  # more transfers fill the buckets better but make the plan larger


class TransferOp(NamedTuple):
    """Copy ``shape`` elements from an offset in a training shard to an offset in a rollout shard.

    A rollout shard may stack several tensors, such as the experts of a layer. Then ``dst_start`` and ``shape`` have one
    more leading dimension than ``src_start``, of extent 1.
    """

    src_rank: int
    src_param: str
    dst_rank: int
    dst_param: str
    src_start: Index
    dst_start: Index
    shape: Index


class Bucket(NamedTuple):
    """The transfer ops of one round, and the size of the whole bucket over all ranks."""

    ops: tuple[TransferOp, ...]
    nbytes: int


class SyncWave(NamedTuple):
    """Replicas that receive their weights at the same time; the waves of a plan follow each other."""

    replicas: range
    buckets: range


@dataclass(frozen=True, eq=False)
class ReshardPlan:
    """All transfer ops of one weight sync, in buckets to apply in order. :func:`build_plan` creates it.

    In a bucket no rank sends or receives more than the bucket size of the plan.

    Attributes:
        table: transfers into one replica; every replica receives the same ones.
        source: ``[replicas, transfers]``, the training rank that sends a transfer to a replica.
        bucket: ``[replicas, transfers]``, the bucket of that transfer.
        buckets: bytes of each bucket, over all ranks.
        waves: all replicas and buckets, in order.
        first_copy_rank: first training rank that holds the copy of a tied parameter, under the copy's name.
        float32_params: names, at both ends, of parameters that are always sent in float32.
    """

    rollout: RolloutLayout
    table: TransferTable
    source: Column
    bucket: Column
    buckets: tuple[int, ...]
    waves: tuple[SyncWave, ...]
    first_copy_rank: int
    float32_params: frozenset[str]

    @property
    def nbytes(self) -> int:
        """Bytes of one sync, over all ranks."""
        return sum(self.buckets)

    def sent_by(self, rank: int) -> list[Bucket]:
        """Return the sends of a training rank: one entry per bucket, with the size of the whole bucket.

        The ops between two ranks have the same order here and in :meth:`received_by`.
        """
        return self._buckets_of(*np.nonzero(self.source == rank))

    def received_by(self, rank: int) -> list[Bucket]:
        """Return the receives of a rollout rank; see :meth:`sent_by`."""
        replica, target = divmod(rank, self.rollout.tp)
        transfers = np.flatnonzero(self.table.target == target)
        return self._buckets_of(np.full_like(transfers, replica), transfers)

    def imported_by(self, rank: int) -> range:
        """Return the numbers of the buckets that a rollout rank imports: those of its wave."""
        replica = rank // self.rollout.tp
        return next(wave.buckets for wave in self.waves if replica in wave.replicas)

    def pair_nbytes(self, wave: SyncWave | None = None) -> tuple[Numbers, Numbers, Numbers]:
        """Return the bytes per pair of ranks in one sync, or one wave: training ranks, rollout ranks and bytes."""
        part = slice(None) if wave is None else slice(wave.replicas.start, wave.replicas.stop)
        source, world = self.source[part], self.rollout.world_size
        destination = np.arange(self.rollout.replicas)[:, None] * self.rollout.tp + self.table.target
        pair, at = np.unique(source.astype(np.int64) * world + destination[part], return_inverse=True)
        nbytes = np.bincount(at.ravel(), np.broadcast_to(self.table.transfer_nbytes, source.shape).ravel())
        return pair // world, pair % world, nbytes.astype(np.int64)

    @cached_property
    def receivers(self) -> list[dict[int, list[int]]]:
        """Replicas that a training rank sends to, by bucket and rank; ranks that send nothing are absent."""
        replicas = np.arange(self.rollout.replicas)[:, None]
        sources = int(self.source.max(initial=0)) + 1
        keys = np.unique((self.bucket.astype(np.int64) * sources + self.source) * self.rollout.replicas + replicas)
        pairs, replica = np.divmod(keys, self.rollout.replicas)
        receivers: list[dict[int, list[int]]] = [{} for _ in self.buckets]
        for bucket, source, number in zip(*map(np.ndarray.tolist, (*np.divmod(pairs, sources), replica)), strict=True):
            receivers[bucket].setdefault(source, []).append(number)
        return receivers

    def _buckets_of(self, replicas: Numbers, transfers: Numbers) -> list[Bucket]:
        return buckets_of(self, replicas, transfers, self.source[replicas, transfers], self.bucket[replicas, transfers])


@dataclass(frozen=True, eq=False)
class RankPlan:
    """The part of a reshard plan that one rank needs, small enough to send; a drop-in for :class:`ReshardPlan`.

    Attributes:
        rank: training rank if it ``sends``, else rollout rank.
        replica: ``[entries]``, receiving replica.
        transfer: ``[entries]``, row number in the table.
        source: ``[entries]``, sending training rank.
        bucket: ``[entries]``, bucket number.
        wave: numbers of the buckets that the rank takes part in.
        buckets: bytes of each bucket, over all ranks.
    """

    rank: int
    sends: bool
    table: TransferTable
    replica: Column
    transfer: Column
    source: Column
    bucket: Column
    wave: range
    rollout: RolloutLayout
    buckets: tuple[int, ...]
    first_copy_rank: int
    float32_params: frozenset[str]

    def sent_by(self, rank: int) -> list[Bucket]:
        """See :meth:`ReshardPlan.sent_by`; raises ValueError for another rank."""
        return self._buckets(rank, sends=True)

    def received_by(self, rank: int) -> list[Bucket]:
        """See :meth:`ReshardPlan.received_by`; raises ValueError for another rank."""
        return self._buckets(rank, sends=False)

    def imported_by(self, rank: int) -> range:
        """See :meth:`ReshardPlan.imported_by`; raises ValueError for another rank."""
        self._check(rank, sends=False)
        return self.wave

    def _buckets(self, rank: int, sends: bool) -> list[Bucket]:
        self._check(rank, sends)
        return buckets_of(self, self.replica, self.transfer, self.source, self.bucket)

    def _check(self, rank: int, sends: bool) -> None:
        if (rank, sends) != (self.rank, self.sends):
            names = {True: "training rank", False: "rollout rank"}
            raise ValueError(f"this is the plan of {names[self.sends]} {self.rank}, not of {names[sends]} {rank}")


def build_plan(
    weight_map: WeightMap,
    train: ParallelLayout,
    rollout: RolloutLayout,
    bucket_bytes: int,
    element_bytes: int,
    placement: Placement | None = None,
    wave_replicas: int | None = None,
    *,
    together: bool = False,
) -> ReshardPlan:
    """Plan the weight sync of one model.

    Among ranks that hold the same elements (replicas, unsplit parameters, tied copies) the nearest one sends. Equally
    near ranks share the bytes evenly.

    Args:
        bucket_bytes: maximum bytes that one rank sends, and that one rank receives, in one bucket.
        element_bytes: size of a sent element; parameters kept in float32 always take 4 bytes.
        placement: node and device of every rank; None = all on one node, each on its own device.
        wave_replicas: replicas of a wave; None = one wave of all replicas.
        together: keep the slices of a matrix in nearby buckets, so that an engine that quantizes complete
            matrices buffers few of them; see :func:`~megarl.sharding.schedule.schedule_buckets`.

    Returns:
        The plan. The same arguments give the same plan in every process.

    Raises:
        ValueError: ``bucket_bytes`` is smaller than one element, the model does not divide over a layout, or the
            placement has another number of ranks.
    """
    patterns = tuple(weight_map.patterns(train, rollout.tp, rollout.ep, rollout.vocab_multiple))
    largest = max(element_bytes, *(FLOAT32_BYTES * pattern.float32 for pattern in patterns))
    if bucket_bytes < largest:
        raise ValueError(f"bucket_bytes={bucket_bytes} must hold at least one element of {largest} bytes")
    table = replica_transfers(patterns, train, rollout, bucket_bytes // _TRANSFERS_PER_BUCKET, element_bytes)
    waves: list[SyncWave] = []
    sources, buckets, sizes = [], [], list[int]()
    for first in range(0, rollout.replicas, wave_replicas or rollout.replicas):
        replicas = range(rollout.replicas)[first : first + (wave_replicas or rollout.replicas)]
        source = choose_sources(table, rollout, replicas, train.world_size, placement)
        nbytes = np.broadcast_to(table.transfer_nbytes, source.shape).ravel()
        destination = (np.arange(len(replicas), dtype=np.int32)[:, None] * rollout.tp + table.target).ravel()
        bucket = schedule_buckets(source.ravel(), destination, nbytes, bucket_bytes, together=together)
        sources.append(source)
        buckets.append(bucket.reshape(source.shape) + len(sizes))
        more = np.bincount(bucket, nbytes).astype(np.int64).tolist()
        waves.append(SyncWave(replicas, range(len(sizes), len(sizes) + len(more))))
        sizes += more
    return ReshardPlan(
        rollout=rollout,
        table=table,
        source=compact(np.concatenate(sources)),
        bucket=compact(np.concatenate(buckets)),
        buckets=tuple(sizes),
        waves=tuple(waves),
        first_copy_rank=train.world_size - train.ranks_per_stage,
        float32_params=frozenset(
            name.format(layer=layer)
            for pattern in patterns
            if pattern.float32
            for layer in pattern.layers
            for name in (pattern.megatron, pattern.rollout)
        ),
    )


class TransferUsage(NamedTuple):
    """Peak memory that one process used for a sync, besides its weights."""

    peak_bytes: int


def sender_plans(plan: ReshardPlan, ranks: int) -> Iterator[RankPlan]:
    """Yield the plans of ``ranks`` training ranks, also if they send nothing."""
    source, bucket = plan.source.ravel(), plan.bucket.ravel()
    order = np.argsort(source, kind="stable")
    bounds = np.searchsorted(source[order], np.arange(ranks + 1))
    for rank in range(ranks):
        entries = order[bounds[rank] : bounds[rank + 1]]
        replica, transfer = np.divmod(entries, plan.source.shape[1])
        transfers, transfer = np.unique(transfer, return_inverse=True)
        columns = (replica, transfer, source[entries], bucket[entries])
        yield _rank_plan(plan, rank, True, plan.table.select(transfers), columns, range(len(plan.buckets)))


def receiver_plans(plan: ReshardPlan) -> Iterator[RankPlan]:
    """Yield the plan of each rollout rank."""
    target_transfers = [np.flatnonzero(plan.table.target == target) for target in range(plan.rollout.tp)]
    tables = [plan.table.select(transfers) for transfers in target_transfers]
    for rank in range(plan.rollout.world_size):
        replica, target = divmod(rank, plan.rollout.tp)
        transfers = target_transfers[target]
        columns = (
            np.full(len(transfers), replica),
            np.arange(len(transfers)),
            plan.source[replica, transfers],
            plan.bucket[replica, transfers],
        )
        yield _rank_plan(plan, rank, False, tables[target], columns, plan.imported_by(rank))


def replica_plans(plan: ReshardPlan) -> Iterator[tuple[RankPlan, ...]]:
    """Yield the plans of each replica's ranks."""
    plans = receiver_plans(plan)
    for _ in range(plan.rollout.replicas):
        yield tuple(itertools.islice(plans, plan.rollout.tp))


def buckets_of(
    plan: ReshardPlan | RankPlan,
    replicas: Column | Numbers,
    transfers: Column | Numbers,
    sources: Column,
    buckets: Column,
) -> list[Bucket]:
    """Return the ops of some transfers by bucket; the columns have one entry per transfer."""
    ops: list[list[TransferOp]] = [[] for _ in plan.buckets]
    columns = (column.tolist() for column in (replicas, transfers, sources, buckets))
    for replica, transfer, source, bucket in zip(*columns, strict=True):
        ops[bucket].extend(_ops(plan, transfer, source, replica))
    return [Bucket(tuple(bucket_ops), size) for bucket_ops, size in zip(ops, plan.buckets, strict=True)]


def _ops(plan: ReshardPlan | RankPlan, transfer: int, source: int, replica: int) -> Iterator[TransferOp]:
    table = plan.table
    rank = replica * plan.rollout.tp + int(table.target[transfer])
    rows = slice(*table.first_row[transfer : transfer + 2].tolist())
    columns = (table.overlap[rows], table.layer[rows], table.expert[rows])
    for number, layer, expert in zip(*(column.tolist() for column in columns), strict=True):
        overlap = table.overlaps[number]
        pattern = table.patterns[overlap.pattern]
        src_param = pattern.copy if pattern.copy and source >= plan.first_copy_rank else pattern.megatron
        dst_start, shape = overlap.dst_start, overlap.shape
        if pattern.experts:
            dst_start = (expert % (pattern.experts // plan.rollout.ep), *dst_start)
            shape = (1, *shape)
        names = src_param.format(layer=layer, expert=expert), pattern.rollout.format(layer=layer)
        yield TransferOp(source, names[0], rank, names[1], overlap.src_start, dst_start, shape)


def _rank_plan(
    plan: ReshardPlan,
    rank: int,
    sends: bool,
    table: TransferTable,
    columns: tuple[Numbers, Numbers, Column, Column],
    wave: range,
) -> RankPlan:
    replica, transfer = (compact(column.astype(np.int32)) for column in columns[:2])
    shared = (plan.rollout, plan.buckets, plan.first_copy_rank, plan.float32_params)
    return RankPlan(rank, sends, table, replica, transfer, columns[2], columns[3], wave, *shared)
