"""The CUDA IPC transport: GPU memory shared by processes of one host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.base.errors import WeightSyncError
from megarl.sharding.transports.interface import BUFFERS, BufferSlice, MemoryKind, TransportOptions, register_transport

DEVICE_ARGUMENT = 6
"""Position of the device index among the arguments of torch's ``rebuild_cuda_tensor``."""


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
class CudaIpcTransport:
    """The receiver opens the sender's GPU buffers through CUDA IPC handles, once per sync.

    Each receiver gets its own handle of a buffer and opens it exactly once, as torch's reference count requires. The
    buffers are freed at the end of each sync, after the receivers have closed them.
    """

    memory: MemoryKind = "device"
    peak_bytes = 0

    def __init__(self, options: TransportOptions) -> None:
        self._device = options.device
        self._shared: set[tuple[int, str]] = set()
        self._opened: dict[int, dict[str, Tensor]] = {}

    def open(self, session: int) -> None:
        """Do nothing: no preparation is needed."""

    def send(self, buffer_slice: BufferSlice, dst_rank: int, tag: int) -> CudaIpcHandle:
        """See :meth:`Transport.send`; waits until the slice is packed."""
        _synchronize(self._device)
        buffer, key = buffer_slice.buffer, (dst_rank, buffer_slice.buffer.name)
        rebuild = None if key in self._shared else _handle(buffer.data)
        self._shared.add(key)
        return CudaIpcHandle(buffer.name, _uuid(buffer.data.device), rebuild, buffer_slice.start, buffer_slice.stop)

    def finish(self, handle: CudaIpcHandle) -> None:
        """Do nothing: the receiver has waited for its copies in :meth:`settle`."""

    def receive(self, handles: Mapping[int, CudaIpcHandle]) -> Iterator[tuple[int, Tensor]]:
        """See :meth:`Transport.receive`."""
        for rank, handle in handles.items():
            yield rank, self._buffer(rank, handle)[handle.start : handle.stop]

    def settle(self) -> None:
        """Wait for the copies out of the senders' memory."""
        _synchronize(self._device)

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


def _handle(data: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    from torch.multiprocessing.reductions import reduce_tensor

    rebuild, arguments = reduce_tensor(data)
    return rebuild, arguments


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


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
