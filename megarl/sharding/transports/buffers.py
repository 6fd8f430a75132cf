"""The memory that buckets are packed into: two buffers per sender, used in turn."""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Callable

import torch
from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.sharding.transports.interface import Buffer, MemoryKind

BUFFERS = 2
"""One that the receivers read, and one that is being packed."""


class HostBuffer:
    """Anonymous shared memory that processes of one host and user open through ``/proc``.

    It has no name in any file system: the kernel frees it when the last process that has it open or mapped closes it
    or dies, killed or not. So nothing can be left behind in ``/dev/shm``, whose size (64 MB in many containers) is no
    limit either, and no resource tracker is involved.

    Args:
        nbytes: its size.
        pinned: page-locked, which lets a GPU copy at full speed.

    Raises:
        WeightSyncError: there is not so much memory.
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
                "memory"
            ) from error
        self._pinned = pinned and nbytes > 0
        if self._pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.data.data_ptr(), nbytes, 0))

    def _shared(self, nbytes: int) -> Tensor:
        self.fd = os.memfd_create(self.name, os.MFD_CLOEXEC)
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        # Reserves the pages now: without it, running out of memory later would kill the process (SIGBUS).
        os.posix_fallocate(self.fd, 0, nbytes)
        return torch.frombuffer(mmap.mmap(self.fd, nbytes), dtype=torch.uint8)

    def close(self) -> None:
        """Gives the memory back, as far as no other process has it mapped."""
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
    """Memory of a GPU; of the CPU where that is the device.

    Args:
        nbytes: its size.
        device: where.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.name = uuid.uuid4().hex
        self.data = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def close(self) -> None:
        """Gives the memory back."""
        self.data = torch.empty(0, dtype=torch.uint8)


class BufferPool:
    """Buffers of one size, made when first needed and used again and again.

    Making shared memory costs more than filling it: the kernel clears every page.

    Args:
        allocate: makes a buffer of so many bytes.
        size: bytes of each.
        count: how many there are at most.
    """

    def __init__(self, allocate: Callable[[int], Buffer], size: int, count: int = BUFFERS) -> None:
        self.size = size
        self._allocate, self._count = allocate, count
        self._idle: list[Buffer] = []
        self._lent: list[Buffer] = []
        self.peak_bytes = 0

    def take(self) -> Buffer:
        """A buffer that nobody uses.

        Raises:
            WeightSyncError: all are in use, or there is no memory.
        """
        if not self._idle:
            if len(self._lent) == self._count:
                raise WeightSyncError(f"all {self._count} weight buffers are in use; release a bucket first")
            self._idle.append(self._allocate(self.size))
        buffer = self._idle.pop()
        self._lent.append(buffer)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        """Makes a buffer free to be taken again."""
        self._lent.remove(buffer)
        self._idle.append(buffer)

    def close(self) -> None:
        """Gives the memory of all buffers back, also of those in use."""
        for buffer in (*self._idle, *self._lent):
            buffer.close()
        self._idle, self._lent = [], []

    @property
    def held_bytes(self) -> int:
        """Memory of all buffers that there are now."""
        return self.size * (len(self._idle) + len(self._lent))


def buffer_pool(kind: MemoryKind, size: int, device: torch.device) -> BufferPool:
    """The two buffers of a sender.

    Args:
        kind: where transports need them.
        size: bytes of each.
        device: on which this process computes.
    """
    if kind == "device":
        return BufferPool(lambda nbytes: DeviceBuffer(nbytes, device), size)
    return BufferPool(lambda nbytes: HostBuffer(nbytes, pinned=device.type == "cuda"), size)
