"""The transport contract, and the buffers of a sender: packed bytes of a training rank reach a rollout rank.

A bucket takes four steps. The sender packs all its messages into a :class:`Buffer`. Its transport makes a handle of the
slice for one rollout rank. The handle travels over any channel of the caller, such as Ray, and the receiver's transport
turns it into a tensor. Once the receiver has read the tensor, the sender reuses the buffer.
"""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from megarl.base.allocators import ipc_memory
from megarl.base.errors import WeightSyncError
from megarl.base.registry import Registry
from megarl.sharding.placement import PROCESS_GROUP_TRANSPORTS, Routes

BUFFERS = 2
"""One buffer for the receivers to read, one to pack."""

MemoryKind = Literal["host", "device"]
TRANSPORT_CLASSES: Registry[Callable[[TransportOptions], Transport]] = Registry(
    "sync.transport",
    lazy={
        **dict.fromkeys(("inline", "shared_memory", "cuda_ipc"), "megarl.sharding.transports.memory"),
        **dict.fromkeys(("gloo", "nccl"), "megarl.sharding.transports.process_group"),
    },
)
register_transport = TRANSPORT_CLASSES.register
"""Class decorator that adds a transport under a name in the config."""


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


def synchronize(device: torch.device) -> None:
    """Wait for the work that this process has queued on a GPU; a no-op for the CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class Rendezvous(NamedTuple):
    """Membership of a process group over both sides: training ranks keep their numbers, rollout ranks follow.

    Attributes:
        peers: numbers of the processes that this one exchanges weights with over the group; ascending.
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
        receive_bytes: maximum bytes of a bucket that this process receives.
        timeout_s: seconds without an answer until a peer counts as lost.
    """

    device: torch.device
    receive_bytes: int = 0
    rendezvous: Rendezvous | None = None
    timeout_s: float = 600.0


class Transport(Protocol):
    """One process's end of a transport, used by one thread; the base of all, whose steps do nothing by default.

    Attributes:
        memory: kind of buffer that a sender packs into.
        peak_bytes: peak bytes of this end itself, without the sender's buffers.
    """

    memory: MemoryKind = "host"
    peak_bytes: int = 0

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

        Yields:
            Training rank and flat bytes, valid until :meth:`settle`; read-only.

        Raises:
            WeightSyncError: a handle is unreachable, or its process is lost.
        """

    def settle(self) -> None:
        """Settle a bucket that the receiver has copied: on return the sender's memory is no longer read."""

    def end(self, completed: bool) -> None:
        """End a sync and free memory that the next one does not reuse; after a failure drop everything in flight."""


def create_transport(name: str, options: TransportOptions) -> Transport:
    """Create a transport for this process; ConfigError for an unknown name."""
    return TRANSPORT_CLASSES[name](options)


class StoreAddress(NamedTuple):
    """Address of the TCP store where a process group's sides meet.

    Attributes:
        timeout_s: seconds without an answer until a peer counts as lost.
    """

    host: str
    port: int
    timeout_s: float = 600.0


class PeerTransports:
    """A process's transports, and the one to each peer."""

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
        return cls(names, _options(routes, rank, members, device, address))

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
        """Create the transports of a rollout rank that receives buckets of at most ``receive_bytes`` bytes."""
        names = {peer: routes.between(peer, rank) for peer in sorted(peers)}
        members = [peer for peer, name in names.items() if name in PROCESS_GROUP_TRANSPORTS]
        return cls(names, _options(routes, rank + len(routes.train), members, device, address, receive_bytes))

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
    routes: Routes,
    process: int,
    peers: Sequence[int],
    device: torch.device,
    address: StoreAddress | None,
    receive_bytes: int = 0,
) -> TransportOptions:
    """Return the options of a process, by its number in the process group."""
    if address is None:
        return TransportOptions(device, receive_bytes)
    size = len(routes.train) + len(routes.rollout)
    group = Rendezvous(process, len(routes.train), size, tuple(peers), address.host, address.port)
    return TransportOptions(device, receive_bytes, group, address.timeout_s)


