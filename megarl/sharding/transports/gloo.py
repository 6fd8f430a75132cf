"""Messages over TCP from host memory to host memory."""

from __future__ import annotations

from torch.distributed import PrefixStore, ProcessGroupGloo

from megarl.sharding.transports.interface import MemoryKind, register_transport
from megarl.sharding.transports.point_to_point import PointToPointTransport


@register_transport("gloo")
class GlooTransport(PointToPointTransport):
    """Between any two hosts; every process is connected to every other when the group is joined."""

    memory: MemoryKind = "host"

    def _join(self, store: PrefixStore) -> ProcessGroupGloo:
        return ProcessGroupGloo(store, self._meeting.rank, self._meeting.world_size, timeout=self._timeout)
