"""Transports over process groups of training and rollout ranks: ``gloo`` between hosts, ``nccl`` between GPUs.

The groups are separate from :mod:`torch.distributed`'s default group, which belongs to Megatron. They are bare objects
that join through a TCP store on a training rank, without an entry in torch's registry.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import DistStoreError, PrefixStore, ProcessGroupGloo, TCPStore

from megarl.base.child_process import environment_variables
from megarl.base.errors import WeightSyncError
from megarl.base.rendezvous import STORE_TIMEOUT
from megarl.sharding.transports.interface import (
    BufferSlice,
    MemoryKind,
    Rendezvous,
    Transport,
    TransportOptions,
    register_transport,
)

POLL_S = 1e-4
"""Seconds between checks for the end of a message on a GPU."""
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Environment variable that a new NCCL group reads: 0 = errors and timeouts neither abort nor end the process."""


class ProcessGroupHandle(NamedTuple):
    """Announces a message of ``nbytes`` bytes from training rank ``source`` to rollout rank ``target``."""

    source: int
    target: int
    tag: int
    nbytes: int


class PointToPointTransport(Transport):
    """Base of both transports: sends from the packed buffer and receives into its own buffer.

    A group is unusable after a failed message; the next session joins a new one.
    """

    def __init__(self, options: TransportOptions) -> None:
        if options.rendezvous is None:
            text = "a transport with a process group needs a rendezvous address"
            raise WeightSyncError(text, code="sync.no-rendezvous")
        self._rendezvous: Rendezvous = options.rendezvous
        self._receive_bytes = options.receive_bytes
        self._timeout = timedelta(seconds=options.timeout_s)
        self._device = options.device
        self._store: TCPStore | None = None
        self._group: Any = None
        self._session: int | None = None
        self._sends: dict[ProcessGroupHandle, tuple[Any, Tensor]] = {}
        self._buffer: Tensor | None = None
        self.peak_bytes = 0

    @abc.abstractmethod
    def _join(self, store: PrefixStore) -> Any:
        """Join the process group or groups of the peers, which have all reached the store."""

    @abc.abstractmethod
    def _channel(self, peer: int) -> tuple[Any, int]:
        """Return the process group with a peer, and the peer's rank in it."""

    def open(self, session: int) -> None:
        if session == self._session and self._group is not None:
            return
        self._leave()
        group = self._rendezvous
        try:
            if self._store is None:
                self._store = TCPStore(group.host, group.port, is_master=False, timeout=STORE_TIMEOUT)
            store = PrefixStore(f"weights/{type(self).__name__}/{session}", self._store)
            self._await_peers(store)
            self._group = self._join(store)
            self._greet()
        except RuntimeError as error:
            self._leave()
            raise WeightSyncError(
                f"{group.name_of(group.rank)} could not join the group that carries the weights, at "
                f"{group.host}:{group.port}: {error}",
                code="sync.group-join",
            ) from error
        except WeightSyncError:
            self._leave()
            raise
        self._session = session

    def send(self, buffer_slice: BufferSlice, dst_rank: int, tag: int) -> ProcessGroupHandle:
        message = ProcessGroupHandle(self._rendezvous.rank, dst_rank, tag, buffer_slice.stop - buffer_slice.start)
        data = buffer_slice.data
        self._sends[message] = self._call("send to", dst_rank + self._rendezvous.train_ranks, data, tag), data
        return message

    def finish(self, handle: ProcessGroupHandle) -> None:
        """Wait until the message has left its buffer."""
        sent = self._sends.pop(handle, None)
        if sent is not None:
            self._wait(sent[0], f"send to rollout rank {handle.target}")

    def receive(self, handles: Mapping[int, ProcessGroupHandle]) -> Iterator[tuple[int, Tensor]]:
        """See :meth:`Transport.receive`; starts all receives before it waits for the first."""
        stops = list(accumulate(message.nbytes for message in handles.values()))
        buffer = self._receive_buffer(stops[-1] if stops else 0)
        pending = []
        for stop, (rank, message) in zip(stops, handles.items(), strict=True):
            part = buffer[stop - message.nbytes : stop]
            pending.append((rank, part, self._call("receive from", rank, part, message.tag)))
        for rank, part, work in pending:
            self._wait(work, f"receive from training rank {rank}")
            yield rank, part

    def end(self, completed: bool) -> None:
        """See :meth:`Transport.end`; between syncs the group stays open and the buffer is freed."""
        self._buffer = None
        if not completed:
            self._leave()

    def _await_peers(self, store: PrefixStore) -> None:
        """Announce this process at the store and wait for its peers; the error names the first missing one."""
        group = self._rendezvous
        store.set(f"here/{group.rank}", "")
        deadline = time.monotonic() + self._timeout.total_seconds()
        for peer in group.peers:
            remaining = timedelta(seconds=max(0.001, deadline - time.monotonic()))
            try:
                store.wait([f"here/{peer}"], remaining)
            except DistStoreError as error:
                raise WeightSyncError(
                    f"{group.name_of(group.rank)} waited {self._timeout.total_seconds():g} s (sync.timeout_s) for "
                    f"{group.name_of(peer)}, which did not join the group that carries the weights, at "
                    f"{group.host}:{group.port}",
                    code="sync.peer-timeout",
                ) from error

    def _greet(self) -> None:
        """Connect to the peers, if joining the group does not."""
        return

    def _call(self, action: str, peer: int, data: Tensor, tag: int) -> Any:
        if self._group is None:
            text = f"cannot {action} {self._rendezvous.name_of(peer)}: no sync is open"
            raise WeightSyncError(text, code="sync.not-open")
        group, rank = self._channel(peer)
        operation = group.send if action == "send to" else group.recv
        try:
            return operation([data], rank, tag)
        except RuntimeError as error:
            text = f"cannot {action} {self._rendezvous.name_of(peer)}: {error}"
            raise WeightSyncError(text, code="sync.transfer-failed") from error

    def _wait(self, work: Any, action: str) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            text = f"could not {action} within {self._timeout.total_seconds():g} s (sync.timeout_s): {error}"
            raise WeightSyncError(text, code="sync.transfer-timeout") from error

    def _receive_buffer(self, nbytes: int) -> Tensor:
        if self._buffer is None or len(self._buffer) < nbytes:
            device = self._device if self.memory == "device" else "cpu"
            self._buffer = torch.empty(max(nbytes, self._receive_bytes), dtype=torch.uint8, device=device)
            self.peak_bytes = max(self.peak_bytes, len(self._buffer))
        return self._buffer

    def _leave(self) -> None:
        self._sends.clear()
        self._group, self._session = None, None


