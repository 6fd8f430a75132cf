"""Receiver of a weight sync: runs in an engine rank's process and writes buckets into parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megarl.base.allocators import return_cached_memory
from megarl.base.errors import WeightSyncError
from megarl.sharding.placement import Routes
from megarl.sharding.plan import Bucket, RankPlan, ReshardPlan, TransferOp, TransferUsage
from megarl.sharding.sender import Message, MessageLayout, message_layout
from megarl.sharding.transports.interface import PeerTransports, StoreAddress

TensorSlice = tuple[str, tuple[int, ...], Tensor]
"""Parameter name, offset, and the values to write there."""


class WeightTarget(Protocol):
    """The parameters of an engine rank, as a weight update replaces them."""

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the last update, besides the parameters."""

    def begin(self, version: int) -> None:
        """Begin an update; the weights are incomplete until it ends."""

    def write(self, slices: Iterable[TensorSlice]) -> None:
        """Copy slices into the parameters, at the latest in the order of the current stream."""

    def end(self, version: int) -> None:
        """End the update; raises WeightSyncError unless every element was written exactly once."""


class ReceiverSpec(NamedTuple):
    """Everything that an engine rank needs to receive weights; can be sent to its process.

    Attributes:
        plan: the rank's part of the reshard plan.
        routes: locations of all ranks, and the transports between them.
        address: store of the process groups; None if no transport needs one.
        dtype: dtype of the sent weights, such as ``bfloat16``.
    """

    plan: RankPlan
    routes: Routes
    address: StoreAddress | None
    dtype: str


class BucketReceiver:
    """The receiving side of one rollout rank.

    Args:
        plan: the whole plan, or the plan of this rank.
        rank: rollout rank.
        weights: parameters of the rank.
        peers: transports from the training ranks.
        dtype: dtype of the sent weights.
    """

    def __init__(
        self,
        plan: ReshardPlan | RankPlan,
        rank: int,
        weights: WeightTarget,
        peers: PeerTransports,
        dtype: torch.dtype,
    ) -> None:
        self._buckets = [_message_layouts(bucket, dtype, plan.float32_params) for bucket in plan.received_by(rank)]
        self.rank, self._weights, self._peers = rank, weights, peers
        self._wave = plan.imported_by(rank)
        self._next = self._wave.start

    @classmethod
    def connect(cls, spec: ReceiverSpec, weights: WeightTarget, device: torch.device) -> BucketReceiver:
        """Create the receiver of this process, whose parameters are on ``device``."""
        plan, dtype = spec.plan, getattr(torch, spec.dtype)
        buckets = plan.received_by(plan.rank)
        size = largest_bucket(buckets, dtype, plan.float32_params)
        sources = source_ranks(buckets)
        peers = PeerTransports.for_receiver(spec.routes, plan.rank, sources, device, spec.address, size)
        return cls(plan, plan.rank, weights, peers, dtype)

    def begin(self, version: int) -> None:
        """Begin an update from the first bucket on, also after a failed one."""
        self._weights.begin(version)
        self._next = self._wave.start

    def open(self, session: int) -> None:
        """Prepare to receive; wait for the other processes of a new ``session``.

        Raises:
            WeightSyncError: a process did not join.
        """
        self._peers.open(session)

    @torch.no_grad()
    def import_bucket(self, index: int, messages: Sequence[Message]) -> None:
        """Write bucket ``index``; on return the senders may reuse their memory.

        Raises:
            WeightSyncError: it is not the next bucket; a message is missing, extra, of the wrong size, or unreachable;
                or a slice does not fit the parameters.
        """
        if index != self._next:
            text = f"rollout rank {self.rank} received bucket {index}, expected {self._next}"
            raise WeightSyncError(text, code="sync.bucket-order")
        layouts = self._buckets[index]
        senders = sorted(message.src_rank for message in messages)
        if senders != sorted(layouts):
            raise WeightSyncError(
                f"rollout rank {self.rank} received messages of training ranks {senders}, the plan has "
                f"{sorted(layouts)}",
                code="sync.senders-differ",
            )
        by_transport: dict[str, dict[int, Any]] = defaultdict(dict)
        for message in messages:
            by_transport[self._peers.names[message.src_rank]][message.src_rank] = message.handle
        for name, handles in by_transport.items():
            transport = self._peers.transports[name]
            for src_rank, data in transport.receive(handles):
                self._weights.write(self._slices(src_rank, layouts[src_rank], data))
            transport.settle()
        self._next += 1

    def end(self, version: int) -> None:
        """End the update: the parameters hold the weights of ``version``.

        Raises:
            WeightSyncError: a bucket or an element is missing.
        """
        received = self._next - self._wave.start
        if received != len(self._wave):
            raise WeightSyncError(
                f"rollout rank {self.rank} received {received} of {len(self._wave)} weight buckets; "
                f"version {version} is incomplete",
                code="sync.incomplete",
            )
        self._weights.end(version)

    def close(self, completed: bool) -> TransferUsage:
        """End the sync and free the transports' memory."""
        self._peers.end(completed)
        peak = self._peers.peak_bytes + self._weights.peak_bytes
        return_cached_memory()  # of receive buffers, before the engine's KV cache wakes
        return TransferUsage(peak)

    def _slices(self, src_rank: int, layout: MessageLayout, data: Tensor) -> list[TensorSlice]:
        if len(data) != layout.nbytes:
            raise WeightSyncError(
                f"the message of training rank {src_rank} to rollout rank {self.rank} has {len(data)} bytes, the "
                f"plan has {layout.nbytes}",
                code="sync.message-size",
            )
        views = zip(layout.ops, layout.views(data), strict=True)
        return [(op.dst_param, op.dst_start, values) for op, values in views]


def route_messages(messages: Iterable[Message], ranks: Sequence[int]) -> list[list[Message]]:
    """Return the messages of a bucket for each of a replica's ranks.

    Raises:
        WeightSyncError: a message is for another replica.
    """
    routed: dict[int, list[Message]] = {rank: [] for rank in ranks}
    for message in messages:
        if message.dst_rank not in routed:
            text = f"rollout ranks {list(ranks)} received a message for rank {message.dst_rank}"
            raise WeightSyncError(text, code="sync.wrong-rank")
        routed[message.dst_rank].append(message)
    return list(routed.values())


def source_ranks(buckets: Sequence[Bucket]) -> set[int]:
    """Return the training ranks that a rollout rank receives from."""
    return {op.src_rank for bucket in buckets for op in bucket.ops}


def largest_bucket(buckets: Sequence[Bucket], dtype: torch.dtype, float32_params: frozenset[str]) -> int:
    """Return the maximum bytes that a rank receives in one bucket."""
    return max((message_layout(b.ops, dtype, float32_params).nbytes for b in buckets), default=0)


def _message_layouts(bucket: Bucket, dtype: torch.dtype, float32_params: frozenset[str]) -> dict[int, MessageLayout]:
    ops: dict[int, list[TransferOp]] = defaultdict(list)
    for op in bucket.ops:
        ops[op.src_rank].append(op)
    return {src_rank: message_layout(group, dtype, float32_params) for src_rank, group in ops.items()}
