"""The sending side of a sync: one training rank exports its part of each bucket."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.models.checksum import tensor_checksum
from megarl.sharding.plan import Bucket, Move, ReshardPlan
from megarl.sharding.transport import Transport


class Shipment(NamedTuple):
    """What one training rank sends one rollout rank in one bucket."""

    src_rank: int
    dst_rank: int
    payload: Any
    """The transport's payload: the elements of the moves between the two ranks, in the plan's order."""
    checksums: tuple[str, ...]
    """One per move where the sync is verified, else empty."""


def export_bucket(
    bucket: Bucket,
    rank: int,
    params: Mapping[str, Tensor],
    transport: Transport,
    verify: bool = False,
    dtype: torch.dtype | None = None,
) -> dict[int, Shipment]:
    """Packs what a training rank sends in a bucket.

    Args:
        bucket: the bucket.
        rank: the training rank.
        params: its parameters by the weight map's names, on any device.
        transport: the caller releases the payloads on it once they are imported.
        verify: add a checksum per move, of what is sent.
        dtype: what is sent; None sends the parameters' own.

    Returns:
        By rollout rank; a rank that receives nothing is absent.

    Raises:
        WeightSyncError: a parameter is missing or too small, or the transport has no memory. Nothing stays packed.
    """
    moves: dict[int, list[Move]] = defaultdict(list)
    for move in bucket.moves:
        if move.src_rank == rank:
            moves[move.dst_rank].append(move)
    shipments: dict[int, Shipment] = {}
    try:
        for dst_rank, group in moves.items():
            tensors = [_cut(params, move).to(dtype) if dtype else _cut(params, move) for move in group]
            checksums = tuple(tensor_checksum(t) for t in tensors) if verify else ()
            shipments[dst_rank] = Shipment(rank, dst_rank, transport.pack(tensors), checksums)
    except BaseException:
        for shipment in shipments.values():
            transport.release(shipment.payload)
        raise
    return shipments


def _cut(params: Mapping[str, Tensor], move: Move) -> Tensor:
    tensor = params.get(move.src_param)
    if tensor is None:
        raise WeightSyncError(f"training rank {move.src_rank} has no parameter '{move.src_param}', the plan needs it")
    shape = move.shape[len(move.shape) - len(move.src_start) :]
    part = tensor.detach()[tuple(slice(a, a + n) for a, n in zip(move.src_start, shape, strict=True))]
    if tuple(part.shape) != shape:
        raise WeightSyncError(
            f"parameter '{move.src_param}' of training rank {move.src_rank} has shape {list(tensor.shape)}, "
            f"the plan reads {list(shape)} elements at {list(move.src_start)}"
        )
    return part.reshape(move.shape)


class BucketSender:
    """A training rank's side of every sync: holds each export until it is released.

    Args:
        plan: the plan.
        rank: the training rank.
        params: called at each export for the parameters by the weight map's names.
        transport: this process's transport.
        verify: add a checksum per move.
        dtype: the engines' dtype, in which the weights are then sent; None sends the parameters' own.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        params: Callable[[], Mapping[str, Tensor]],
        transport: Transport,
        verify: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._buckets = [own_moves(bucket, src_rank=rank) for bucket in plan.buckets]
        self._rank = rank
        self._params = params
        self._transport = transport
        self._verify = verify
        self._dtype = dtype
        self._exported: dict[int, Sequence[Shipment]] = {}

    def export_bucket(self, index: int) -> dict[int, Shipment]:
        """Packs bucket ``index``; an earlier export of it, left over from a sync that failed, is released first.

        Raises:
            WeightSyncError: as :func:`export_bucket`.
        """
        self.release_bucket(index)
        bucket, params = self._buckets[index], self._params()
        shipments = export_bucket(bucket, self._rank, params, self._transport, self._verify, self._dtype)
        self._exported[index] = tuple(shipments.values())
        return shipments

    def release_bucket(self, index: int) -> None:
        """Frees the payloads of bucket ``index``; does nothing where there are none."""
        for shipment in self._exported.pop(index, ()):
            self._transport.release(shipment.payload)


def own_moves(bucket: Bucket, src_rank: int | None = None, dst_rank: int | None = None) -> Bucket:
    """The part of a bucket that a rank sends, or receives; its ``nbytes`` stays that of the whole bucket."""
    wanted = (m for m in bucket.moves if src_rank in (None, m.src_rank) and dst_rank in (None, m.dst_rank))
    return Bucket(tuple(wanted), bucket.nbytes)
