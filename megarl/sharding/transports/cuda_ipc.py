"""Bytes in GPU memory that processes of one host share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.errors import WeightSyncError
from megarl.sharding.transports.buffers import BUFFERS
from megarl.sharding.transports.interface import MemoryKind, Region, TransportOptions, register_transport

DEVICE_ARGUMENT = 6
"""Position of the device's index among the arguments of torch's ``rebuild_cuda_tensor``."""


class IpcPayload(NamedTuple):
    """A region of a buffer of GPU memory.

    Attributes:
        name: of the buffer.
        uuid: of the GPU, whose index may differ between processes.
        handle: function and arguments that open the buffer, the first time that a receiver hears of it; else None.
        start: first byte.
        stop: byte after the last.
    """

    name: str
    uuid: str
    handle: tuple[Callable[..., Tensor], tuple[Any, ...]] | None
    start: int
    stop: int


@register_transport("cuda_ipc")
class CudaIpcTransport:
    """The receiver opens the sender's buffers by CUDA's handles, once per sync.

    A handle is made for each receiver and opened exactly once, as torch's count of a buffer's users demands. The
    buffers are given back at the end of each sync, when the receivers have closed them: the GPU is needed for other
    things between syncs.
    """

    memory: MemoryKind = "device"
    peak_bytes = 0

    def __init__(self, options: TransportOptions) -> None:
        self._device = options.device
        self._told: set[tuple[int, str]] = set()
        self._opened: dict[int, dict[str, Tensor]] = {}

    def open(self, session: int) -> None:
        """Nothing to prepare."""

    def send(self, region: Region, dst_rank: int, tag: int) -> IpcPayload:
        """See :meth:`Transport.send`; waits until the region is packed."""
        _synchronize(self._device)
        buffer, key = region.buffer, (dst_rank, region.buffer.name)
        handle = None if key in self._told else _handle(buffer.data)
        self._told.add(key)
        return IpcPayload(buffer.name, _uuid(buffer.data.device), handle, region.start, region.stop)

    def finish(self, payload: IpcPayload) -> None:
        """Nothing to wait for: the receiver has waited for its copies in :meth:`settle`."""

    def receive(self, payloads: Mapping[int, IpcPayload]) -> Iterator[tuple[int, Tensor]]:
        """See :meth:`Transport.receive`."""
        for rank, payload in payloads.items():
            yield rank, self._buffer(rank, payload)[payload.start : payload.stop]

    def settle(self) -> None:
        """Waits for the copies out of the senders' memory."""
        _synchronize(self._device)

    def end(self, completed: bool) -> None:
        """Closes the senders' buffers, and forgets who was told of one's own."""
        self._opened.clear()
        self._told.clear()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()

    def _buffer(self, rank: int, payload: IpcPayload) -> Tensor:
        buffers = self._opened.setdefault(rank, {})
        if payload.name not in buffers:
            if payload.handle is None:
                raise WeightSyncError(
                    f"training rank {rank} sent a part of a GPU buffer that was never opened here; the two sides are "
                    "not in the same sync"
                )
            if len(buffers) == BUFFERS:
                raise WeightSyncError(f"training rank {rank} uses more than {BUFFERS} GPU buffers in one sync")
            buffers[payload.name] = open_handle(payload, _local_index(payload.uuid))
        return buffers[payload.name]


def open_handle(payload: IpcPayload, device_index: int) -> Tensor:
    """The buffer that a payload with a handle names, as a tensor on this process's device number ``device_index``."""
    assert payload.handle is not None
    rebuild, arguments = payload.handle
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
        "set sync.transport to 'auto' or 'shared_memory'"
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
