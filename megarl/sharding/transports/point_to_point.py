"""Messages between training and rollout ranks in process groups of their own.

A group is made apart from :mod:`torch.distributed`'s default one, which belongs to Megatron: it is the bare object,
joined through a store that a training rank hosts, and torch keeps no record of it.
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
from torch.distributed import DistStoreError, PrefixStore, TCPStore

from megarl.errors import WeightSyncError
from megarl.sharding.transports.interface import Meeting, MemoryKind, Region, TransportOptions

STORE_TIMEOUT = timedelta(seconds=60)


def host_store(host: str) -> TCPStore:
    """A store at which both sides meet, on a free port of this host; it lives as long as the object."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)


class Message(NamedTuple):
    """Announces a message of ``nbytes`` bytes with a tag, from training rank ``source`` to rollout rank ``target``."""

    source: int
    target: int
    tag: int
    nbytes: int


class PointToPointTransport(abc.ABC):
    """Sends from the packed buffer and receives into a buffer of its own.

    A group in which a message failed is of no use any more: the next session joins a new one.
    """

    memory: MemoryKind

    def __init__(self, options: TransportOptions) -> None:
        if options.meeting is None:
            raise WeightSyncError("a transport with a process group needs to know where to meet")
        self._meeting: Meeting = options.meeting
        self._receive_bytes = options.receive_bytes
        self._timeout = timedelta(seconds=options.timeout_s)
        self._device = options.device
        self._store: TCPStore | None = None
        self._group: Any = None
        self._session: int | None = None
        self._sends: dict[Message, tuple[Any, Tensor]] = {}
        self._buffer: Tensor | None = None
        self.peak_bytes = 0

    @abc.abstractmethod
    def _join(self, store: PrefixStore) -> Any:
        """Whatever leads to the peers, which are all there and meet at a store."""

    @abc.abstractmethod
    def _channel(self, peer: int) -> tuple[Any, int]:
        """The process group that leads to a peer, and the peer's rank in it."""

    def open(self, session: int) -> None:
        """See :meth:`Transport.open`."""
        if session == self._session and self._group is not None:
            return
        self._leave()
        where = self._meeting
        try:
            if self._store is None:
                self._store = TCPStore(where.host, where.port, is_master=False, timeout=STORE_TIMEOUT)
            store = PrefixStore(f"weights/{type(self).__name__}/{session}", self._store)
            self._await_peers(store)
            self._group = self._join(store)
            self._greet()
        except RuntimeError as error:
            self._leave()
            raise WeightSyncError(
                f"{where.name_of(where.rank)} could not join the group that carries the weights, at "
                f"{where.host}:{where.port}: {error}"
            ) from error
        except WeightSyncError:
            self._leave()
            raise
        self._session = session

    def send(self, region: Region, dst_rank: int, tag: int) -> Message:
        """See :meth:`Transport.send`."""
        message = Message(self._meeting.rank, dst_rank, tag, region.stop - region.start)
        data = region.data
        self._sends[message] = self._call("send to", dst_rank + self._meeting.train_ranks, data, tag), data
        return message

    def finish(self, payload: Message) -> None:
        """Waits until the message has left its region."""
        sent = self._sends.pop(payload, None)
        if sent is not None:
            self._wait(sent[0], f"send to rollout rank {payload.target}")

    def receive(self, payloads: Mapping[int, Message]) -> Iterator[tuple[int, Tensor]]:
        """See :meth:`Transport.receive`; all messages are under way before the first is waited for."""
        stops = list(accumulate(message.nbytes for message in payloads.values()))
        buffer = self._receive_buffer(stops[-1] if stops else 0)
        under_way = []
        for stop, (rank, message) in zip(stops, payloads.items(), strict=True):
            part = buffer[stop - message.nbytes : stop]
            under_way.append((rank, part, self._call("receive from", rank, part, message.tag)))
        for rank, part, work in under_way:
            self._wait(work, f"receive from training rank {rank}")
            yield rank, part

    def settle(self) -> None:
        """Nothing to wait for: the buffer is this process's own and written in order."""
        return

    def end(self, completed: bool) -> None:
        """See :meth:`Transport.end`; between syncs the group stays, the buffer does not."""
        self._buffer = None
        if not completed:
            self._leave()

    def _await_peers(self, store: PrefixStore) -> None:
        """Tells the peers that this process is there, and waits for them; names the first that does not come."""
        where = self._meeting
        store.set(f"here/{where.rank}", "")
        deadline = time.monotonic() + self._timeout.total_seconds()
        for peer in where.peers:
            left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
            try:
                store.wait([f"here/{peer}"], left)
            except DistStoreError as error:
                raise WeightSyncError(
                    f"{where.name_of(where.rank)} waited {self._timeout.total_seconds():g} s (sync.timeout_s) for "
                    f"{where.name_of(peer)}, which did not join the group that carries the weights, at "
                    f"{where.host}:{where.port}"
                ) from error

    def _greet(self) -> None:
        """Connects to the peers, where joining the group has not done so."""
        return

    def _call(self, what: str, peer: int, data: Tensor, tag: int) -> Any:
        if self._group is None:
            raise WeightSyncError(f"cannot {what} {self._meeting.name_of(peer)}: no sync is open")
        group, rank = self._channel(peer)
        operation = group.send if what == "send to" else group.recv
        try:
            return operation([data], rank, tag)
        except RuntimeError as error:
            raise WeightSyncError(f"cannot {what} {self._meeting.name_of(peer)}: {error}") from error

    def _wait(self, work: Any, what: str) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise WeightSyncError(
                f"could not {what} within {self._timeout.total_seconds():g} s (sync.timeout_s): {error}"
            ) from error

    def _receive_buffer(self, nbytes: int) -> Tensor:
        if self._buffer is None or len(self._buffer) < nbytes:
            self._buffer = torch.empty(max(nbytes, self._receive_bytes), dtype=torch.uint8, device=self._place())
            self.peak_bytes = max(self.peak_bytes, len(self._buffer))
        return self._buffer

    def _place(self) -> torch.device:
        return self._device if self.memory == "device" else torch.device("cpu")

    def _leave(self) -> None:
        """Drops the group, and with it messages that nobody will receive."""
        self._sends.clear()
        self._group, self._session = None, None
