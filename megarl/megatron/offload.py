"""Offload and onload: moves weights, gradients and optimizer state to host memory between phases, and back, bit for
bit.

A storage is resized to zero in place and filled again later. Parameters, their buffers, gradients, main parameters and
Adam's state therefore stay the same tensor objects, whichever Megatron wrapper holds them and however they are sharded.
Nothing may read an offloaded part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.megatron.optimizer import Optimizer
from megarl.tracing import span

PARAM, GRAD, OPTIMIZER = "param", "grad", "optimizer"
PARTS = (PARAM, GRAD, OPTIMIZER)
"""Weights; gradient buffers; main parameters and Adam's state, except tensors that share memory with the weights."""

CHUNK_BYTES = 2**28
"""Size of a piece of pinned memory. Pieces avoid torch's rounding of each allocation to a power of two."""


class HostBuffer:
    """Host memory that receives a device's storages one after the other; pinned if the device is a GPU.

    It grows as needed and is kept for reuse.

    Args:
        pinned: page-locked, so that a GPU copies at full speed.
        chunk_bytes: see :data:`CHUNK_BYTES`.
    """

    def __init__(self, pinned: bool, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._pinned = pinned
        self._size = chunk_bytes
        self._chunks: list[Tensor] = []

    def write(self, data: Sequence[Tensor]) -> None:
        """Copy flat byte tensors into the buffer; the copies may be asynchronous."""
        while len(self._chunks) * self._size < sum(len(source) for source in data):
            self._chunks.append(torch.empty(self._size, dtype=torch.uint8, pin_memory=self._pinned))
        for piece, source in self._pairs(data):
            piece.copy_(source, non_blocking=True)

    def read(self, data: Sequence[Tensor]) -> None:
        """Copy the tensors of :meth:`write` back, in the same order and sizes; may be asynchronous."""
        for piece, target in self._pairs(data):
            target.copy_(piece, non_blocking=True)

    def _pairs(self, data: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of pieces of this buffer and the corresponding pieces of ``data``."""
        position = 0
        for tensor in data:
            start = 0
            while start < len(tensor):
                chunk, offset = divmod(position, self._size)
                count = min(self._size - offset, len(tensor) - start)
                yield self._chunks[chunk][offset : offset + count], tensor[start : start + count]
                position, start = position + count, start + count


class Offloader:
    """Empties the storages of some tensors and fills them again.

    Args:
        tensors: called at each offload, because an optimizer creates its state in its first step.
        device: device of the tensors.
        keep: keep the contents in host memory; otherwise the storages return filled with zeros.
        chunk_bytes: see :data:`CHUNK_BYTES`.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        device: torch.device,
        *,
        keep: bool = True,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._tensors = tensors
        self._device = device
        self._host = HostBuffer(device.type == "cuda", chunk_bytes) if keep else None
        self._emptied: list[tuple[torch.UntypedStorage, int]] | None = None

    @property
    def is_offloaded(self) -> bool:
        """Whether the tensors have no memory now."""
        return self._emptied is not None

    def offload(self) -> int:
        """Empty the storages; no effect if they are empty.

        Returns:
            Number of device bytes released.
        """
        if self._emptied is None:
            storages = _storages(self._tensors(), self._device)
            if self._host is not None:
                self._host.write([_bytes(storage) for storage in storages])
            _wait(self._device)
            self._emptied = [(storage, storage.nbytes()) for storage in storages]
            for storage in storages:
                storage.resize_(0)
        return sum(size for _, size in self._emptied)

    def onload(self) -> None:
        """Fill the storages again; no effect if they are full."""
        if self._emptied is None:
            return
        for storage, size in self._emptied:
            storage.resize_(size)
        contents = [_bytes(storage) for storage, _ in self._emptied]
        if self._host is None:
            for content in contents:
                content.zero_()
        else:
            self._host.read(contents)
        _wait(self._device)
        self._emptied = None


class OffloadManager:
    """Offloads the parts of an engine between phases and onloads them on demand.

    Args:
        chunks: Megatron's modules, wrapped for data parallelism if there is an optimizer.
        optimizer: None for inference.
        parts: members of :data:`PARTS` to offload between phases.
        device: device of the engine.
        chunk_bytes: see :data:`CHUNK_BYTES`.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Optimizer | None,
        parts: Collection[str],
        device: torch.device,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        tensors: dict[str, Callable[[], Iterable[Tensor]]] = {
            PARAM: lambda: _params(chunks),
            GRAD: lambda: _grads(chunks),
            OPTIMIZER: lambda: _optimizer_state(chunks, optimizer),
        }
        self._device = device
        self._optimizer = optimizer
        self._offloaders = {
            part: Offloader(tensors[part], device, keep=part != GRAD, chunk_bytes=chunk_bytes)
            for part in PARTS
            if part in parts and (part == PARAM or optimizer is not None)
        }

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Parts that are in host memory now."""
        return tuple(part for part, offloader in self._offloaders.items() if offloader.is_offloaded)

    def onload(self, *parts: str) -> None:
        """Bring parts back to the device, if they are offloaded."""
        for part in parts:
            if part in self._offloaders and self._offloaders[part].is_offloaded:
                with span(f"onload {part}", "copy"):
                    self._offloaders[part].onload()

    def offload(self) -> dict[str, int]:
        """Offload the configured parts at the end of a phase.

        Returns:
            Released device bytes of each part.
        """
        if GRAD in self._offloaders and not self._offloaders[GRAD].is_offloaded and self._optimizer is not None:
            self._optimizer.zero_grad()  # main parameters' gradients are views of the buffers
        # Weights go last: the optimizer's state is recognized by not sharing their storages.
        freed = {part: self._offload_part(part) for part in reversed(PARTS) if part in self._offloaders}
        if freed and self._device.type == "cuda":
            torch.cuda.empty_cache()
        return freed

    def _offload_part(self, part: str) -> int:
        """Offload one part; returns its device bytes."""
        if self._offloaders[part].is_offloaded:
            return self._offloaders[part].offload()
        with span(f"offload {part}", "copy"):
            return self._offloaders[part].offload()


def _params(chunks: Iterable[Any]) -> Iterator[Tensor]:
    for chunk in chunks:
        yield from (param.data for param in chunk.parameters())


def _grads(chunks: Iterable[Any]) -> Iterator[Tensor]:
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            yield buffer.grad_data


def _optimizer_state(chunks: Iterable[Any], optimizer: Optimizer | None) -> Iterator[Tensor]:
    """Main parameters and Adam's state, without tensors in the memory of weights or gradients."""
    if optimizer is None:
        return
    chunks = list(chunks)
    model_storages = {tensor.untyped_storage()._cdata for tensor in (*_params(chunks), *_grads(chunks))}
    for part in optimizer.megatron.chained_optimizers:
        inner = getattr(part, "optimizer", None)
        if inner is None:  # the stage has no parameters of this type
            continue
        params = [param for group in inner.param_groups for param in group["params"]]
        states = [value for state in inner.state.values() for value in state.values()]
        for tensor in (*params, *states):
            if isinstance(tensor, Tensor) and tensor.dim() and tensor.untyped_storage()._cdata not in model_storages:
                yield tensor.detach()


def _storages(tensors: Iterable[Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """Distinct storages on the device, without those that numpy points into, which cannot be resized."""
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        if tensor.device.type == device.type:
            storages.setdefault(tensor.untyped_storage()._cdata, tensor.untyped_storage())
    return [storage for storage in storages.values() if storage.resizable()]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """View a storage as a flat byte tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait(device: torch.device) -> None:
    """Wait for the device: for copies, and for kernels that still read memory to be released."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
