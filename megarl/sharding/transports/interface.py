"""The transport contract: packed bytes of a training rank reach a rollout rank.

A bucket takes four steps. The sender packs all its messages into a :class:`Buffer`. Its transport makes a handle of the
slice for one rollout rank. The handle travels over any channel of the caller, such as Ray, and the receiver's transport
turns it into a tensor. Once the receiver has read the tensor, the sender reuses the buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from megarl.base.registry import Registry
from megarl.sharding.placement import PROCESS_GROUP_TRANSPORTS, Routes

MemoryKind = Literal["host", "device"]
TRANSPORT_CLASSES: Registry[Callable[[TransportOptions], Transport]] = Registry("sync.transport")
register_transport = TRANSPORT_CLASSES.register
"""Class decorator that adds a transport under a name in the config."""


class Buffer(Protocol):
    """Memory for the messages of a bucket."""

    data: Tensor
    """Flat bytes."""

    def close(self) -> None:
        """Free the memory."""


class BufferSlice(NamedTuple):
    """The bytes ``start`` to ``stop`` of a buffer."""

    buffer: Any
    start: int
    stop: int

    @property
    def data(self) -> Tensor:
        """View of the bytes."""
        data: Tensor = self.buffer.data
        return data[self.start : self.stop]


class Rendezvous(NamedTuple):
    """Membership of a process group over both sides: training ranks keep their numbers, rollout ranks follow.

    Attributes:
        rank: number of this process in the group.
        train_ranks: number of training processes.
        world_size: number of all processes.
        peers: numbers of the processes that this one exchanges weights with over the group; ascending.
        host: host of the TCP store.
        port: port of the TCP store.
    """

    rank: int
    train_ranks: int
    world_size: int
    peers: tuple[int, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0

    def name_of(self, process: int) -> str:
        """Return the name of a process for error messages."""
        if process < self.train_ranks:
            return f"training rank {process}"
        return f"rollout rank {process - self.train_ranks}"


class TransportOptions(NamedTuple):
    """Options of every transport.

    Attributes:
        device: device of this process.
        receive_bytes: maximum bytes of a bucket that this process receives over the transport.
        rendezvous: membership of the process group, for transports with one.
        timeout_s: seconds without an answer until a peer counts as lost.
    """

    device: torch.device
    receive_bytes: int = 0
    rendezvous: Rendezvous | None = None
    timeout_s: float = 600.0


class Transport(Protocol):
    """One process's end of a transport; used by one thread.

    Attributes:
        memory: kind of buffer that a sender packs into.
    """

    memory: MemoryKind

    def open(self, session: int) -> None:
        """Prepare for a sync; wait for the other processes of a new ``session``.

        Raises:
            WeightSyncError: a process did not join.
        """

    def send(self, buffer_slice: BufferSlice, dst_rank: int, tag: int) -> Any:
        """Offer a slice to a rollout rank, without waiting for the receiver.

        Returns:
            Handle for the receiver; can be pickled.

        Raises:
            WeightSyncError: the peer is lost.
        """

    def finish(self, handle: Any) -> None:
        """Finish a transfer: called after the receiver has read its handle; the slice may then be overwritten."""

    def receive(self, handles: Mapping[int, Any]) -> Iterator[tuple[int, Tensor]]:
        """Receive the messages of a bucket.

        Args:
            handles: handles by training rank.

        Yields:
            Training rank and flat bytes, valid until :meth:`settle`; read-only.

        Raises:
            WeightSyncError: a handle is unreachable, or its process is lost.
        """

    def settle(self) -> None:
        """Settle a bucket that the receiver has copied: on return the sender's memory is no longer read."""

    def end(self, completed: bool) -> None:
        """End a sync and free memory that the next one does not reuse; after a failure drop everything in flight."""

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of this end itself, without the sender's buffers."""


def create_transport(name: str, options: TransportOptions) -> Transport:
    """Create a transport for this process.

    Raises:
        ConfigError: the name is unknown; lists the known names.
    """
    return TRANSPORT_CLASSES[name](options)


class StoreAddress(NamedTuple):
    """Address of the TCP store where both sides of a process group meet.

    Attributes:
        host: host of the store.
        port: port of the store.
        timeout_s: seconds without an answer until a peer counts as lost.
    """

    host: str
    port: int
    timeout_s: float = 600.0


class PeerTransports:
    """The transports of one process, and the transport to each of its peers.

    Args:
        names: name of the transport by peer.
        options: options of all transports.
    """

    def __init__(self, names: Mapping[int, str], options: TransportOptions) -> None:
        self.names = dict(names)
        self.transports: dict[str, Transport] = {
            name: create_transport(name, options) for name in sorted(set(self.names.values()))
        }

    @classmethod
    def for_sender(
        cls, routes: Routes, rank: int, peers: Iterable[int], device: torch.device, address: StoreAddress | None
    ) -> PeerTransports:
        """Create the transports of a training rank that sends to rollout ranks ``peers``."""
        names = {peer: routes.between(rank, peer) for peer in sorted(peers)}
        members = [peer + len(routes.train) for peer, name in names.items() if name in PROCESS_GROUP_TRANSPORTS]
        return cls(names, _options(device, 0, _rendezvous(routes, rank, members, address), address))

    @classmethod
    def for_receiver(
        cls,
        routes: Routes,
        rank: int,
        peers: Iterable[int],
        device: torch.device,
        address: StoreAddress | None,
        receive_bytes: int,
    ) -> PeerTransports:
        """Create the transports of a rollout rank that receives from training ranks ``peers``.

        ``receive_bytes`` is the maximum size of a bucket.
        """
        names = {peer: routes.between(peer, rank) for peer in sorted(peers)}
        members = [peer for peer, name in names.items() if name in PROCESS_GROUP_TRANSPORTS]
        rendezvous = _rendezvous(routes, rank + len(routes.train), members, address)
        return cls(names, _options(device, receive_bytes, rendezvous, address))

    def to(self, peer: int) -> Transport:
        """Return the transport to a peer."""
        return self.transports[self.names[peer]]

    def open(self, session: int) -> None:
        """Prepare all transports for a sync; see :meth:`Transport.open`."""
        for transport in self.transports.values():
            transport.open(session)

    def end(self, completed: bool) -> None:
        """End a sync on all transports; see :meth:`Transport.end`."""
        for transport in self.transports.values():
            transport.end(completed)

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the transports themselves."""
        return sum(transport.peak_bytes for transport in self.transports.values())


def _options(
    device: torch.device, receive_bytes: int, rendezvous: Rendezvous | None, address: StoreAddress | None
) -> TransportOptions:
    if address is None:
        return TransportOptions(device, receive_bytes, rendezvous)
    return TransportOptions(device, receive_bytes, rendezvous, address.timeout_s)


def _rendezvous(routes: Routes, rank: int, peers: list[int], address: StoreAddress | None) -> Rendezvous | None:
    if address is None:
        return None
    size = len(routes.train) + len(routes.rollout)
    return Rendezvous(rank, len(routes.train), size, tuple(peers), address.host, address.port)
