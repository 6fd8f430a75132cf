"""The receiving side of a sync: the ranks of a replica import their parts of each bucket into its engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.models import LocalParam
from megarl.sharding.coverage import check_coverage
from megarl.sharding.links import Links
from megarl.sharding.parts import PlanPart
from megarl.sharding.plan import Bucket, Move, ReshardPlan
from megarl.sharding.sender import Shipment
from megarl.sharding.wire import Packing, packing_of

Update = tuple[str, tuple[int, ...], Tensor]
"""Parameter name, offset in it, and the rectangle of elements to write there."""


class WeightTarget(Protocol):
    """The part of a rollout engine that a sync needs."""

    def begin_update(self, version: int) -> None:
        """From here on the engine is stale and serves nothing."""

    def update_weights(self, updates: list[Update], rank: int) -> None:
        """Copies rectangles into a tensor-parallel rank's shard, at the latest in the order of the current stream."""

    def end_update(self, version: int) -> None:
        """All weights are those of ``version``; the engine serves again."""


def route_shipments(exports: Iterable[Mapping[int, Shipment]]) -> dict[int, list[Shipment]]:
    """What the training ranks exported, regrouped by rollout rank."""
    routed: dict[int, list[Shipment]] = defaultdict(list)
    for export in exports:
        for dst_rank, shipment in export.items():
            routed[dst_rank].append(shipment)
    return dict(routed)


class BucketReceiver:
    """A rollout rank's side of every sync; it belongs to a :class:`ReplicaReceiver`.

    Args:
        plan: the plan, or this rank's part of it.
        rank: the rollout rank.
        params: what the rank holds (:meth:`WeightMap.rollout_params`); the plan's coverage of it is checked here.
        engine: the replica's engine.
        links: the ways from the training ranks.
        dtype: number format in which the weights are sent.

    Raises:
        WeightSyncError: the plan does not write each of the rank's elements exactly once.
    """

    def __init__(
        self,
        plan: ReshardPlan | PlanPart,
        rank: int,
        params: Sequence[LocalParam],
        engine: WeightTarget,
        links: Links,
        dtype: torch.dtype,
    ) -> None:
        check_coverage(plan, {rank: params})
        self._buckets = [_packings(bucket, dtype, plan.float32_params) for bucket in plan.received_by(rank)]
        self.rank, self._engine, self._links = rank, engine, links
        self._shard = rank % plan.rollout.tp
        self._next = 0

    def begin(self) -> None:
        """All buckets are to come, also after an update that failed."""
        self._next = 0

    def open(self, session: int) -> None:
        """Gets ready to receive; waits for the other processes where ``session`` is new.

        Raises:
            WeightSyncError: a process did not come.
        """
        self._links.open(session)

    def import_bucket(self, index: int, shipments: Sequence[Shipment]) -> None:
        """Writes bucket ``index``; when it returns, the senders may use their memory again.

        Raises:
            WeightSyncError: it is not the next bucket, a shipment is missing, extra or of the wrong size, or it cannot
                be reached.
        """
        if index != self._next:
            raise WeightSyncError(f"rollout rank {self.rank} received bucket {index}, expected {self._next}")
        packings = self._buckets[index]
        senders = sorted(shipment.src_rank for shipment in shipments)
        if senders != sorted(packings):
            raise WeightSyncError(
                f"rollout rank {self.rank} received shipments of training ranks {senders}, the plan says "
                f"{sorted(packings)}"
            )
        by_transport: dict[str, dict[int, Any]] = defaultdict(dict)
        for shipment in shipments:
            by_transport[self._links.names[shipment.src_rank]][shipment.src_rank] = shipment.payload
        for name, payloads in by_transport.items():
            transport = self._links.transports[name]
            for src_rank, data in transport.receive(payloads):
                self._engine.update_weights(self._updates(src_rank, packings[src_rank], data), self._shard)
            transport.settle()
        self._next += 1

    def check_complete(self, version: int) -> None:
        """Makes sure that every bucket was written.

        Raises:
            WeightSyncError: buckets are missing.
        """
        if self._next != len(self._buckets):
            raise WeightSyncError(
                f"rollout rank {self.rank} received {self._next} of {len(self._buckets)} weight buckets; "
                f"version {version} is incomplete"
            )

    def close(self, completed: bool) -> int:
        """No bucket comes any more: the transports give back what they need not keep.

        Returns:
            The most bytes that this process held for the sync at once, besides its weights.
        """
        self._links.end(completed)
        return self._links.peak_bytes

    def _updates(self, src_rank: int, packing: Packing, data: Tensor) -> list[Update]:
        if len(data) != packing.nbytes:
            raise WeightSyncError(
                f"the shipment of training rank {src_rank} to rollout rank {self.rank} has {len(data)} bytes, the "
                f"plan says {packing.nbytes}"
            )
        views = zip(packing.moves, packing.views(data), strict=True)
        return [(move.dst_param, move.dst_start, values) for move, values in views]


