"""The transports of one process, and which of them leads to each of its peers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from megarl.sharding.places import JOINED, Routes
from megarl.sharding.transports import Meeting, Transport, TransportOptions, create_transport


class Address(NamedTuple):
    """Where the store listens at which both sides of a process group meet, and how long they wait for each other.

    Attributes:
        host: where the store listens.
        port: its port.
        timeout_s: seconds without an answer after which a peer counts as lost.
    """

    host: str
    port: int
    timeout_s: float = 600.0


class Links:
    """Transports by peer.

    Args:
        names: by peer, the name of the transport that leads there.
        options: of this process.
    """

    def __init__(self, names: Mapping[int, str], options: TransportOptions | None = None) -> None:
        self.names = dict(names)
        self.transports: dict[str, Transport] = {
            name: create_transport(name, options) for name in sorted(set(self.names.values()))
        }

    @classmethod
    def of_trainer(
        cls, routes: Routes, rank: int, peers: Iterable[int], device: torch.device, address: Address | None
    ) -> Links:
        """Those of a training rank that sends to rollout ranks ``peers``."""
        names = {peer: routes.between(rank, peer) for peer in sorted(peers)}
        met = [peer + len(routes.train) for peer, name in names.items() if name in JOINED]
        return cls(names, _options(device, 0, _meeting(routes, rank, met, address), address))

    @classmethod
    def of_rollout(
        cls,
        routes: Routes,
        rank: int,
        peers: Iterable[int],
        device: torch.device,
        address: Address | None,
        receive_bytes: int,
    ) -> Links:
        """Those of a rollout rank that receives from training ranks ``peers``, at most so many bytes a bucket."""
        names = {peer: routes.between(peer, rank) for peer in sorted(peers)}
        met = [peer for peer, name in names.items() if name in JOINED]
        meeting = _meeting(routes, rank + len(routes.train), met, address)
        return cls(names, _options(device, receive_bytes, meeting, address))

    def to(self, peer: int) -> Transport:
        """The transport that leads to a peer."""
        return self.transports[self.names[peer]]

    def open(self, session: int) -> None:
        """Gets all of them ready for a sync; see :meth:`Transport.open`."""
        for transport in self.transports.values():
            transport.open(session)

    def end(self, completed: bool) -> None:
        """Ends a sync on all of them; see :meth:`Transport.end`."""
        for transport in self.transports.values():
            transport.end(completed)

    @property
    def peak_bytes(self) -> int:
        """The most that the transports themselves held at once."""
        return sum(transport.peak_bytes for transport in self.transports.values())


def _options(
    device: torch.device, receive_bytes: int, meeting: Meeting | None, address: Address | None
) -> TransportOptions:
    if address is None:
        return TransportOptions(device, receive_bytes, meeting)
    return TransportOptions(device, receive_bytes, meeting, address.timeout_s)


def _meeting(routes: Routes, rank: int, peers: list[int], address: Address | None) -> Meeting | None:
    if address is None:
        return None
    size = len(routes.train) + len(routes.rollout)
    return Meeting(rank, len(routes.train), size, tuple(peers), address.host, address.port)
