"""The receiving side of a sync: one rollout rank imports its part of each bucket into its engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.models import LocalParam
from megarl.models.checksum import tensor_checksum
from megarl.sharding.coverage import check_coverage
from megarl.sharding.plan import Bucket, Move, ReshardPlan
from megarl.sharding.sender import Shipment, own_moves
from megarl.sharding.transport import Transport

Update = tuple[str, tuple[int, ...], Tensor]
"""Parameter name, offset in it, and the rectangle of elements to write there."""


class WeightTarget(Protocol):
    """The part of a rollout engine that a sync needs."""

    def begin_update(self, version: int) -> None:
        """From here on the engine is stale and serves nothing."""

    def update_weights(self, updates: list[Update]) -> None:
        """Copies rectangles into the weights before it returns; the tensors are not valid after that."""

    def end_update(self, version: int) -> None:
        """All weights are those of ``version``; the engine serves again."""


def route_shipments(exports: Iterable[Mapping[int, Shipment]]) -> dict[int, list[Shipment]]:
    """What the training ranks exported, regrouped by rollout rank."""
    routed: dict[int, list[Shipment]] = defaultdict(list)
    for export in exports:
        for dst_rank, shipment in export.items():
            routed[dst_rank].append(shipment)
    return dict(routed)


def apply_bucket(
    bucket: Bucket,
    dst_rank: int,
    shipments: Sequence[Shipment],
    update_fn: Callable[[list[Update]], None],
    transport: Transport,
    read_back: Callable[[], Mapping[str, Tensor]] | None = None,
) -> None:
    """Writes what a rollout rank receives in a bucket.

    Args:
        bucket: the bucket.
        dst_rank: the rollout rank.
        shipments: one from each training rank that sends to it in this bucket.
        update_fn: writes rectangles into the engine's weights before it returns.
        transport: of this process.
        read_back: where the shipments carry checksums: the engine's own weights, read after the update and compared.

    Raises:
        WeightSyncError: a shipment is missing, extra or of the wrong size, or a rectangle of the engine's weights
            differs from what was sent; names the first parameter that does.
    """
    moves: dict[int, list[Move]] = defaultdict(list)
    for move in bucket.moves:
        if move.dst_rank == dst_rank:
            moves[move.src_rank].append(move)
    if sorted(s.src_rank for s in shipments) != sorted(moves):
        raise WeightSyncError(
            f"rollout rank {dst_rank} received shipments of training ranks {sorted(s.src_rank for s in shipments)}, "
            f"the plan says {sorted(moves)}"
        )
    for shipment in shipments:
        group = moves[shipment.src_rank]
        updates = _updates(shipment, group, transport)
        update_fn(updates)
        if read_back is not None:
            _verify(shipment, group, read_back(), updates[0][2].dtype)


def _updates(shipment: Shipment, moves: list[Move], transport: Transport) -> list[Update]:
    flat = transport.unpack(shipment.payload)
    sizes = [prod(move.shape) for move in moves]
    if flat.numel() != sum(sizes):
        raise WeightSyncError(
            f"the shipment of training rank {shipment.src_rank} to rollout rank {shipment.dst_rank} has "
            f"{flat.numel()} elements, the plan says {sum(sizes)}"
        )
    parts = zip(moves, flat.split(sizes), strict=True)
    return [(move.dst_param, move.dst_start, part.view(move.shape)) for move, part in parts]


def _verify(shipment: Shipment, moves: list[Move], weights: Mapping[str, Tensor], sent: torch.dtype) -> None:
    if len(shipment.checksums) != len(moves):
        raise WeightSyncError(
            f"training rank {shipment.src_rank} sent {len(shipment.checksums)} checksums for {len(moves)} rectangles; "
            "verification must be on at both sides or at neither"
        )
    for move, expected in zip(moves, shipment.checksums, strict=True):
        part = weights[move.dst_param][tuple(slice(a, a + n) for a, n in zip(move.dst_start, move.shape, strict=True))]
        if part.dtype != sent:
            raise WeightSyncError(
                f"parameter '{move.dst_param}' of rollout rank {move.dst_rank} is {part.dtype} and was sent as {sent}; "
                "a verified sync must send the engine's dtype"
            )
        if tensor_checksum(part) != expected:
            raise WeightSyncError(
                f"parameter '{move.dst_param}' of rollout rank {move.dst_rank} differs from '{move.src_param}' of "
                f"training rank {move.src_rank} in the {list(move.shape)} elements at {list(move.dst_start)}"
            )


class BucketReceiver:
    """A rollout rank's side of every sync: an update ends only when every bucket was written exactly once.

    Args:
        plan: the plan.
        rank: the rollout rank.
        params: what the rank holds (:meth:`WeightMap.rollout_params`); the plan's coverage of it is checked here.
        engine: the rank's engine.
        transport: this process's transport.
        read_back: gives the engine's weights by name, to verify each update; None: the sync is not verified.

    Raises:
        WeightSyncError: the plan does not write each of the rank's elements exactly once.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        params: Sequence[LocalParam],
        engine: WeightTarget,
        transport: Transport,
        read_back: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:
        check_coverage(plan, {rank: params})
        self._buckets = [own_moves(bucket, dst_rank=rank) for bucket in plan.buckets]
        self._rank = rank
        self._engine = engine
        self._transport = transport
        self._read_back = read_back
        self._next = 0

    def begin_update(self, version: int) -> None:
        """Starts an update, also after one that failed: all buckets are to come."""
        self._engine.begin_update(version)
        self._next = 0

    def import_bucket(self, index: int, shipments: Sequence[Shipment]) -> None:
        """Writes bucket ``index``.

        Raises:
            WeightSyncError: it is not the next bucket, or as :func:`apply_bucket`.
        """
        if index != self._next:
            raise WeightSyncError(f"rollout rank {self._rank} received bucket {index}, expected {self._next}")
        bucket = self._buckets[index]
        apply_bucket(bucket, self._rank, shipments, self._engine.update_weights, self._transport, self._read_back)
        self._next += 1

    def end_update(self, version: int) -> None:
        """Ends the update: the engine serves the new weights.

        Raises:
            WeightSyncError: buckets are missing; the engine stays stale.
        """
        if self._next != len(self._buckets):
            raise WeightSyncError(
                f"rollout rank {self._rank} received {self._next} of {len(self._buckets)} weight buckets; "
                f"version {version} is incomplete"
            )
        self._engine.end_update(version)
