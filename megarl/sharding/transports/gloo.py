"""Messages over TCP from host memory to host memory."""

from __future__ import annotations

from typing import Any

from torch.distributed import PrefixStore, ProcessGroupGloo

from megarl.sharding.transports.interface import MemoryKind, register_transport
from megarl.sharding.transports.point_to_point import PointToPointTransport


@register_transport("gloo")
class GlooTransport(PointToPointTransport):
    """Between any two hosts: a group of two for each pair of processes that exchange weights, and for no other.

    Both sides go through their peers in ascending order: of the pairs that are left, the first by training and then by
    rollout rank is next at both of its ends, so somebody always goes on.
    """

    memory: MemoryKind = "host"

    def _join(self, store: PrefixStore) -> dict[int, ProcessGroupGloo]:
        return {peer: self._pair(store, peer) for peer in self._meeting.peers}

    def _pair(self, store: PrefixStore, peer: int) -> ProcessGroupGloo:
        # Training ranks have the lower numbers, and are the first of each pair.
        first, second = sorted((self._meeting.rank, peer))
        met = PrefixStore(f"{first}-{second}", store)
        return ProcessGroupGloo(met, int(self._meeting.rank == second), 2, timeout=self._timeout)

    def _channel(self, peer: int) -> tuple[Any, int]:
        return self._group[peer], int(peer > self._meeting.rank)
