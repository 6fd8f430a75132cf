"""What an engine of one rank really holds: bytes of its states, and what its backward pass keeps alive at the worst."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from alive import Alive
from distributed import Place
from engine_cases import Setup, engine, micro_batches, policy_loss, value_loss
from tiny_models import TEMPERATURE, Row
from torch import Tensor

from megarl.megatron import MegatronEngine, OutputOptions


class Measured(NamedTuple):
    """Bytes of one rank.

    Attributes:
        parameters: elements of the weights.
        weights: of the storages that weights lie in.
        gradients: of gradient buffers.
        main_weights: of the optimizer's own copies.
        moments: of Adam's means.
        saved: kept for the backward at the worst moment, each storage once, weights left out.
        at_peak: of what that consists, as (shape, type) with how many there were of each.
    """

    parameters: int
    weights: int
    gradients: int
    main_weights: int
    moments: int
    saved: int
    at_peak: Counter[tuple[tuple[int, ...], str]]


class SavedTensors:
    """Follows what autograd keeps alive; a storage counts once, as long as anything of it is kept.

    Args:
        known: tensors whose storages do not count.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._alive: dict[int, list[Any]] = {}
        self.peak = 0
        self.at_peak: Counter[tuple[tuple[int, ...], str]] = Counter()

    @contextmanager
    def watching(self) -> Iterator[SavedTensors]:
        """Scope in which everything that is saved is followed."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor):
            yield self

    def _pack(self, tensor: Tensor) -> _Kept:
        return _Kept(tensor.detach(), self)

    def taken(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        self._alive.setdefault(storage._cdata, [storage, 0, tensor.shape, tensor.dtype])[1] += 1
        # recomputation empties storages in place, so sizes are looked at anew
        total = sum(entry[0].nbytes() for entry in self._alive.values())
        if total > self.peak:
            self.peak = total
            self.at_peak = Counter(
                ((entry[0].nbytes(), *entry[2]), str(entry[3]).removeprefix("torch."))
                for entry in self._alive.values()
                if entry[0].nbytes()
            )

    def let_go(self, tensor: Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        if key in self._alive:
            self._alive[key][1] -= 1
            if not self._alive[key][1]:
                del self._alive[key]


class _Kept:
    """A saved tensor; without the graph that it came from, which would keep itself alive."""

    def __init__(self, tensor: Tensor, owner: SavedTensors) -> None:
        self.tensor, self._owner = tensor, owner
        owner.taken(tensor)

    def __del__(self) -> None:
        self._owner.let_go(self.tensor)


def measure(place: Place, path: Path, setup: Setup, rows: list[Row]) -> Measured:
    """One optimizer step of an engine on a CPU."""
    with engine(place, path, setup) as built:
        mine = micro_batches(rows, setup, built.runtime.coordinate.dp, setup.layout.dp)
        options = OutputOptions() if setup.value_head else OutputOptions(TEMPERATURE, with_entropy=True)
        params = [param for chunk in built.chunks for param in chunk.parameters()]
        with SavedTensors(params).watching() as saved:
            built.forward_backward(mine, value_loss if setup.value_head else policy_loss, options)
        built.optimizer_step()
        return measured(built, saved)


def peaks(place: Place, path: Path, setup: Setup, rows: list[Row]) -> tuple[int, int]:
    """The most that is alive besides weights and gradients, in a pass that computes only and in an update."""
    with engine(place, path, setup) as built:
        mine = micro_batches(rows, setup, built.runtime.coordinate.dp, setup.layout.dp)
        options = OutputOptions(TEMPERATURE, with_entropy=True)
        given = [param.data for chunk in built.chunks for param in chunk.parameters()] + _gradients(built)
        with Alive(given) as computes:
            built.forward(mine, options)
        with Alive(given) as updates:
            built.forward_backward(mine, policy_loss, options)
        return computes.peak, updates.peak


def measured(built: MegatronEngine, saved: SavedTensors) -> Measured:
    params = [param.data for chunk in built.chunks for param in chunk.parameters()]
    grads = _gradients(built)
    main, moments = _optimizer_tensors(built)
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


def _gradients(built: MegatronEngine) -> list[Tensor]:
    return [b.grad_data for chunk in built.chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def _optimizer_tensors(built: MegatronEngine) -> tuple[list[Tensor], list[Tensor]]:
    main, moments = [], []
    assert built.optimizer is not None
    for part in built.optimizer.megatron.chained_optimizers:
        inner = getattr(part, "optimizer", None)
        if inner is None:
            continue
        main += [param for group in inner.param_groups for param in group["params"]]
        values = (value for state in inner.state.values() for value in state.values())
        moments += [value for value in values if isinstance(value, Tensor) and value.dim()]
    return main, moments


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of each storage, by its identity."""
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
