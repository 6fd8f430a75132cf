"""Receiving half of a weight sync.

:class:`ReplicaReceiver` leads the ranks of a replica from its process. In each rank's process a :class:`BucketReceiver`
reads the buckets and writes them into the rank's parameters (:class:`ShardWeights`), which checks that every element is
written exactly once.
"""

from __future__ import annotations

import abc
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.base.allocators import return_cached_memory
from megarl.base.errors import WeightSyncError
from megarl.models.verification import Coverage, ParamRectangle
from megarl.sharding.placement import ProcessLocation, Routes
from megarl.sharding.plan import NO_VERSION, Bucket, RankPlan, ReshardPlan, TransferOp, TransferUsage
from megarl.sharding.quantization import IncomingMatrices
from megarl.sharding.sender import Message, MessageLayout, message_layout
from megarl.sharding.transports.interface import PeerTransports, StoreAddress

TensorSlice = tuple[str, tuple[int, ...], Tensor]
"""Parameter name, offset, and the values to write there."""

NOT_CONNECTED = "the engine has no receiver of weights: connect(specs) comes first"
NOT_OPEN = "no weight update is open: begin(version) comes first"


class ReceiverSpec(NamedTuple):
    """Everything that an engine rank needs to receive weights; can be sent to its process.

    Attributes:
        routes: locations of all ranks, and the transports between them.
        address: store of the process groups; None if no transport needs one.
        dtype: dtype of the sent weights, such as ``bfloat16``.
    """

    plan: RankPlan
    routes: Routes
    address: StoreAddress | None
    dtype: str


class ReplicaReceiver(abc.ABC):
    """The receiving side of a replica, in the process that represents all of its ranks.

    A sync is ``begin(version)``, ``open(session)``, ``import_bucket`` for every bucket, ``close(completed)`` and
    ``end(version)``. The engine is stale from ``begin`` to ``end``; after a failure the sync begins again.

    Attributes:
        locations: location of each rank's process, from which the transports are chosen.
    """

    locations: Sequence[ProcessLocation]

    @abc.abstractmethod
    def connect(self, specs: Sequence[ReceiverSpec]) -> None:
        """Create the receiver of each rank in its process, before the first update."""

    @abc.abstractmethod
    def begin(self, version: int) -> None:
        """Begin a weight update; the engine is stale until it ends. An unfinished update is dropped.

        Raises:
            WeightSyncError: no receiver is connected, ``version`` is negative, the weights are asleep, or requests are
                running.
        """

    @abc.abstractmethod
    def open(self, session: int) -> None:
        """Prepare all ranks to receive; a new session waits for the training ranks, WeightSyncError if one is late."""

    @abc.abstractmethod
    def import_bucket(self, index: int, messages: Sequence[Message]) -> None:
        """Let all ranks write their messages of a bucket; on return the senders may reuse their memory.

        Raises:
            WeightSyncError: no update is open, it is not the next bucket, or a message is missing or does not fit. The
                update is then lost.
        """

    @abc.abstractmethod
    def close(self, completed: bool) -> list[TransferUsage]:
        """End receiving; return the resources of each process that took part."""

    @abc.abstractmethod
    def end(self, version: int) -> None:
        """End the weight update.

        Raises:
            WeightSyncError: an element is missing, or ``version`` is not the update's; the engine stays stale.
        """