@register_transport("gloo")
class GlooTransport(PointToPointTransport):
    """TCP between any two hosts: a group of two for each pair of processes that exchange weights.

    Both sides process their peers in ascending order. Therefore the first remaining pair, by training rank and then
    rollout rank, is next at both of its ends, and no deadlock is possible.
    """

    def _join(self, store: PrefixStore) -> dict[int, ProcessGroupGloo]:
        return {peer: self._pair(store, peer) for peer in self._rendezvous.peers}

    def _pair(self, store: PrefixStore, peer: int) -> ProcessGroupGloo:
        # Training ranks have the lower numbers, so they are the first of each pair.
        first, second = sorted((self._rendezvous.rank, peer))
        pair_store = PrefixStore(f"{first}-{second}", store)
        return ProcessGroupGloo(pair_store, int(self._rendezvous.rank == second), 2, timeout=self._timeout)

    def _channel(self, peer: int) -> tuple[Any, int]:
        return self._group[peer], int(peer > self._rendezvous.rank)


@register_transport("nccl")
class NcclTransport(PointToPointTransport):
    """GPU to GPU: one communicator for each pair of processes that exchange weights.

    Raises:
        WeightSyncError: this process does not compute on a GPU.
    """

    memory: MemoryKind = "device"

    def __init__(self, options: TransportOptions) -> None:
        super().__init__(options)
        if options.device.type != "cuda":
            raise WeightSyncError(
                f"weight transport 'nccl' moves GPU memory and this process computes on {options.device}; "
                "set sync.transport to 'auto', or to 'gloo'",
                code="sync.nccl-needs-gpu",
            )

    def _join(self, store: PrefixStore) -> Any:
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        with environment_variables({ERROR_HANDLING: "0"}):  # torch's watchdog would end the process
            return ProcessGroupNCCL(store, self._rendezvous.rank, self._rendezvous.world_size, options)

    def _channel(self, peer: int) -> tuple[Any, int]:
        return self._group, peer

    def _greet(self) -> None:
        """Exchange one byte with each peer, because the first message of a pair creates its communicator and blocks.

        A bucket is sent before its receiver is called, so the communicators must exist before. The order excludes a
        deadlock as in :class:`GlooTransport`.
        """
        sends = self._rendezvous.rank < self._rendezvous.train_ranks
        for peer in sorted(self._rendezvous.peers):
            byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
            self._wait(
                self._call("send to" if sends else "receive from", peer, byte, 0),
                f"greet {self._rendezvous.name_of(peer)}",
            )

    def end(self, completed: bool) -> None:
        """See :meth:`Transport.end`; aborts a communicator with unreceived messages."""
        if completed:
            for message in list(self._sends):
                self.finish(message)
        elif self._group is not None:
            self._group.abort()
        super().end(completed)

    def _wait(self, work: Any, action: str) -> None:
        """Wait on the host until the message is through; a lost peer is an error after ``sync.timeout_s``.

        ``work.wait()`` of NCCL only orders streams, and returns at once.

        Raises:
            WeightSyncError: the message did not complete in time; the group is aborted.
        """
        with torch.cuda.device(self._device):
            super()._wait(work, action)
            done = torch.cuda.Event()
            done.record()
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not done.query():
            if time.monotonic() >= deadline:
                self._group.abort()
                self._leave()
                text = f"could not {action} within {self._timeout.total_seconds():g} s (sync.timeout_s): no answer"
                raise WeightSyncError(text, code="sync.transfer-timeout")
            time.sleep(POLL_S)
