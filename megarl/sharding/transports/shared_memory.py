"""Bytes in host memory that processes of one host share."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.sharding.transports.buffers import BUFFERS
from megarl.sharding.transports.interface import MemoryKind, Region, TransportOptions, register_transport


class SharedPayload(NamedTuple):
    """Where another process of this host finds a region of a buffer."""

    pid: int
    fd: int
    name: str
    size: int
    start: int
    stop: int


@register_transport("shared_memory")
class SharedMemoryTransport:
    """The receiver reads the very pages that the sender packed; it keeps each sender's buffers mapped.

    Raises:
        WeightSyncError: this is not Linux.
    """

    memory: MemoryKind = "host"
    peak_bytes = 0

    def __init__(self, options: TransportOptions) -> None:
        if not hasattr(os, "memfd_create"):
            raise WeightSyncError("weight transport 'shared_memory' needs Linux; use 'inline' here")
        self._mapped: dict[int, dict[str, Tensor]] = {}  # by training rank and buffer, the last used last

    def open(self, session: int) -> None:
        """Nothing to prepare."""

    def send(self, region: Region, dst_rank: int, tag: int) -> SharedPayload:
        """See :meth:`Transport.send`."""
        buffer = region.buffer
        return SharedPayload(os.getpid(), buffer.fd, buffer.name, len(buffer.data), region.start, region.stop)

    def finish(self, payload: SharedPayload) -> None:
        """Nothing to wait for: the receiver has copied the bytes."""

    def receive(self, payloads: Mapping[int, SharedPayload]) -> Iterator[tuple[int, Tensor]]:
        """See :meth:`Transport.receive`."""
        for rank, payload in payloads.items():
            yield rank, self._buffer(rank, payload)[payload.start : payload.stop]

    def settle(self) -> None:
        """Nothing to wait for: copies from host memory are done when they return."""

    def end(self, completed: bool) -> None:
        """Forgets the senders' buffers after a failure: they may be gone."""
        if not completed:
            self._mapped.clear()

    def _buffer(self, rank: int, payload: SharedPayload) -> Tensor:
        buffers = self._mapped.setdefault(rank, {})
        known = buffers.pop(payload.name, None)
        buffers[payload.name] = _map(payload) if known is None else known
        while len(buffers) > BUFFERS:
            del buffers[next(iter(buffers))]
        return buffers[payload.name]


def _map(payload: SharedPayload) -> Tensor:
    try:
        fd = os.open(f"/proc/{payload.pid}/fd/{payload.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _unreachable(payload) from error
    try:
        # The same process and descriptor numbers may by now, or on another host, mean another file.
        if os.readlink(f"/proc/self/fd/{fd}") != f"/memfd:{payload.name} (deleted)":
            raise _unreachable(payload)
        mapped = mmap.mmap(fd, payload.size)
    finally:
        os.close(fd)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _unreachable(payload: SharedPayload) -> WeightSyncError:
    return WeightSyncError(
        f"weight buffer of process {payload.pid} cannot be opened: the process is gone, has released it, or runs on "
        "another host or in another container; set sync.transport to 'auto', or to 'inline', which works everywhere"
    )
