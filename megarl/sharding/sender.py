"""Sending side of a weight sync: a training rank packs its transfer ops of each bucket into messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.base.errors import WeightSyncError
from megarl.sharding.plan import Bucket, RankPlan, ReshardPlan, TransferOp, TransferUsage
from megarl.sharding.transports.interface import BUFFERS, Buffer, BufferSlice, MemoryKind, PeerTransports, buffer_pool

ALIGNMENT = 64
"""Alignment in bytes of the messages within a buffer."""


class MessageLayout(NamedTuple):
    """Byte layout of a message: the ops between two ranks in a bucket, in packing order.

    Float32 ops come first. Then every element is aligned to its size, without padding bytes.
    """

    ops: tuple[TransferOp, ...]
    dtypes: tuple[torch.dtype, ...]
    sizes: tuple[int, ...]
    """Bytes of each op."""

    @property
    def nbytes(self) -> int:
        """Bytes of the message."""
        return sum(self.sizes)

    def views(self, data: Tensor) -> list[Tensor]:
        """Return a view of each op's values in the flat bytes ``data`` of a message."""
        parts = zip(self.ops, self.dtypes, data.split(self.sizes), strict=True)
        return [part.view(dtype).view(op.shape) for op, dtype, part in parts]


def message_layout(ops: Sequence[TransferOp], dtype: torch.dtype, float32_params: Collection[str]) -> MessageLayout:
    """Return the layout of the message between two ranks; sender and receiver compute the same one.

    Args:
        ops: ops between the two ranks, in the plan's order.
        float32_params: names of parameters that are always sent in float32.
    """
    ordered = sorted(ops, key=lambda op: op.dst_param not in float32_params)
    dtypes = [torch.float32 if op.dst_param in float32_params else dtype for op in ordered]
    sizes = [prod(op.shape) * kind.itemsize for op, kind in zip(ordered, dtypes, strict=True)]
    return MessageLayout(tuple(ordered), tuple(dtypes), tuple(sizes))


class Message(NamedTuple):
    """The message of one training rank to one rollout rank in one bucket."""

    src_rank: int
    dst_rank: int
    handle: Any
    """Handle of the transport, valid until the bucket is released."""


class _Outgoing(NamedTuple):
    """A message layout, its receiver, and its offset in the bucket's buffer."""

    dst_rank: int
    layout: MessageLayout
    start: int


