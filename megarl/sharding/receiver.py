"""Receiving side of a weight sync: the ranks of a replica write the messages of each bucket into its engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from megarl.base.cuda_memory import return_cached_memory
from megarl.base.errors import WeightSyncError
from megarl.models import LocalParam
from megarl.sharding.delta import DeltaDecoder
from megarl.sharding.plan import Bucket, RankPlan, ReshardPlan, TransferOp, TransferUsage
from megarl.sharding.sender import Message, MessageLayout, message_layout
from megarl.sharding.transports.interface import PeerTransports
from megarl.sharding.verification import check_coverage

TensorSlice = tuple[str, tuple[int, ...], Tensor]
"""Parameter name, offset, and the values to write there."""


class WeightTarget(Protocol):
    """The methods of a rollout engine that a sync needs."""

    def begin_update(self, version: int) -> None:
        """Make the engine stale: it refuses requests."""

    def update_weights(self, slices: list[TensorSlice], rank: int) -> None:
        """Copy slices into the shard of a tensor-parallel rank, at the latest in the order of the current stream."""

    def end_update(self, version: int) -> None:
        """Serve requests again, with the weights of ``version``."""

    @property
    def staging_bytes(self) -> int:
        """Largest memory in which the engine collects slices of the open update, in bytes."""


def route_messages(exports: Iterable[Mapping[int, Message]]) -> dict[int, list[Message]]:
    """Group the messages of all training ranks by rollout rank."""
    routed: dict[int, list[Message]] = defaultdict(list)
    for export in exports:
        for dst_rank, message in export.items():
            routed[dst_rank].append(message)
    return dict(routed)


class BucketReceiver:
    """The receiving side of one rollout rank; part of a :class:`ReplicaReceiver`.

    Args:
        plan: the whole plan, or the plan of this rank.
        rank: rollout rank.
        params: parameters of the rank (:meth:`WeightMap.rollout_params`), for the coverage check.
        engine: engine of the replica.
        peers: transports from the training ranks.
        dtype: dtype of the sent weights.

    Raises:
        WeightSyncError: the plan does not write each element of the rank exactly once.
    """

    def __init__(
        self,
        plan: ReshardPlan | RankPlan,
        rank: int,
        params: Sequence[LocalParam],
        engine: WeightTarget,
        peers: PeerTransports,
        dtype: torch.dtype,
    ) -> None:
        check_coverage(plan, {rank: params})
        self._buckets = [_message_layouts(bucket, dtype, plan.float32_params) for bucket in plan.received_by(rank)]
        self.rank, self._engine, self._peers = rank, engine, peers
        self._delta = DeltaDecoder()
        self._shard = rank % plan.rollout.tp
        self._next = 0

    def begin(self) -> None:
        """Expect all buckets from the first on, also after a failed update."""
        self._next = 0

    def open(self, session: int) -> None:
        """Prepare to receive; wait for the other processes of a new ``session``.

        Raises:
            WeightSyncError: a process did not join.
        """
        self._peers.open(session)

    def import_bucket(self, index: int, messages: Sequence[Message]) -> None:
        """Write bucket ``index``; on return the senders may reuse their memory.

        Raises:
            WeightSyncError: it is not the next bucket; a message is missing, extra, of the wrong size, or unreachable.
        """
        if index != self._next:
            raise WeightSyncError(f"rollout rank {self.rank} received bucket {index}, expected {self._next}")
        layouts = self._buckets[index]
        senders = sorted(message.src_rank for message in messages)
        if senders != sorted(layouts):
            raise WeightSyncError(
                f"rollout rank {self.rank} received messages of training ranks {senders}, the plan has "
                f"{sorted(layouts)}"
            )
        encodings = {message.src_rank: message.encoding for message in messages}
        by_transport: dict[str, dict[int, Any]] = defaultdict(dict)
        for message in messages:
            by_transport[self._peers.names[message.src_rank]][message.src_rank] = message.handle
        for name, handles in by_transport.items():
            transport = self._peers.transports[name]
            for src_rank, received in transport.receive(handles):
                encoding = encodings[src_rank]
                data = received if encoding is None else self._delta.decode((src_rank, index), received, encoding)
                self._engine.update_weights(self._slices(src_rank, layouts[src_rank], data), self._shard)
            transport.settle()
        self._next += 1

    def check_complete(self, version: int) -> None:
        """Check that every bucket was written.

        Raises:
            WeightSyncError: buckets are missing.
        """
        if self._next != len(self._buckets):
            raise WeightSyncError(
                f"rollout rank {self.rank} received {self._next} of {len(self._buckets)} weight buckets; "
                f"version {version} is incomplete"
            )

    def close(self, completed: bool) -> int:
        """End the sync and free the transports' memory.

        Returns:
            Peak bytes of this rank for the sync, besides its weights.
        """
        self._peers.end(completed)
        peak = self._peers.peak_bytes + self._delta.nbytes
        if not completed:
            self._delta.reset()
        return peak

    def _slices(self, src_rank: int, layout: MessageLayout, data: Tensor) -> list[TensorSlice]:
        if len(data) != layout.nbytes:
            raise WeightSyncError(
                f"the message of training rank {src_rank} to rollout rank {self.rank} has {len(data)} bytes, the "
                f"plan has {layout.nbytes}"
            )
        views = zip(layout.ops, layout.views(data), strict=True)
        return [(op.dst_param, op.dst_start, values) for op, values in views]


class ReplicaReceiver:
    """The receiving side of one replica; an update ends only when every rank wrote every bucket exactly once.

    Args:
        engine: engine of the replica; an update begins and ends once for all its ranks.
        ranks: receivers of all ranks of the replica.
    """

    def __init__(self, engine: WeightTarget, ranks: Iterable[BucketReceiver]) -> None:
        self._engine = engine
        self._ranks = {receiver.rank: receiver for receiver in ranks}

    def begin_update(self, version: int) -> None:
        """Start an update from the first bucket on, also after a failed one."""
        self._engine.begin_update(version)
        for receiver in self._ranks.values():
            receiver.begin()

    def open(self, session: int) -> None:
        """Prepare to receive; wait for the other processes of a new ``session``.

        Raises:
            WeightSyncError: a process did not join.
        """
        # In parallel: a training rank waits for all of its peers before it continues with any.
        with ThreadPoolExecutor(len(self._ranks)) as threads:
            list(threads.map(lambda receiver: receiver.open(session), self._ranks.values()))

    def import_bucket(self, index: int, messages: Iterable[Message]) -> None:
        """Write bucket ``index`` of all ranks; on return the senders may reuse their memory.

        Raises:
            WeightSyncError: a message is for another replica, or see :meth:`BucketReceiver.import_bucket`.
        """
        routed = route_messages([{message.dst_rank: message} for message in messages])
        unexpected = sorted(routed.keys() - self._ranks.keys())
        if unexpected:
            raise WeightSyncError(f"rollout ranks {sorted(self._ranks)} received a message for rank {unexpected[0]}")
        for rank, receiver in self._ranks.items():
            receiver.import_bucket(index, routed.get(rank, []))

    def end_update(self, version: int) -> None:
        """End the update: the engine serves the new weights.

        Raises:
            WeightSyncError: buckets are missing; the engine stays stale.
        """
        for receiver in self._ranks.values():
            receiver.check_complete(version)
        self._engine.end_update(version)

    def close(self, completed: bool) -> TransferUsage:
        """End the sync and free the transports' memory."""
        peak = self._engine.staging_bytes + sum(receiver.close(completed) for receiver in self._ranks.values())
        return_cached_memory()  # of receive buffers, before the engine's KV cache wakes
        return TransferUsage(peak)


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
