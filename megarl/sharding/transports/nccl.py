"""Messages from GPU memory to GPU memory, between nodes too."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import PrefixStore

from megarl.errors import WeightSyncError
from megarl.sharding.transports.interface import MemoryKind, TransportOptions, register_transport
from megarl.sharding.transports.point_to_point import PointToPointTransport


@register_transport("nccl")
class NcclTransport(PointToPointTransport):
    """One communicator for each two processes that exchange weights, so that others may share a GPU.

    Raises:
        WeightSyncError: this process does not compute on a GPU.
    """

    memory: MemoryKind = "device"

    def __init__(self, options: TransportOptions) -> None:
        super().__init__(options)
        if options.device.type != "cuda":
            raise WeightSyncError(
                f"weight transport 'nccl' moves GPU memory and this process computes on {options.device}; "
                "set sync.transport to 'auto', or to 'gloo'"
            )

    def _join(self, store: PrefixStore) -> Any:
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return ProcessGroupNCCL(store, self._meeting.rank, self._meeting.world_size, options)

    def _channel(self, peer: int) -> tuple[Any, int]:
        return self._group, peer

    def _greet(self) -> None:
        """One byte to or from each peer, because the first message of a pair makes their communicator and blocks.

        A bucket is sent before its receiver is called, so that must have happened before. Both sides go through their
        peers in ascending order: of the pairs that are left, the first by training and then by rollout rank is next at
        both of its ends, so somebody always goes on.
        """
        sends = self._meeting.rank < self._meeting.train_ranks
        for peer in sorted(self._meeting.peers):
            byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
            self._wait(
                self._call("send to" if sends else "receive from", peer, byte, 0),
                f"greet {self._meeting.name_of(peer)}",
            )
            torch.cuda.synchronize(self._device)

    def finish(self, payload: Any) -> None:
        """Makes later writes to the region wait for the message."""
        with torch.cuda.device(self._device):
            super().finish(payload)

    def end(self, completed: bool) -> None:
        """See :meth:`Transport.end`; a communicator with a message that nobody receives is aborted."""
        if completed:
            torch.cuda.synchronize(self._device)
        elif self._group is not None:
            self._group.abort()
        super().end(completed)
