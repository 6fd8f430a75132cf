"""What a transport promises: bytes that a training rank has packed reach a rollout rank.

A bucket goes like this. The sender packs all that it sends into one :class:`Buffer`; a transport makes a payload of the
part that is for one rollout rank; the payload travels by whatever channel the caller has; the receiver's transport
turns it into a tensor; and when the receiver has read it, the sender uses the buffer again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from megarl.errors import ConfigError

MemoryKind = Literal["host", "device"]


class Buffer(Protocol):
    """Memory to pack a bucket into."""

    data: Tensor
    """Flat bytes."""

    def close(self) -> None:
        """Gives the memory back."""


class Region(NamedTuple):
    """The bytes ``start`` to ``stop`` of a buffer."""

    buffer: Any
    start: int
    stop: int

    @property
    def data(self) -> Tensor:
        """The bytes, not a copy."""
        return self.buffer.data[self.start : self.stop]


class Meeting(NamedTuple):
    """How the processes of both sides find each other; a training rank keeps its number, rollout ranks follow.

    Attributes:
        rank: of this process among both sides.
        train_ranks: processes of the training side.
        world_size: processes of both sides.
        peers: numbers of the processes that this one exchanges weights with over the group, ascending.
        host: where the store listens.
        port: its port.
    """

    rank: int
    train_ranks: int
    world_size: int
    peers: tuple[int, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0

    def name_of(self, process: int) -> str:
        """What one of the processes is called in an error."""
        if process < self.train_ranks:
            return f"training rank {process}"
        return f"rollout rank {process - self.train_ranks}"


class TransportOptions(NamedTuple):
    """What a transport is built with.

    Attributes:
        device: on which this process computes.
        receive_bytes: the most that this process receives of a bucket, by this transport.
        meeting: for transports with a process group.
        timeout_s: seconds without an answer after which a peer counts as lost.
    """

    device: torch.device = torch.device("cpu")
    receive_bytes: int = 0
    meeting: Meeting | None = None
    timeout_s: float = 600.0


class Transport(Protocol):
    """One process's end; used by one thread.

    Attributes:
        memory: the kind of buffer that a sender packs into.
    """

    memory: MemoryKind

    def open(self, session: int) -> None:
        """Gets ready for a sync; waits for the other processes where ``session`` is new.

        Raises:
            WeightSyncError: a process did not come.
        """

    def send(self, region: Region, dst_rank: int, tag: int) -> Any:
        """Offers a region to a rollout rank; does not wait for it to be read.

        Returns:
            What the receiver needs in order to get it; can be pickled.

        Raises:
            WeightSyncError: the peer is gone.
        """

    def finish(self, payload: Any) -> None:
        """Called when the receiver has read a payload: afterwards its region may be written again."""

    def receive(self, payloads: Mapping[int, Any]) -> Iterator[tuple[int, Tensor]]:
        """What was sent to this process in a bucket.

        Args:
            payloads: by training rank.

        Yields:
            Training rank and flat bytes, to be read until :meth:`settle`; not to be written.

        Raises:
            WeightSyncError: a payload cannot be reached, or its process is gone.
        """

    def settle(self) -> None:
        """Called when the receiver is done with the bucket: returns when nothing reads its memory any more."""

    def end(self, completed: bool) -> None:
        """Ends a sync and gives back what need not be kept until the next; after a failure, whatever is under way."""

    @property
    def peak_bytes(self) -> int:
        """The most that this end itself held at once; the sender's buffers are not its own."""


_TRANSPORTS: dict[str, Callable[[TransportOptions], Transport]] = {}


def register_transport(name: str) -> Callable[[type], type]:
    """Class decorator: makes a transport known under a name in the config."""

    def register(transport: type) -> type:
        """Registers the class and returns it."""
        _TRANSPORTS[name] = transport
        return transport

    return register


def create_transport(name: str, options: TransportOptions | None = None) -> Transport:
    """A new transport of this process.

    Raises:
        ConfigError: the name is unknown; lists those that are known.
    """
    if name not in _TRANSPORTS:
        raise ConfigError(f"weight transport '{name}' is unknown; known ones: {', '.join(sorted(_TRANSPORTS))}")
    return _TRANSPORTS[name](options or TransportOptions())
