"""Transports without a network: host memory (``shared_memory``) or GPU memory (``cuda_ipc``) of one machine.

``inline`` has the bytes in the handle, and works between any two processes.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.base.errors import WeightSyncError
from megarl.sharding.transports.interface import (
    BUFFERS,
    BufferSlice,
    MemoryKind,
    Transport,
    TransportOptions,
    register_transport,
    synchronize,
)

DEVICE_ARGUMENT = 6
"""Position of the device index among the arguments of torch's ``rebuild_cuda_tensor``."""


class InlineHandle(NamedTuple):
    """The bytes themselves; Ray keeps them in its object store."""

    data: np.ndarray


@register_transport("inline")
class InlineTransport(Transport):
    """Works between any two processes; the channel copies the bytes once more, before the handle arrives."""

    def __init__(self, options: TransportOptions) -> None:
        self.peak_bytes = 0

    def send(self, buffer_slice: BufferSlice, dst_rank: int, tag: int) -> InlineHandle:
        return InlineHandle(buffer_slice.data.numpy())

    def receive(self, handles: Mapping[int, InlineHandle]) -> Iterator[tuple[int, Tensor]]:
        self.peak_bytes = max(self.peak_bytes, sum(handle.data.nbytes for handle in handles.values()))
        for rank, handle in handles.items():
            with warnings.catch_warnings():
                # An array from an object store is read-only. torch warns about it, but this process never writes to it.
                warnings.filterwarnings("ignore", message=".*not writable.*")
                yield rank, torch.from_numpy(handle.data)


class SharedMemoryHandle(NamedTuple):
    """Process, file descriptor and byte range of a buffer slice."""

    pid: int
    fd: int
    name: str
    size: int
    start: int
    stop: int


@register_transport("shared_memory")
class SharedMemoryTransport(Transport):
    """The receiver reads the pages that the sender packed; it keeps each sender's buffers mapped.

    Raises:
        WeightSyncError: the system is not Linux.
    """

    def __init__(self, options: TransportOptions) -> None:
        if not hasattr(os, "memfd_create"):
            text = "weight transport 'shared_memory' needs Linux; use 'inline' here"
            raise WeightSyncError(text, code="sync.needs-linux")
        self._mapped: dict[int, dict[str, Tensor]] = {}  # by training rank and buffer, least recently used first

    def send(self, buffer_slice: BufferSlice, dst_rank: int, tag: int) -> SharedMemoryHandle:
        buffer = buffer_slice.buffer
        return SharedMemoryHandle(
            os.getpid(), buffer.fd, buffer.name, len(buffer.data), buffer_slice.start, buffer_slice.stop
        )

    def receive(self, handles: Mapping[int, SharedMemoryHandle]) -> Iterator[tuple[int, Tensor]]:
        for rank, handle in handles.items():
            yield rank, self._buffer(rank, handle)[handle.start : handle.stop]

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


class CudaIpcHandle(NamedTuple):
    """A slice of a GPU buffer.

    Attributes:
        uuid: UUID of the GPU; its index may differ between processes.
        rebuild: function and arguments that open the buffer; None if the receiver has opened it before.
        stop: end byte, exclusive.
    """

    name: str
    uuid: str
    rebuild: tuple[Callable[..., Tensor], tuple[Any, ...]] | None
    start: int
    stop: int


@register_transport("cuda_ipc")
class CudaIpcTransport(Transport):
    """The receiver opens the sender's GPU buffers through CUDA IPC handles, once per sync.

    Each receiver gets its own handle of a buffer and opens it exactly once, as torch's reference count requires. The
    buffers are freed at the end of each sync, after the receivers have closed them.
    """

    memory: MemoryKind = "device"

    def __init__(self, options: TransportOptions) -> None:
        self._device = options.device
        self._shared: set[tuple[int, str]] = set()
        self._opened: dict[int, dict[str, Tensor]] = {}

    def send(self, buffer_slice: BufferSlice, dst_rank: int, tag: int) -> CudaIpcHandle:
        """See :meth:`Transport.send`; waits until the slice is packed."""
        from torch.multiprocessing.reductions import reduce_tensor

        synchronize(self._device)
        buffer, key = buffer_slice.buffer, (dst_rank, buffer_slice.buffer.name)
        rebuild = None if key in self._shared else reduce_tensor(buffer.data)
        self._shared.add(key)
        return CudaIpcHandle(buffer.name, _uuid(buffer.data.device), rebuild, buffer_slice.start, buffer_slice.stop)

    def receive(self, handles: Mapping[int, CudaIpcHandle]) -> Iterator[tuple[int, Tensor]]:
        for rank, handle in handles.items():
            yield rank, self._buffer(rank, handle)[handle.start : handle.stop]

    def settle(self) -> None:
        synchronize(self._device)

    def end(self, completed: bool) -> None:
        """Close the senders' buffers, and forget which receivers have handles."""
        self._opened.clear()
        self._shared.clear()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()

    def _buffer(self, rank: int, handle: CudaIpcHandle) -> Tensor:
        buffers = self._opened.setdefault(rank, {})
        if handle.name not in buffers:
            if handle.rebuild is None:
                raise WeightSyncError(
                    f"training rank {rank} sent a part of a GPU buffer that was never opened here; the two sides are "
                    "not in the same sync",
                    code="sync.buffer-not-opened",
                )
            if len(buffers) == BUFFERS:
                text = f"training rank {rank} uses more than {BUFFERS} GPU buffers in one sync"
                raise WeightSyncError(text, code="sync.too-many-buffers")
            buffers[handle.name] = open_handle(handle, _local_index(handle.uuid))
        return buffers[handle.name]


def open_handle(handle: CudaIpcHandle, device_index: int) -> Tensor:
    """Open the buffer of a handle as a tensor on device ``device_index`` of this process."""
    assert handle.rebuild is not None
    rebuild, arguments = handle.rebuild
    return rebuild(*arguments[:DEVICE_ARGUMENT], device_index, *arguments[DEVICE_ARGUMENT + 1 :])


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _local_index(uuid: str) -> int:
    for index in range(torch.cuda.device_count()):
        if _uuid(torch.device("cuda", index)) == uuid:
            return index
    raise WeightSyncError(
        f"GPU {uuid} holds weights for this process, which does not see it (CUDA_VISIBLE_DEVICES); "
        "set sync.transport to 'auto' or 'shared_memory'",
        code="sync.gpu-not-visible",
    )