class SharedHostBuffer:
    """Anonymous shared memory that processes of one host and user open through ``/proc``.

    It has no name in a file system. The kernel frees it when the last process closes it or dies, even if killed.
    Nothing stays behind in ``/dev/shm``, whose size (64 MB in many containers) is no limit, and no resource tracker is
    involved.

    Args:
        pinned: page-lock the memory, so that a GPU copies at full speed.

    Raises:
        WeightSyncError: memory is exhausted.
    """

    def __init__(self, nbytes: int, pinned: bool = False) -> None:
        self.name = f"megarl-{uuid.uuid4().hex}"
        self.fd = -1
        try:
            self.data = self._shared(nbytes) if hasattr(os, "memfd_create") else torch.empty(nbytes, dtype=torch.uint8)
        except OSError as error:
            self.close()
            raise WeightSyncError(
                f"no shared memory for {nbytes} bytes ({error.strerror}); use a smaller sync.bucket_megabytes or more "
                "memory",
                code="sync.no-shared-memory",
            ) from error
        self._pinned = pinned and nbytes > 0
        if self._pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.data.data_ptr(), nbytes, 0))

    def _shared(self, nbytes: int) -> Tensor:
        self.fd = os.memfd_create(self.name, os.MFD_CLOEXEC)
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        # Reserve the pages now: running out of memory later would kill the process (SIGBUS).
        os.posix_fallocate(self.fd, 0, nbytes)
        return torch.frombuffer(mmap.mmap(self.fd, nbytes), dtype=torch.uint8)

    def close(self) -> None:
        """Free the memory, unless another process still maps it."""
        if getattr(self, "_pinned", False):
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.data.data_ptr()))
            self._pinned = False
        self.data = torch.empty(0, dtype=torch.uint8)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


class DeviceBuffer:
    """Memory of a GPU that other processes can open, or of the CPU."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.name = uuid.uuid4().hex
        with ipc_memory():
            self.data = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def close(self) -> None:
        """Free the memory."""
        self.data = torch.empty(0, dtype=torch.uint8)


Buffer: TypeAlias = SharedHostBuffer | DeviceBuffer
"""Memory for the messages of a bucket."""


class BufferPool:
    """At most :data:`BUFFERS` buffers of one size, allocated on first use and then reused.

    Allocating shared memory costs more than filling it, since the kernel clears every page.
    """

    def __init__(self, allocate: Callable[[int], Buffer], size: int) -> None:
        self.size, self._allocate = size, allocate
        self._idle: list[Buffer] = []
        self._lent: list[Buffer] = []
        self.peak_bytes = 0

    def take(self) -> Buffer:
        """Return an unused buffer; WeightSyncError if all are in use, or memory is exhausted."""
        if not self._idle:
            if len(self._lent) == BUFFERS:
                raise WeightSyncError(f"all {BUFFERS} weight buffers are in use", code="sync.buffers-in-use")
            self._idle.append(self._allocate(self.size))
        buffer = self._idle.pop()
        self._lent.append(buffer)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        """Mark a buffer as unused."""
        self._lent.remove(buffer)
        self._idle.append(buffer)

    def close(self) -> None:
        """Free all buffers, including used ones."""
        for buffer in (*self._idle, *self._lent):
            buffer.close()
        self._idle, self._lent = [], []

    @property
    def held_bytes(self) -> int:
        """Bytes of all allocated buffers."""
        return self.size * (len(self._idle) + len(self._lent))


def buffer_pool(kind: MemoryKind, size: int, device: torch.device) -> BufferPool:
    """Create the two buffers of a sender."""
    if kind == "device":
        return BufferPool(lambda nbytes: DeviceBuffer(nbytes, device), size)
    return BufferPool(lambda nbytes: SharedHostBuffer(nbytes, pinned=device.type == "cuda"), size)
