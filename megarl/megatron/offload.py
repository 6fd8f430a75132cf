"""Moves what a role keeps on its device to host memory between the role's phases, and back, bit for bit.

Memory is emptied in place: a storage is resized to nothing and later filled again. Parameters, the buffers that they
are views of, gradients, main parameters and Adam's state therefore stay the same tensor objects, whichever wrapper of
Megatron's holds them and however they are sharded. While a part is away nothing may read it.
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
"""Weights; gradient buffers; main parameters and Adam's state, as far as they are not the weights themselves."""

CHUNK_BYTES = 2**28
"""Pinned memory is taken in pieces of this size, because torch rounds each piece up to a power of two."""


class HostMemory:
    """Host memory that storages of a device are written to one after the other; pinned where the device is a GPU.

    It grows as needed and is kept for the next time.

    Args:
        pinned: page-locked, which lets a GPU copy at full speed.
        chunk_bytes: see :data:`CHUNK_BYTES`.
    """

    def __init__(self, pinned: bool, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._pinned = pinned
        self._size = chunk_bytes
        self._chunks: list[Tensor] = []

    def write(self, data: Sequence[Tensor]) -> None:
        """Copies flat byte tensors here; the copies may still be under way."""
        while len(self._chunks) * self._size < sum(len(one) for one in data):
            self._chunks.append(torch.empty(self._size, dtype=torch.uint8, pin_memory=self._pinned))
        for here, there in self._pairs(data):
            here.copy_(there, non_blocking=True)

    def read(self, data: Sequence[Tensor]) -> None:
        """Copies back what :meth:`write` was given, in the same order and sizes; may still be under way."""
        for here, there in self._pairs(data):
            there.copy_(here, non_blocking=True)

    def _pairs(self, data: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of this memory beside the pieces of ``data`` that belong there."""
        at = 0
        for one in data:
            done = 0
            while done < len(one):
                chunk, offset = divmod(at, self._size)
                count = min(self._size - offset, len(one) - done)
                yield self._chunks[chunk][offset : offset + count], one[done : done + count]
                at, done = at + count, done + count


class Offloader:
    """Empties the storages of some tensors and fills them again.

    Args:
        tensors: asked for them each time, since an optimizer makes its state as late as its first step.
        device: where they live.
        keep: keep the contents in host memory; otherwise the storages come back filled with zeros.
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
        self._host = HostMemory(device.type == "cuda", chunk_bytes) if keep else None
        self._away: list[tuple[torch.UntypedStorage, int]] | None = None

    @property
    def is_away(self) -> bool:
        """Whether the tensors are without memory."""
        return self._away is not None

    def offload(self) -> int:
        """Empties the storages; without effect where they are empty already.

        Returns:
            Bytes that are free now, on the device.
        """
        if self._away is None:
            storages = _storages(self._tensors(), self._device)
            if self._host is not None:
                self._host.write([_bytes(storage) for storage in storages])
            _wait(self._device)
            self._away = [(storage, storage.nbytes()) for storage in storages]
            for storage in storages:
                storage.resize_(0)
        return sum(size for _, size in self._away)

    def onload(self) -> None:
        """Fills the storages again; without effect where they are full."""
        if self._away is None:
            return
        for storage, size in self._away:
            storage.resize_(size)
        contents = [_bytes(storage) for storage, _ in self._away]
        if self._host is None:
            for content in contents:
                content.zero_()
        else:
            self._host.read(contents)
        _wait(self._device)
        self._away = None


class Residence:
    """What of an engine is on its device, part by part.

    Args:
        chunks: Megatron's modules, wrapped for data parallelism if there is an optimizer.
        optimizer: None for a model that only computes.
        parts: those of :data:`PARTS` that leave between phases.
        device: of the engine.
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
    def away(self) -> tuple[str, ...]:
        """Parts that are not on the device now."""
        return tuple(part for part, offloader in self._offloaders.items() if offloader.is_away)

    def need(self, *parts: str) -> None:
        """Brings parts back to the device, where they are away."""
        for part in parts:
            if part in self._offloaders and self._offloaders[part].is_away:
                with span(f"onload {part}", "copy"):
                    self._offloaders[part].onload()

    def rest(self) -> dict[str, int]:
        """Ends a phase: the parts that are to leave do so.

        Returns:
            Bytes of each of them, now free on the device.
        """
        if GRAD in self._offloaders and not self._offloaders[GRAD].is_away and self._optimizer is not None:
            self._optimizer.zero_grad()  # main parameters' gradients are views of the buffers
        # Last come the weights: what the optimizer shares with them is told apart by their storages.
        freed = {part: self._leave(part) for part in reversed(PARTS) if part in self._offloaders}
        if freed and self._device.type == "cuda":
            torch.cuda.empty_cache()
        return freed

    def _leave(self, part: str) -> int:
        """Has a part leave the device; returns the bytes that it had there."""
        if self._offloaders[part].is_away:
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
    """Main parameters and Adam's state, without what lies in the memory of weights or gradients."""
    if optimizer is None:
        return
    chunks = list(chunks)
    other = {tensor.untyped_storage()._cdata for tensor in (*_params(chunks), *_grads(chunks))}
    for part in optimizer.megatron.chained_optimizers:
        inner = getattr(part, "optimizer", None)
        if inner is None:  # of a stage without parameters of this kind
            continue
        params = [param for group in inner.param_groups for param in group["params"]]
        states = [value for state in inner.state.values() for value in state.values()]
        for tensor in (*params, *states):
            if isinstance(tensor, Tensor) and tensor.dim() and tensor.untyped_storage()._cdata not in other:
                yield tensor.detach()


def _storages(tensors: Iterable[Tensor], device: torch.device) -> list[torch.UntypedStorage]:
    """Each storage on the device once, though views share it; without those that numpy points into, which must stay."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        if tensor.device.type == device.type:
            found.setdefault(tensor.untyped_storage()._cdata, tensor.untyped_storage())
    return [storage for storage in found.values() if storage.resizable()]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """A storage as a flat tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _wait(device: torch.device) -> None:
    """Until the device is done: with copies, and with whatever still reads what is to be freed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
