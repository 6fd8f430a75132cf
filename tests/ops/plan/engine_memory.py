"""Measured memory of an engine on one rank: bytes of its states, and peak of the tensors that autograd saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from alive import Alive
from engine_cases import Setup, engine, micro_batches, policy_loss, value_loss
from support.distributed import Place
from tiny_models import TEMPERATURE, Row
from torch import Tensor

from megarl.megatron import MegatronEngine, OutputOptions


class Measured(NamedTuple):
    """Measured bytes of one rank.

    Attributes:
        parameters: weight elements.
        weights: storages of the weights.
        gradients: gradient buffers.
        main_weights: the optimizer's copies of the weights.
        moments: Adam's means.
        saved: peak of the tensors saved for the backward, each storage once, without weights.
        at_peak: saved tensors at the peak: counts by (shape, dtype).
    """

    parameters: int
    weights: int
    gradients: int
    main_weights: int
    moments: int
    saved: int
    at_peak: Counter[tuple[tuple[int, ...], str]]


class SavedTensors:
    """Tracks the storages that autograd keeps alive; each storage counts once while any saved tensor uses it.

    Args:
        ignored: tensors whose storages do not count.
    """

    def __init__(self, ignored: Iterable[Tensor]) -> None:
        self._known = {tensor.untyped_storage()._cdata for tensor in ignored}
        self._alive: dict[int, list[Any]] = {}
        self.peak = 0
        self.at_peak: Counter[tuple[tuple[int, ...], str]] = Counter()

    @contextmanager
    def watching(self) -> Iterator[SavedTensors]:
        """Track all tensors saved in this scope."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved_tensor: saved_tensor.tensor):
            yield self

    def _pack(self, tensor: Tensor) -> _SavedTensor:
        return _SavedTensor(tensor.detach(), self)

    def saved(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        self._alive.setdefault(storage._cdata, [storage, 0, tensor.shape, tensor.dtype])[1] += 1
        # recomputation empties storages in place, so sizes are read again
        total = sum(entry[0].nbytes() for entry in self._alive.values())
        if total > self.peak:
            self.peak = total
            self.at_peak = Counter(
                ((entry[0].nbytes(), *entry[2]), str(entry[3]).removeprefix("torch."))
                for entry in self._alive.values()
                if entry[0].nbytes()
            )

    def freed(self, tensor: Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        if key in self._alive:
            self._alive[key][1] -= 1
            if not self._alive[key][1]:
                del self._alive[key]


class _SavedTensor:
    """A saved tensor, detached from its graph, which would keep itself alive."""

    def __init__(self, tensor: Tensor, owner: SavedTensors) -> None:
        self.tensor, self._owner = tensor, owner
        owner.saved(tensor)

    def __del__(self) -> None:
        self._owner.freed(self.tensor)


def measure(place: Place, path: Path, setup: Setup, rows: list[Row]) -> Measured:
    """Measure one optimizer step of an engine on a CPU."""
    with engine(place, path, setup) as engine_under_test:
        mine = micro_batches(rows, setup, engine_under_test.runtime.coordinate.dp, setup.layout.dp)
        options = OutputOptions() if setup.value_head else OutputOptions(TEMPERATURE, with_entropy=True)
        params = [param for chunk in engine_under_test.chunks for param in chunk.parameters()]
        with SavedTensors(params).watching() as saved:
            engine_under_test.forward_backward(mine, value_loss if setup.value_head else policy_loss, options)
        engine_under_test.optimizer_step()
        return measured(engine_under_test, saved)


def peaks(place: Place, path: Path, setup: Setup, rows: list[Row]) -> tuple[int, int]:
    """Return the peak memory without weights and gradients, in a forward pass and in an update."""
    with engine(place, path, setup) as engine_under_test:
        mine = micro_batches(rows, setup, engine_under_test.runtime.coordinate.dp, setup.layout.dp)
        options = OutputOptions(TEMPERATURE, with_entropy=True)
        states = [param.data for chunk in engine_under_test.chunks for param in chunk.parameters()] + _gradients(
            engine_under_test
        )
        with Alive(states) as computes:
            engine_under_test.forward(mine, options)
        with Alive(states) as updates:
            engine_under_test.forward_backward(mine, policy_loss, options)
        return computes.peak, updates.peak


def hidden_peak(place: Place, path: Path, setup: Setup, rows: list[Row]) -> int:
    """Return the peak memory without weights and gradients in a pass for final hidden states."""
    with engine(place, path, setup) as engine_under_test:
        mine = micro_batches(rows, setup, engine_under_test.runtime.coordinate.dp, setup.layout.dp)
        params = [param.data for chunk in engine_under_test.chunks for param in chunk.parameters()]
        with Alive(params + _gradients(engine_under_test)) as computes:
            engine_under_test.hidden(mine[:1])  # the results of more, in host memory, would count here
        return computes.peak


def measured(engine_under_test: MegatronEngine, saved: SavedTensors) -> Measured:
    params = [param.data for chunk in engine_under_test.chunks for param in chunk.parameters()]
    grads = _gradients(engine_under_test)
    main, moments = _optimizer_tensors(engine_under_test)
    weights = _storages(params)
    return Measured(
        parameters=sum(param.numel() for param in params),
        weights=sum(weights.values()),
        gradients=sum(_storages(grads).values()),
        main_weights=sum(size for key, size in _storages(main).items() if key not in weights),
        moments=sum(_storages(moments).values()),
        saved=saved.peak,
        at_peak=saved.at_peak,
    )


def _gradients(engine_under_test: MegatronEngine) -> list[Tensor]:
    return [b.grad_data for chunk in engine_under_test.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def _optimizer_tensors(engine_under_test: MegatronEngine) -> tuple[list[Tensor], list[Tensor]]:
    main, moments = [], []
    assert engine_under_test.optimizer is not None
    for part in engine_under_test.optimizer.megatron.chained_optimizers:
        inner = getattr(part, "optimizer", None)
        if inner is None:
            continue
        main += [param for group in inner.param_groups for param in group["params"]]
        values = (value for state in inner.state.values() for value in state.values())
        moments += [value for value in values if isinstance(value, Tensor) and value.dim()]
    return main, moments


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage, by its identity."""
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
