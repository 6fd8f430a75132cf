"""Transports through host memory: ``shared_memory`` between processes of one host, ``inline`` inside the handle."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.base.errors import WeightSyncError
from megarl.sharding.transports.interface import BUFFERS, BufferSlice, MemoryKind, TransportOptions, register_transport


class InlineHandle(NamedTuple):
    """The bytes themselves; Ray keeps them in its object store."""

    data: np.ndarray


@register_transport("inline")
class InlineTransport:
    """Works between any two processes; the channel copies the bytes once more."""

    memory: MemoryKind = "host"

    def __init__(self, options: TransportOptions) -> None:
        self.peak_bytes = 0

    def open(self, session: int) -> None:
        """Do nothing: no preparation is needed."""

    def send(self, buffer_slice: BufferSlice, dst_rank: int, tag: int) -> InlineHandle:
        """See :meth:`Transport.send`."""
        return InlineHandle(buffer_slice.data.numpy())

    def finish(self, handle: InlineHandle) -> None:
        """Do nothing: the channel copied the bytes before the handle arrived."""

    def receive(self, handles: Mapping[int, InlineHandle]) -> Iterator[tuple[int, Tensor]]:
        """See :meth:`Transport.receive`."""
        self.peak_bytes = max(self.peak_bytes, sum(handle.data.nbytes for handle in handles.values()))
        for rank, handle in handles.items():
            with warnings.catch_warnings():
                # An array from an object store is read-only. torch warns about it, but this process never writes to it.
                warnings.filterwarnings("ignore", message=".*not writable.*")
                yield rank, torch.from_numpy(handle.data)

    def settle(self) -> None:
        """Do nothing: there is nothing to wait for."""

    def end(self, completed: bool) -> None:
        """Do nothing: there is no memory to release."""


class SharedMemoryHandle(NamedTuple):
    """Process, file descriptor and byte range of a buffer slice."""

    pid: int
    fd: int
    name: str
    size: int
    start: int
    stop: int


@register_transport("shared_memory")
class SharedMemoryTransport:
    """The receiver reads the pages that the sender packed; it keeps each sender's buffers mapped.

    Raises:
        WeightSyncError: the system is not Linux.
    """

    memory: MemoryKind = "host"
    peak_bytes = 0

    def __init__(self, options: TransportOptions) -> None:
        if not hasattr(os, "memfd_create"):
            text = "weight transport 'shared_memory' needs Linux; use 'inline' here"
            raise WeightSyncError(text, code="sync.needs-linux")
        self._mapped: dict[int, dict[str, Tensor]] = {}  # by training rank and buffer, least recently used first

    def open(self, session: int) -> None:
        """Do nothing: no preparation is needed."""

    def send(self, buffer_slice: BufferSlice, dst_rank: int, tag: int) -> SharedMemoryHandle:
        """See :meth:`Transport.send`."""
        buffer = buffer_slice.buffer
        return SharedMemoryHandle(
            os.getpid(), buffer.fd, buffer.name, len(buffer.data), buffer_slice.start, buffer_slice.stop
        )

    def finish(self, handle: SharedMemoryHandle) -> None:
        """Do nothing: the receiver has copied the bytes."""

    def receive(self, handles: Mapping[int, SharedMemoryHandle]) -> Iterator[tuple[int, Tensor]]:
        """See :meth:`Transport.receive`."""
        for rank, handle in handles.items():
            yield rank, self._buffer(rank, handle)[handle.start : handle.stop]

    def settle(self) -> None:
        """Do nothing: copies from host memory are done when they return."""

    def end(self, completed: bool) -> None:
        """Unmap the senders' buffers after a failure, since the senders may be dead."""
        if not completed:
            self._mapped.clear()

    def _buffer(self, rank: int, handle: SharedMemoryHandle) -> Tensor:
        buffers = self._mapped.setdefault(rank, {})
        mapped = buffers.pop(handle.name, None)
        buffers[handle.name] = _map(handle) if mapped is None else mapped
        while len(buffers) > BUFFERS:
            del buffers[next(iter(buffers))]
        return buffers[handle.name]


def _map(handle: SharedMemoryHandle) -> Tensor:
    try:
        fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _unreachable(handle) from error
    try:
        # The same process and descriptor numbers may refer to another file by now, or on another host.
        if os.readlink(f"/proc/self/fd/{fd}") != f"/memfd:{handle.name} (deleted)":
            raise _unreachable(handle)
        mapped = mmap.mmap(fd, handle.size)
    finally:
        os.close(fd)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _unreachable(handle: SharedMemoryHandle) -> WeightSyncError:
    return WeightSyncError(
        f"weight buffer of process {handle.pid} cannot be opened: the process is gone, has released it, or runs on "
        "another host or in another container; set sync.transport to 'auto', or to 'inline', which works everywhere",
        code="sync.buffer-unreachable",
    )