class BucketSender:
    """The sending side of one training rank; packs into one of two buffers while the receivers read the other.

    Args:
        params: returns the parameters by their names in the weight map, on any device; called at each export.
        peers: transports to the rollout ranks; ``peers.open(session)`` begins a sync.
        dtype: dtype of the engines' weights, in which the weights are sent.
        device: device of this process, where transports between GPUs need the packed weights.
    """

    def __init__(
        self,
        plan: ReshardPlan | RankPlan,
        rank: int,
        params: Callable[[], Mapping[str, Tensor]],
        peers: PeerTransports,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._rank, self._params, self.peers = rank, params, peers
        buckets = plan.sent_by(rank)
        layouts = [self._arrange(bucket, dtype, plan.float32_params) for bucket in buckets]
        self._buckets = [outgoing for outgoing, _ in layouts]
        largest: dict[MemoryKind, int] = defaultdict(int)
        for _, sizes in layouts:
            for kind, size in sizes.items():
                largest[kind] = max(largest[kind], size)
        self.pools = {t.memory: buffer_pool(t.memory, largest[t.memory], device) for t in peers.transports.values()}
        self._exported: dict[int, list[Message]] = {}
        self._buffers: dict[int, dict[MemoryKind, Buffer]] = {}

    def export_bucket(self, index: int) -> dict[int, Message]:
        """Pack bucket ``index`` into the memory of bucket ``index - 2``, which the receivers have read.

        Returns:
            Messages by rollout rank; ranks that receive nothing are absent.

        Raises:
            WeightSyncError: a parameter is missing or too small, or memory is exhausted. The bucket's buffers are free
                again.
        """
        for earlier in [number for number in self._exported if number <= index - BUFFERS]:
            self._release(earlier)
        params = self._params()
        self._exported[index], self._buffers[index] = [], {}
        try:
            with torch.no_grad():
                for outgoing in self._buckets[index]:
                    self._exported[index].append(self._send(index, outgoing, params))
        except BaseException:
            self._free_buffers(index)
            raise
        return {message.dst_rank: message for message in self._exported[index]}

    def close(self, completed: bool) -> TransferUsage:
        """End a sync and free all buffers."""
        for index in list(self._exported):
            if completed:
                self._release(index)
            else:
                self._free_buffers(index)
        self.peers.end(completed)
        if "device" in self.pools:
            self.pools["device"].close()
        peak = sum(pool.peak_bytes for pool in self.pools.values()) + self.peers.peak_bytes
        return TransferUsage(peak)

    def _arrange(
        self, bucket: Bucket, dtype: torch.dtype, float32_params: frozenset[str]
    ) -> tuple[list[_Outgoing], dict[MemoryKind, int]]:
        """Return the message layouts of a bucket with their offsets, and the bytes by kind of memory."""
        ops: dict[int, list[TransferOp]] = defaultdict(list)
        for op in bucket.ops:
            ops[op.dst_rank].append(op)
        outgoing, used = [], dict[MemoryKind, int]()
        for dst_rank, group in ops.items():
            layout, kind = message_layout(group, dtype, float32_params), self.peers.to(dst_rank).memory
            start = -(-used.get(kind, 0) // ALIGNMENT) * ALIGNMENT
            used[kind] = start + layout.nbytes
            outgoing.append(_Outgoing(dst_rank, layout, start))
        return outgoing, used

    def _send(self, index: int, outgoing: _Outgoing, params: Mapping[str, Tensor]) -> Message:
        transport, buffers = self.peers.to(outgoing.dst_rank), self._buffers[index]
        if transport.memory not in buffers:
            buffers[transport.memory] = self.pools[transport.memory].take()
        layout, start = outgoing.layout, outgoing.start
        buffer_slice = BufferSlice(buffers[transport.memory], start, start + layout.nbytes)
        for op, packed in zip(layout.ops, layout.views(buffer_slice.data), strict=True):
            packed.copy_(source_slice(params, op))
        handle = transport.send(buffer_slice, outgoing.dst_rank, index)
        return Message(self._rank, outgoing.dst_rank, handle)

    def _release(self, index: int) -> None:
        for message in self._exported[index]:
            self.peers.to(message.dst_rank).finish(message.handle)
        self._free_buffers(index)

    def _free_buffers(self, index: int) -> None:
        self._exported.pop(index, None)
        for kind, buffer in self._buffers.pop(index, {}).items():
            self.pools[kind].give_back(buffer)


def source_slice(params: Mapping[str, Tensor], op: TransferOp) -> Tensor:
    """Return the view of a parameter that a transfer op reads; WeightSyncError if it is missing or too small."""
    tensor = params.get(op.src_param)
    if tensor is None:
        text = f"training rank {op.src_rank} has no parameter '{op.src_param}', the plan needs it"
        raise WeightSyncError(text, code="sync.parameter-missing")
    shape = op.shape[len(op.shape) - len(op.src_start) :]
    part = tensor[tuple(slice(a, a + n) for a, n in zip(op.src_start, shape, strict=True))]
    if tuple(part.shape) != shape:
        raise WeightSyncError(
            f"parameter '{op.src_param}' of training rank {op.src_rank} has shape {list(tensor.shape)}, "
            f"the plan reads {list(shape)} elements at {list(op.src_start)}",
            code="sync.parameter-shape",
        )
    return part


def destination_ranks(buckets: Sequence[Bucket]) -> set[int]:
    """Return the rollout ranks that a training rank sends to."""
    return {op.dst_rank for bucket in buckets for op in bucket.ops}