class ShardWeights:
    """Parameters of one engine rank by name, replaced as a whole by weight updates.

    Args:
        tensors: parameters without padding.
        matrices: quantizes the matrices of linear layers; None = the parameters hold the weights as they are sent.

    Attributes:
        version: version of the weights; ``NO_VERSION`` while they are incomplete.
    """

    def __init__(self, tensors: Mapping[str, Tensor], matrices: IncomingMatrices | None = None) -> None:
        self.tensors = dict(tensors)
        self.matrices = matrices
        self.version = NO_VERSION
        self._covers: dict[str, Coverage] | None = None
        self._update_version = NO_VERSION

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the update, besides the parameters: matrices before their quantization."""
        return 0 if self.matrices is None else self.matrices.peak_bytes

    def begin(self, version: int) -> None:
        """Begin an update; an unfinished one is dropped. See :func:`check_version`."""
        check_version(version)
        self.version, self._update_version = NO_VERSION, version
        self._covers = {
            name: Coverage(name, tuple(tensor.shape), WeightSyncError) for name, tensor in self.tensors.items()
        }
        if self.matrices is not None:
            self.matrices.clear()

    def write(self, slices: Iterable[TensorSlice]) -> None:
        """Check and write slices, each before the next one is drawn from the iterable.

        Raises:
            WeightSyncError: no update is open, or a slice has an unknown name, does not fit its parameter, or overlaps
                an earlier slice. The update is then lost.
        """
        if self._covers is None:
            raise WeightSyncError(NOT_OPEN, code="sync.no-open-update")
        # A failure in the middle loses the update: it cannot be ended any more.
        covers, self._covers = self._covers, None
        for name, start, values in slices:
            if name not in covers:
                raise WeightSyncError(
                    f"'{name}' is not a parameter of this model ({len(covers)} parameters)",
                    code="sync.unknown-parameter",
                )
            covers[name].add(start, values.shape)
            if self.matrices is not None and name in self.matrices:
                self.matrices.write(name, start, values)
                continue
            box = tuple(slice(a, a + n) for a, n in zip(start, values.shape, strict=True))
            self.tensors[name][box].copy_(values)
        self._covers = covers

    def end(self, version: int) -> None:
        """End the update.

        Raises:
            WeightSyncError: an element is missing, ``version`` is not the update's, or quantized weights are not
                finite.
        """
        if self._covers is None:
            raise WeightSyncError(NOT_OPEN, code="sync.no-open-update")
        covers, self._covers = self._covers, None
        if version != self._update_version:
            raise WeightSyncError(
                f"update to weight version {self._update_version} was ended as version {version}",
                code="sync.version-mismatch",
            )
        check_complete(covers.values(), version)
        if self.matrices is not None:
            self.matrices.end(version)
        self.version = version

    def rectangle_checksum(self, part: ParamRectangle, *, convert: bool = False) -> int:
        """Return a parameter part's checksum as it was sent; of a quantized one, as it arrived.

        Args:
            convert: see :meth:`megarl.models.verification.ParamRectangle.checksum`.

        Raises:
            WeightSyncError: the parameter has another dtype than the part.
        """
        if self.matrices is not None and part.name in self.matrices:
            return self.matrices.checksum(part)
        return part.checksum(self.tensors[part.name], convert=convert)

    def drop(self) -> None:
        """Drop an open update; the weights are incomplete."""
        self.version, self._covers = NO_VERSION, None
        if self.matrices is not None:
            self.matrices.clear()


class BucketReceiver:
    """The receiving side of one rollout rank."""

    def __init__(
        self,
        plan: ReshardPlan | RankPlan,
        rank: int,
        weights: ShardWeights,
        peers: PeerTransports,
        dtype: torch.dtype,
    ) -> None:
        self._buckets = [_message_layouts(bucket, dtype, plan.float32_params) for bucket in plan.received_by(rank)]
        self.rank, self._weights, self.peers = rank, weights, peers
        self._wave = plan.imported_by(rank)
        self._next = self._wave.start

    @classmethod
    def connect(cls, spec: ReceiverSpec, weights: ShardWeights, device: torch.device) -> BucketReceiver:
        """Create the receiver of this process, whose parameters are on ``device``."""
        plan, dtype = spec.plan, getattr(torch, spec.dtype)
        buckets = plan.received_by(plan.rank)
        size, sources = largest_bucket(buckets, dtype, plan.float32_params), source_ranks(buckets)
        peers = PeerTransports.for_receiver(spec.routes, plan.rank, sources, device, spec.address, size)
        return cls(plan, plan.rank, weights, peers, dtype)

    def begin(self, version: int) -> None:
        """Begin an update from the first bucket on, also after a failed one."""
        self._weights.begin(version)
        self._next = self._wave.start

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
            by_transport[self.peers.names[message.src_rank]][message.src_rank] = message.handle
        for name, handles in by_transport.items():
            transport = self.peers.transports[name]
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
        self.peers.end(completed)
        peak = self.peers.peak_bytes + self._weights.peak_bytes
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
    """Return a bucket's messages for each rank of a replica; WeightSyncError for a message to another replica."""
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


def check_complete(covers: Iterable[Coverage], version: int) -> None:
    """Raise a WeightSyncError that names the first parameter with missing elements, if any."""
    covers = list(covers)
    gaps = [cover for cover in covers if cover.written != cover.expected]
    if gaps:
        first = gaps[0]
        raise WeightSyncError(
            f"weight version {version} is incomplete: {len(gaps)} of {len(covers)} parameters, first "
            f"'{first.name}' with {first.written} of {first.expected} elements written",
            code="sync.missing-elements",
        )


def check_version(version: int) -> None:
    """Raise a WeightSyncError for a negative version of an update."""
    if version < 0:
        raise WeightSyncError(f"weight version {version}, expected a number >= 0", code="sync.negative-version")
