"""The sending side of a sync: one training rank exports its part of each bucket."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.sharding.links import Links
from megarl.sharding.parts import PlanPart
from megarl.sharding.plan import Bucket, Move, ReshardPlan
from megarl.sharding.transports import Buffer, MemoryKind, Region, buffer_pool
from megarl.sharding.wire import Packing, packing_of

ALIGNMENT = 64
"""Packings of a bucket begin at multiples of this many bytes."""


class Shipment(NamedTuple):
    """What one training rank sends one rollout rank in one bucket."""

    src_rank: int
    dst_rank: int
    payload: Any
    """The transport's; what it stands for may be read until the bucket is released."""


class _Outgoing(NamedTuple):
    """A packing, who it is for, and where it lies in the bucket's buffer."""

    dst_rank: int
    packing: Packing
    start: int


class BucketSender:
    """A training rank's side of every sync: packs into one of two buffers while the other is being read.

    Args:
        plan: the plan, or this rank's part of it.
        rank: the training rank.
        params: called at each export for the parameters by the weight map's names, on any device.
        links: the ways to the rollout ranks.
        dtype: number format of the engines' weights, in which these are sent.
        device: on which this process computes.
    """

    def __init__(
        self,
        plan: ReshardPlan | PlanPart,
        rank: int,
        params: Callable[[], Mapping[str, Tensor]],
        links: Links,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self._rank, self._params, self._links = rank, params, links
        buckets = plan.sent_by(rank)
        layouts = [self._arrange(bucket, dtype, plan.float32_params) for bucket in buckets]
        self._buckets = [outgoing for outgoing, _ in layouts]
        largest: dict[MemoryKind, int] = defaultdict(int)
        for _, sizes in layouts:
            for kind, size in sizes.items():
                largest[kind] = max(largest[kind], size)
        where = device or torch.device("cpu")
        self.pools = {t.memory: buffer_pool(t.memory, largest[t.memory], where) for t in links.transports.values()}
        self._exported: dict[int, list[Shipment]] = {}
        self._buffers: dict[int, dict[MemoryKind, Buffer]] = {}

    def open(self, session: int) -> None:
        """Gets ready for a sync; waits for the other processes where ``session`` is new.

        Raises:
            WeightSyncError: a process did not come.
        """
        self._links.open(session)

    def export_bucket(self, index: int) -> dict[int, Shipment]:
        """Packs bucket ``index``.

        Returns:
            By rollout rank; a rank that receives nothing is absent.

        Raises:
            WeightSyncError: a parameter is missing or too small, there is no memory, or two buckets are out already.
                Nothing of this one stays packed.
        """
        params = self._params()
        self._exported[index], self._buffers[index] = [], {}
        try:
            with torch.no_grad():
                for outgoing in self._buckets[index]:
                    self._exported[index].append(self._ship(index, outgoing, params))
        except BaseException:
            self._forget(index)
            raise
        return {shipment.dst_rank: shipment for shipment in self._exported[index]}

    def release_bucket(self, index: int) -> None:
        """The receivers have read bucket ``index``: its buffer may be used again. Harmless where there is none."""
        for shipment in self._exported.get(index, ()):
            self._links.to(shipment.dst_rank).finish(shipment.payload)
        self._forget(index)

    def close(self, completed: bool) -> int:
        """Ends a sync, and after a failure drops what is still packed.

        Returns:
            The most bytes that this process held for it at once, besides its weights.
        """
        for index in list(self._exported):
            self._forget(index)
        self._links.end(completed)
        if "device" in self.pools:
            self.pools["device"].close()
        return sum(pool.peak_bytes for pool in self.pools.values()) + self._links.peak_bytes

    def _arrange(
        self, bucket: Bucket, dtype: torch.dtype, float32_params: frozenset[str]
    ) -> tuple[list[_Outgoing], dict[MemoryKind, int]]:
        """A bucket's packings with their places, and bytes by kind of memory."""
        moves: dict[int, list[Move]] = defaultdict(list)
        for move in bucket.moves:
            moves[move.dst_rank].append(move)
        outgoing, used = [], dict[MemoryKind, int]()
        for dst_rank, group in moves.items():
            packing, kind = packing_of(group, dtype, float32_params), self._links.to(dst_rank).memory
            start = -(-used.get(kind, 0) // ALIGNMENT) * ALIGNMENT
            used[kind] = start + packing.nbytes
            outgoing.append(_Outgoing(dst_rank, packing, start))
        return outgoing, used

    def _ship(self, index: int, outgoing: _Outgoing, params: Mapping[str, Tensor]) -> Shipment:
        transport, buffers = self._links.to(outgoing.dst_rank), self._buffers[index]
        if transport.memory not in buffers:
            buffers[transport.memory] = self.pools[transport.memory].take()
        packing, start = outgoing.packing, outgoing.start
        region = Region(buffers[transport.memory], start, start + packing.nbytes)
        for move, packed in zip(packing.moves, packing.views(region.data), strict=True):
            packed.copy_(cut(params, move))
        return Shipment(self._rank, outgoing.dst_rank, transport.send(region, outgoing.dst_rank, index))

    def _forget(self, index: int) -> None:
        self._exported.pop(index, None)
        for kind, buffer in self._buffers.pop(index, {}).items():
            self.pools[kind].give_back(buffer)


def cut(params: Mapping[str, Tensor], move: Move) -> Tensor:
    """What a move takes from a training rank's parameters; not a copy.

    Raises:
        WeightSyncError: the parameter is missing or too small.
    """
    tensor = params.get(move.src_param)
    if tensor is None:
        raise WeightSyncError(f"training rank {move.src_rank} has no parameter '{move.src_param}', the plan needs it")
    shape = move.shape[len(move.shape) - len(move.src_start) :]
    part = tensor[tuple(slice(a, a + n) for a, n in zip(move.src_start, shape, strict=True))]
    if tuple(part.shape) != shape:
        raise WeightSyncError(
            f"parameter '{move.src_param}' of training rank {move.src_rank} has shape {list(tensor.shape)}, "
            f"the plan reads {list(shape)} elements at {list(move.src_start)}"
        )
    return part


def destinations(buckets: Sequence[Bucket]) -> set[int]:
    """The rollout ranks that a training rank's buckets go to."""
    return {move.dst_rank for bucket in buckets for move in bucket.moves}
