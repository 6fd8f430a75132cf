"""Buffers that buckets are packed into: two per sender, used in turn."""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Callable

import torch
from torch import Tensor

from megarl.base.allocators import ipc_memory
from megarl.base.errors import WeightSyncError
from megarl.sharding.transports.interface import Buffer, MemoryKind

BUFFERS = 2
"""One buffer for the receivers to read, one to pack."""


class SharedHostBuffer:
    """Anonymous shared memory that processes of one host and user open through ``/proc``.

    It has no name in a file system. The kernel frees it when the last process closes it or dies, even if killed.
    Nothing stays behind in ``/dev/shm``, whose size (64 MB in many containers) is no limit, and no resource tracker is
    involved.

    Args:
        nbytes: size.
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
    """Memory of a GPU that other processes can open, or of the CPU.

    Args:
        nbytes: size.
        device: its device.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.name = uuid.uuid4().hex
        with ipc_memory():
            self.data = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def close(self) -> None:
        """Free the memory."""
        self.data = torch.empty(0, dtype=torch.uint8)


class BufferPool:
    """Buffers of one size, allocated on first use and then reused.

    Allocating shared memory costs more than filling it, since the kernel clears every page.

    Args:
        allocate: allocates a buffer of a number of bytes.
        size: bytes of each buffer.
        count: maximum number of buffers.
    """

    def __init__(self, allocate: Callable[[int], Buffer], size: int, count: int = BUFFERS) -> None:
        self.size = size
        self._allocate, self._count = allocate, count
        self._idle: list[Buffer] = []
        self._lent: list[Buffer] = []
        self.peak_bytes = 0

    def take(self) -> Buffer:
        """Return an unused buffer.

        Raises:
            WeightSyncError: all buffers are in use, or memory is exhausted.
        """
        if not self._idle:
            if len(self._lent) == self._count:
                raise WeightSyncError(f"all {self._count} weight buffers are in use", code="sync.buffers-in-use")
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
    """Create the two buffers of a sender.

    Args:
        kind: kind of memory that its transports need.
        size: bytes of each buffer.
        device: device of this process.
    """
    if kind == "device":
        return BufferPool(lambda nbytes: DeviceBuffer(nbytes, device), size)
    return BufferPool(lambda nbytes: SharedHostBuffer(nbytes, pinned=device.type == "cuda"), size)
