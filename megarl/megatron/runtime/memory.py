"""Host memory that receives copies of device memory, page-locked (pinned) for a GPU; and device memory in use."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_BYTES = 2**28
"""Size of a pinned chunk. Chunks avoid torch's rounding of each allocation to a power of two."""
ALIGNMENT = 16
"""Alignment of each copy in bytes, valid for every number format."""
LOGGED_SECONDS = 1.0
"""An allocation that takes longer is logged: page-locking costs a third of a second per GiB."""

logger = logging.getLogger(__name__)


class HostBuffer:
    """Host memory in chunks, page-locked for a GPU, that receives tensors one after the other and is reused."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._size = aligned(CHUNK_BYTES)
        self._chunks: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return sum(len(chunk) for chunk in self._chunks)

    def reserve(self, nbytes: int) -> None:
        """Allocate memory for ``nbytes`` in total."""
        missing = -(-nbytes // self._size) - len(self._chunks)
        started, pinned = time.monotonic(), self._device.type == "cuda"
        for _ in range(missing):
            self._chunks.append(torch.empty(self._size, dtype=torch.uint8, pin_memory=pinned))
        seconds = time.monotonic() - started
        if missing > 0 and seconds > LOGGED_SECONDS:
            logger.info("allocated %.1f GiB of host memory in %.1f s", missing * self._size / 2**30, seconds)

    def write(self, data: Sequence[Tensor]) -> list[int]:
        """Copy flat byte tensors into the buffer from its start, maybe asynchronously; return the offset of each."""
        offsets, end = [], 0
        for source in data:
            offsets.append(end)
            end = aligned(end + len(source))
        self.reserve(end)
        for offset, source in zip(offsets, data, strict=True):
            for piece, part in self._pairs(offset, source):
                piece.copy_(part, non_blocking=True)
        return offsets

    def read(self, offset: int, target: Tensor) -> None:
        """Copy the bytes from ``offset`` on into a flat byte tensor; may be asynchronous."""
        for piece, part in self._pairs(offset, target):
            part.copy_(piece, non_blocking=True)

    def pieces(self, offset: int, nbytes: int) -> tuple[Tensor, ...]:
        """Return the memory of ``nbytes`` from ``offset`` on: flat byte tensors, one per chunk, at least one."""
        if not nbytes:
            return (torch.empty(0, dtype=torch.uint8),)
        pieces, stop = [], offset + nbytes
        while offset < stop:
            chunk, start = divmod(offset, self._size)
            pieces.append(self._chunks[chunk][start : start + min(self._size - start, stop - offset)])
            offset += len(pieces[-1])
        return tuple(pieces)

    def _pairs(self, offset: int, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of this buffer, each with its piece of ``tensor``."""
        start = 0
        for piece in self.pieces(offset, len(tensor)):
            yield piece, tensor[start : start + len(piece)]
            start += len(piece)


class HostCopy(NamedTuple):
    """A copy of some storages in host memory, with the offset and the bytes of each."""

    buffer: HostBuffer
    offsets: list[int]
    sizes: list[int]

    def write_to(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Copy the contents into storages of the same sizes; may be asynchronous."""
        for storage, offset in zip(storages, self.offsets, strict=True):
            self.buffer.read(offset, storage_bytes(storage))


class TensorMemory(NamedTuple):
    """Memory of a contiguous tensor, flat.

    Attributes:
        pieces: consecutive parts, in the tensor's number format; one, or one per chunk of host memory.
        is_offloaded: in host memory, which the next offload of a changed part overwrites.
    """

    pieces: tuple[Tensor, ...]
    is_offloaded: bool

    @property
    def dtype(self) -> torch.dtype:
        """Number format."""
        return self.pieces[0].dtype

    def part(self, start: int, stop: int) -> TensorMemory:
        """Return the memory of the elements ``[start, stop)``."""
        parts, first = [], 0
        for piece in self.pieces:
            low, high = max(start - first, 0), min(stop - first, len(piece))
            if low < high or start == stop:
                parts.append(piece[low : max(low, high)])
            first += len(piece)
        return self._replace(pieces=tuple(parts))

    def joined(self) -> Tensor:
        """Return all elements: a view of the only piece, otherwise a copy."""
        return self.pieces[0] if len(self.pieces) == 1 else torch.cat(self.pieces)


def storage_bytes(storage: torch.UntypedStorage) -> Tensor:
    """View a storage as a flat byte tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def aligned(nbytes: int) -> int:
    """Round up to a multiple of :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class DeviceMemory(NamedTuple):
    """Memory of one device in bytes.

    Attributes:
        used: by all processes.
        reserved: by torch's allocator in this process.
        process: by this process; None if NVML does not tell, as in a container with process numbers of its own.
    """

    used: int
    total: int
    reserved: int
    process: int | None

    def describe(self) -> str:
        """Describe the memory in one line, in GiB."""
        used, total, reserved = (f"{nbytes / 2**30:.1f}" for nbytes in (self.used, self.total, self.reserved))
        if self.process is None:
            own = f"torch has {reserved} GiB; the rest of this process is unknown, as NVML does not list it"
        else:
            outside = f"{(self.process - self.reserved) / 2**30:.1f}"
            own = f"torch has {reserved} GiB, CUDA context, NCCL and libraries of this process {outside} GiB"
        return f"{own}; all processes {used} of {total} GiB"


def read_device_memory(device: torch.device) -> DeviceMemory:
    """Measure a CUDA device with NVML and torch."""
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total - free, total, torch.cuda.memory_reserved(device), _own_bytes(device))


def _own_bytes(device: torch.device) -> int | None:
    """Bytes of this process by NVML; None without it."""
    try:
        nvml: Any = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except nvml.NVMLError:  # MIG slices, old drivers
        return None
    return next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None)