class ReplicaReceiver:
    """A replica's side of every sync: an update ends only when every bucket was written exactly once, on every rank.

    Args:
        engine: of the replica; it begins and ends an update once, whatever the number of its ranks.
        ranks: all ranks of the replica.
    """

    def __init__(self, engine: WeightTarget, ranks: Iterable[BucketReceiver]) -> None:
        self._engine = engine
        self._ranks = {receiver.rank: receiver for receiver in ranks}

    def begin_update(self, version: int) -> None:
        """Starts an update, also after one that failed: all buckets are to come."""
        self._engine.begin_update(version)
        for receiver in self._ranks.values():
            receiver.begin()

    def open(self, session: int) -> None:
        """Gets ready to receive; waits for the other processes where ``session`` is new.

        Raises:
            WeightSyncError: a process did not come.
        """
        # Side by side: a training rank lets none of its peers go on before all of them are there.
        with ThreadPoolExecutor(len(self._ranks)) as threads:
            list(threads.map(lambda receiver: receiver.open(session), self._ranks.values()))

    def import_bucket(self, index: int, shipments: Iterable[Shipment]) -> None:
        """Writes bucket ``index`` of all ranks; when it returns, the senders may use their memory again.

        Raises:
            WeightSyncError: a shipment is for another replica, or as of :meth:`BucketReceiver.import_bucket`.
        """
        routed = route_shipments([{shipment.dst_rank: shipment} for shipment in shipments])
        strange = sorted(routed.keys() - self._ranks.keys())
        if strange:
            raise WeightSyncError(f"rollout ranks {sorted(self._ranks)} received a shipment for rank {strange[0]}")
        for rank, receiver in self._ranks.items():
            receiver.import_bucket(index, routed.get(rank, []))

    def end_update(self, version: int) -> None:
        """Ends the update: the engine serves the new weights.

        Raises:
            WeightSyncError: buckets are missing; the engine stays stale.
        """
        for receiver in self._ranks.values():
            receiver.check_complete(version)
        self._engine.end_update(version)

    def close(self, completed: bool) -> int:
        """No bucket comes any more: the transports give back what they need not keep.

        Returns:
            The most bytes that this process held for the sync at once, besides its weights.
        """
        return sum(receiver.close(completed) for receiver in self._ranks.values())


def sources(buckets: Sequence[Bucket]) -> set[int]:
    """The training ranks that a rollout rank's buckets come from."""
    return {move.src_rank for bucket in buckets for move in bucket.moves}


def largest_bucket(buckets: Sequence[Bucket], dtype: torch.dtype, float32_params: frozenset[str]) -> int:
    """The most bytes that a rank receives in one of its buckets."""
    return max((packing_of(b.moves, dtype, float32_params).nbytes for b in buckets), default=0)


def _packings(bucket: Bucket, dtype: torch.dtype, float32_params: frozenset[str]) -> dict[int, Packing]:
    moves: dict[int, list[Move]] = defaultdict(list)
    for move in bucket.moves:
        moves[move.src_rank].append(move)
    return {src_rank: packing_of(group, dtype, float32_params) for src_rank, group in moves.items()}
