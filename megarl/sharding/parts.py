"""What a reshard plan says to one rank: all that it needs to know, and little to send."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megarl.sharding.parcels import Column, Numbers, ParcelTable, compact
from megarl.sharding.placement import RolloutLayout
from megarl.sharding.plan import Bucket, BucketSize, ReshardPlan, buckets_of


@dataclass(frozen=True, eq=False)
class PlanPart:
    """The moves of one rank, for both ends of :mod:`megarl.sharding`, which take it as they take a whole plan.

    Attributes:
        rank: training rank where it ``sends``, else rollout rank.
        sends: at which end it is.
        rollout: layout of the ranks that receive.
        table: the parcels that it sends or receives, and no others.
        replica: ``[entries]``, whose copy of a parcel.
        parcel: ``[entries]``, which of the table.
        source: ``[entries]``, the training rank that sends it.
        bucket: ``[entries]``, in which bucket.
        buckets: size of each bucket, over all ranks.
        first_copy_rank: as of the plan.
        float32_params: as of the plan.
    """

    rank: int
    sends: bool
    rollout: RolloutLayout
    table: ParcelTable
    replica: Column
    parcel: Column
    source: Column
    bucket: Column
    buckets: tuple[BucketSize, ...]
    first_copy_rank: int
    float32_params: frozenset[str]

    def sent_by(self, rank: int) -> list[Bucket]:
        """As :meth:`ReshardPlan.sent_by`; ValueError for any other rank."""
        return self._moves(rank, sends=True)

    def received_by(self, rank: int) -> list[Bucket]:
        """As :meth:`ReshardPlan.received_by`; ValueError for any other rank."""
        return self._moves(rank, sends=False)

    def _moves(self, rank: int, sends: bool) -> list[Bucket]:
        if (rank, sends) != (self.rank, self.sends):
            raise ValueError(f"this is {_end(self.rank, self.sends)}'s part of the plan, not {_end(rank, sends)}'s")
        return buckets_of(self, self.replica, self.parcel, self.source, self.bucket)


def sender_parts(plan: ReshardPlan, ranks: int) -> Iterator[PlanPart]:
    """The parts of all training ranks.

    Args:
        plan: the plan.
        ranks: how many training ranks there are; some may send nothing.
    """
    source, bucket = plan.source.ravel(), plan.bucket.ravel()
    order = np.argsort(source, kind="stable")
    bounds = np.searchsorted(source[order], np.arange(ranks + 1))
    for rank in range(ranks):
        own = order[bounds[rank] : bounds[rank + 1]]
        replica, parcel = np.divmod(own, plan.source.shape[1])
        parcels, parcel = np.unique(parcel, return_inverse=True)
        yield _part(plan, rank, True, plan.table.select(parcels), (replica, parcel, source[own], bucket[own]))


def receiver_parts(plan: ReshardPlan) -> Iterator[PlanPart]:
    """The parts of all rollout ranks."""
    of_target = [np.flatnonzero(plan.table.target == target) for target in range(plan.rollout.tp)]
    tables = [plan.table.select(parcels) for parcels in of_target]
    for rank in range(plan.rollout.world_size):
        replica, target = divmod(rank, plan.rollout.tp)
        parcels = of_target[target]
        columns = (
            np.full(len(parcels), replica),
            np.arange(len(parcels)),
            plan.source[replica, parcels],
            plan.bucket[replica, parcels],
        )
        yield _part(plan, rank, False, tables[target], columns)


def replica_parts(plan: ReshardPlan) -> Iterator[tuple[PlanPart, ...]]:
    """The parts of all replicas: of each, those of its ranks."""
    parts = receiver_parts(plan)
    for _ in range(plan.rollout.replicas):
        yield tuple(itertools.islice(parts, plan.rollout.tp))


def _part(
    plan: ReshardPlan,
    rank: int,
    sends: bool,
    table: ParcelTable,
    columns: tuple[Numbers, Numbers, Column, Column],
) -> PlanPart:
    replica, parcel = (compact(column.astype(np.int32)) for column in columns[:2])
    return PlanPart(
        rank=rank,
        sends=sends,
        rollout=plan.rollout,
        table=table,
        replica=replica,
        parcel=parcel,
        source=columns[2],
        bucket=columns[3],
        buckets=plan.buckets,
        first_copy_rank=plan.first_copy_rank,
        float32_params=plan.float32_params,
    )


def _end(rank: int, sends: bool) -> str:
    return f"{'training' if sends else 'rollout'} rank {rank}"
