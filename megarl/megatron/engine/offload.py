"""Offload and onload: moves weights, gradients and optimizer state to host memory between phases, and back, bit for
bit.

A storage is resized to zero in place and filled again later. Parameters, their buffers, gradients, main parameters and
Adam's state therefore stay the same tensor objects, whichever Megatron wrapper holds them and however they are sharded.
Nothing may read an offloaded part on the device; :meth:`OffloadManager.memory` gives its host memory. A part that is
unchanged since its last copy to the host is emptied without another copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megarl.megatron.engine.optimizer import MOMENTS, Optimizer
from megarl.megatron.runtime.memory import HostBuffer, HostCopy, TensorMemory, aligned, storage_bytes
from megarl.tracing import span

PARAM, GRAD, OPTIMIZER = "param", "grad", "optimizer"
PARTS = (PARAM, GRAD, OPTIMIZER)
"""Weights; gradient buffers; main parameters and Adam's state, except tensors that share memory with the weights."""


class Offloader:
    """Empties the storages of some tensors and fills them again.

    Args:
        tensors: called at each offload, because an optimizer creates its state in its first step.
        keep: keep the contents in host memory; otherwise the storages return filled with zeros.

    Attributes:
        is_offloaded: whether the tensors have no memory on the device now.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], device: torch.device, *, keep: bool = True) -> None:
        self.host = HostBuffer(device)
        self.is_offloaded = False
        self._tensors = tensors
        self._device = device
        self._keep = keep
        # Storages of the last copy, where they are in host memory, and whether they have not changed since.
        self._storages: list[torch.UntypedStorage] = []
        self._copy = HostCopy(self.host, [], [])
        self._is_copied = False
        self._index_of: dict[int, int] = {}
        self._is_pinned: Callable[[], bool] = lambda: False

    def offload(self) -> int:
        """Empty the storages, and return the released device bytes; no effect if they are empty."""
        if not self.is_offloaded:
            self._copy_to_host()
            self._empty()
        sizes = zip(self._storages, self._copy.sizes, strict=True)
        return sum(size for storage, size in sizes if storage.resizable())

    def onload(self) -> None:
        """Fill the storages again; no effect if they are full."""
        if self.is_offloaded:
            self._fill(self._copy)

    def mark_changed(self) -> None:
        """Note that the contents on the device differ from the last copy; the next offload copies them."""
        if not self.is_offloaded:
            self._is_copied = False

    def pin_until_saved(self, is_pinned: Callable[[], bool]) -> None:
        """Keep the host memory unchanged until ``is_pinned`` is false; a copy before then goes to other memory."""
        self._is_pinned = is_pinned

    def memory(self, tensor: Tensor) -> tuple[Tensor, ...] | None:
        """Return a contiguous tensor's host memory, flat, one piece per chunk; None unless its storage is emptied."""
        index = self._index_of.get(tensor.untyped_storage()._cdata)
        if index is None or not self.is_offloaded:
            return None
        width = tensor.element_size()
        offset = self._copy.offsets[index] + int(tensor.storage_offset()) * width
        pieces = self._copy.buffer.pieces(offset, tensor.numel() * width)
        return tuple(piece.view(tensor.dtype) for piece in pieces)

    def zeros_like(self, tensor: Tensor) -> Tensor:
        """Allocate zeros that join the other tensors, where they are: on the device or in host memory."""
        if not self.is_offloaded:
            return torch.zeros_like(tensor)
        new = torch.empty_like(tensor)
        storage, (host, offsets, sizes) = new.untyped_storage(), self._copy
        offset = aligned(offsets[-1] + sizes[-1]) if offsets else 0
        host.reserve(offset + storage.nbytes())
        for piece in host.pieces(offset, storage.nbytes()):
            piece.zero_()
        offsets.append(offset)
        sizes.append(storage.nbytes())
        self._index_of[storage._cdata] = len(self._storages)
        self._storages.append(storage)
        storage.resize_(0)
        return new

    def copy(self, reuse: HostCopy | None = None) -> HostCopy:
        """Copy the contents from the device to host memory, new or an earlier copy's, for :meth:`swapped`."""
        buffer = HostBuffer(self._device) if reuse is None else reuse.buffer
        copy = _copied(_storages(self._tensors(), self._device), buffer)
        self._wait()
        return copy

    @contextmanager
    def swapped(self, other: HostCopy) -> Iterator[None]:
        """Swap in the contents of ``other`` within the context; restores the previous contents bit for bit.

        Raises:
            ValueError: ``other`` has storages of other sizes.
        """
        was_offloaded = self.is_offloaded
        if not was_offloaded:
            self._copy_to_host()
        if other.sizes != self._copy.sizes:
            raise ValueError(f"a copy of {sum(other.sizes)} bytes, the model has {sum(self._copy.sizes)}: other models")
        try:
            self._fill(other)
            yield
        finally:
            if was_offloaded:
                self._wait()
                self._empty()
            else:
                self._fill(self._copy)

    def _copy_to_host(self) -> None:
        """Copy the contents to host memory, unless the last copy has them."""
        storages = _storages(self._tensors(), self._device)
        is_same = [storage._cdata for storage in storages] == list(self._index_of)
        self._storages = storages
        self._index_of = {storage._cdata: index for index, storage in enumerate(storages)}
        if not self._keep:
            self._copy = HostCopy(self.host, [0] * len(storages), [storage.nbytes() for storage in storages])
        elif not (self._is_copied and is_same):
            if self._is_pinned():
                self.host = HostBuffer(self._device)  # the reader frees the other one
            self._copy = _copied(storages, self.host)
            self._is_pinned = lambda: False
        self._is_copied = True
        self._wait()

    def _empty(self) -> None:
        for storage in self._storages:
            if storage.resizable():
                storage.resize_(0)
        self.is_offloaded = True

    def _fill(self, copy: HostCopy) -> None:
        """Give the storages their memory and the contents of a copy."""
        for storage, size in zip(self._storages, copy.sizes, strict=True):
            if storage.nbytes() != size:
                storage.resize_(size)
        if self._keep:
            copy.write_to(self._storages)
        else:
            for storage in self._storages:
                storage_bytes(storage).zero_()
        self._wait()
        self.is_offloaded = False

    def _wait(self) -> None:
        """Wait for the device: for copies, and for kernels that still read memory to be released."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class OffloadManager:
    """Offloads an engine's parts and onloads them on demand.

    Attributes:
        weights: their offloader, which copies and swaps them; used whether or not they are offloaded.
    """

    def __init__(
        self, chunks: Sequence[Any], optimizer: Optimizer | None, parts: Collection[str], device: torch.device
    ) -> None:
        tensors: dict[str, Callable[[], Iterable[Tensor]]] = {
            PARAM: lambda: _params(chunks),
            GRAD: lambda: _grads(chunks),
            OPTIMIZER: lambda: _optimizer_state(chunks, optimizer),
        }
        self._optimizer = optimizer
        offloaders = {part: Offloader(tensors[part], device, keep=part != GRAD) for part in PARTS}
        self.weights = offloaders[PARAM]
        self._offloaders = {
            part: offloader
            for part, offloader in offloaders.items()
            if part in parts and (part == PARAM or optimizer is not None)
        }

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Parts that are in host memory now."""
        return tuple(part for part, offloader in self._offloaders.items() if offloader.is_offloaded)

    def pending_bytes(self) -> int:
        """Return the device bytes that the first optimizer step adds permanently: Adam's moments, unless offloaded."""
        if self._optimizer is None or OPTIMIZER in self._offloaders:
            return 0
        return sum(
            param.numel() * param.element_size()
            for inner in self._optimizer.inner_optimizers()
            for group in inner.param_groups
            for param in group["params"]
            for moment in MOMENTS
            if moment not in inner.state.get(param, {})
        )

    def onload(self, *parts: str) -> None:
        """Bring parts back to the device, if they are offloaded."""
        for part in parts:
            if part in self._offloaders and self._offloaders[part].is_offloaded:
                with span(f"onload {part}", "copy"):
                    self._offloaders[part].onload()

    def offload(self, *, return_cached: bool = True) -> dict[str, int]:
        """Offload the configured parts at the end of a phase, and return cached device memory to the driver.

        Args:
            return_cached: call ``torch.cuda.empty_cache``. Other processes of the device, such as a rollout engine that
                wakes, can only use the driver's memory.
        """
        if GRAD in self._offloaders and not self._offloaders[GRAD].is_offloaded and self._optimizer is not None:
            self._optimizer.megatron.zero_grad()  # main parameters' gradients are views of the buffers
        # Weights go last: the optimizer's state is recognized by not sharing their storages.
        freed = {part: self._offload_part(part) for part in reversed(PARTS) if part in self._offloaders}
        if return_cached:
            torch.cuda.empty_cache()  # no effect in a process that does not use a GPU
        return freed

    def mark_changed(self, *parts: str) -> None:
        """Note that parts have changed on the device, so that the next offload copies them."""
        for part in parts:
            offloader = self.weights if part == PARAM else self._offloaders.get(part)
            if offloader is not None:
                offloader.mark_changed()

    def memory(self, tensor: Tensor) -> TensorMemory:
        """Return a weight's or optimizer tensor's current memory; onload brings values written there."""
        for part in (PARAM, OPTIMIZER):
            pieces = self._offloaders[part].memory(tensor) if part in self._offloaders else None
            if pieces is not None:
                return TensorMemory(pieces, True)
        return TensorMemory((tensor.detach().view(-1),), False)

    def optimizer_zeros_like(self, tensor: Tensor) -> Tensor:
        """Allocate a tensor of the optimizer's state, where the state is now."""
        if OPTIMIZER in self._offloaders:
            return self._offloaders[OPTIMIZER].zeros_like(tensor)
        return torch.zeros_like(tensor)

    def pin_until_saved(self, is_pinned: Callable[[], bool]) -> None:
        """Keep the host memory of all offloaded parts unchanged until ``is_pinned`` is false, for a pending save."""
        for offloader in self._offloaders.values():
            if offloader.is_offloaded:
                offloader.pin_until_saved(is_pinned)

    def _offload_part(self, part: str) -> int:
        offloader = self._offloaders[part]
        with nullcontext() if offloader.is_offloaded else span(f"offload {part}", "copy"):
            return offloader.offload()


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
    for inner in optimizer.inner_optimizers():
        params = [param for group in inner.param_groups for param in group["params"]]
        states = [value for state in inner.state.values() for value in state.values()]
        for tensor in (*params, *states):
            if isinstance(tensor, Tensor) and tensor.dim() and tensor.untyped_storage()._cdata not in model_storages:
                yield tensor.detach()


def _storages(tensors: Iterable[Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """Distinct storages on the device."""
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        if tensor.device.type == device.type:
            storages.setdefault(tensor.untyped_storage()._cdata, tensor.untyped_storage())
    return list(storages.values())


def _copied(storages: Sequence[torch.UntypedStorage], buffer: HostBuffer) -> HostCopy:
    """Copy storages into a buffer; may be asynchronous."""
    offsets = buffer.write([storage_bytes(storage) for storage in storages])
    return HostCopy(buffer, offsets, [storage.nbytes() for storage in storages])
