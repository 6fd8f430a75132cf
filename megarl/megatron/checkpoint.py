"""Saves and restores one role: weights, optimizer, schedule and the random states of every rank, in any layout.

::

    <path>/.metadata, __<rank>_0.distcp     weights and optimizer state by Hugging Face name and rectangle
    <path>/state.json                       steps taken, number format, layout that saved
    <path>/random_<rank>.safetensors        generators of each rank

Every rank writes and reads its own part, its shard of the optimizer's state included, which is cut over data- and
context-parallel ranks: nothing is gathered. In the layout that saved, a restored role goes on bit for bit; in another
one, with the same numbers in fresh generators.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

import megarl
from megarl.errors import CheckpointError
from megarl.megatron import cuda_on_cpu
from megarl.megatron.checkpoint_blocks import blocks_of_range
from megarl.megatron.checkpoint_format import Item, items_of, read_index, read_items, tensor_shapes, write_items
from megarl.megatron.engine import MegatronEngine
from megarl.megatron.offload import OPTIMIZER, PARAM
from megarl.megatron.optimizer_state import (
    MASTER,
    MOMENTS,
    StateShard,
    check_steps,
    is_sharded,
    set_steps,
    state_shards,
)
from megarl.megatron.random_state import load_random_state, save_random_state
from megarl.megatron.runtime import Runtime
from megarl.models import LocalParam, ParallelLayout

STATE_FILE = "state.json"
FORMAT = 1
WEIGHT = "weight"

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True)
class RoleState:
    """Contents of ``state.json``."""

    dtype: str
    """Number format of the weights, such as ``float32``."""
    steps: int | None
    """Optimizer steps taken, on which the learning rate depends; None where no optimizer was saved."""
    layout: ParallelLayout
    """Layout that saved."""
    device: str
    """Kind of device that the random states are of: ``cpu`` or ``cuda``."""
    skipped_in_a_row: int = 0
    """Optimizer steps skipped since the last one taken."""
    megarl_version: str = megarl.__version__


def save_sharded(engine: MegatronEngine, path: str | Path) -> None:
    """Saves the engine; all ranks call this together.

    Args:
        engine: after a finished optimizer step.
        path: folder on storage that all ranks share; made if need be, and must be empty.

    Raises:
        CheckpointError: on every rank, if any of them failed; says which and why. What was written stays.
    """
    folder, runtime = Path(path), engine.runtime
    optimizer = engine.optimizer
    engine.residence.need(PARAM, OPTIMIZER)
    state = RoleState(
        dtype=_dtype_name(engine),
        steps=None if optimizer is None else optimizer.steps,
        layout=runtime.layout,
        device=runtime.device.type,
        skipped_in_a_row=0 if optimizer is None else optimizer.skipped_in_a_row,
    )

    def prepare() -> None:
        if optimizer is not None:
            check_steps(optimizer)
        folder.mkdir(parents=True, exist_ok=True)

    def write_own() -> None:
        with cuda_on_cpu.active():
            save_random_state(folder / _random_file(runtime.rank), runtime.device)
        if runtime.rank == 0:
            _write_state(folder, state)

    _together(runtime, prepare, f"saving to {folder}")
    _together(runtime, lambda: _check_empty(folder), f"saving to {folder}")
    _together(runtime, write_own, f"saving to {folder}")
    items = _together(runtime, lambda: list(_saved_items(engine)), f"saving to {folder}")
    write_items(folder, items)


@torch.no_grad()
def load_sharded(engine: MegatronEngine, path: str | Path) -> None:
    """Restores what :func:`save_sharded` wrote, in any layout; all ranks call this together.

    An engine without optimizer takes the weights alone.

    Args:
        engine: a new one of the same model; what it holds is overwritten.
        path: the folder.

    Raises:
        CheckpointError: on every rank, if on any of them something is missing, malformed, truncated, or of another
            model; names what. The engine is then not usable.
    """
    folder, runtime = Path(path), engine.runtime
    engine.residence.need(PARAM, OPTIMIZER)

    def read_own() -> tuple[RoleState, Any]:
        state, index = _read_state(folder), read_index(folder)
        _check_fits(engine, folder, state, tensor_shapes(index))
        return state, index

    state, index = _together(runtime, read_own, f"loading {folder}")
    items = _together(runtime, lambda: list(_wanted_items(engine)), f"loading {folder}")
    read_items(folder, index, items)
    if engine.optimizer is not None:
        assert state.steps is not None
        set_steps(engine.optimizer, state.steps)
        engine.optimizer.skipped_in_a_row = state.skipped_in_a_row

    def restore_random() -> None:
        with cuda_on_cpu.active():
            load_random_state(folder / _random_file(runtime.rank), runtime.device)

    if (state.layout, state.device) == (runtime.layout, runtime.device.type):
        _together(runtime, restore_random, f"loading {folder}")
    elif runtime.rank == 0:
        logger.warning(
            "%s was saved by %s on %s: generators start anew on %s on %s",
            folder,
            state.layout.describe(),
            state.device,
            runtime.layout.describe(),
            runtime.device.type,
        )


def _saved_items(engine: MegatronEngine) -> Iterator[Item]:
    """What this rank contributes: each element of each tensor comes from one rank."""
    contributions = engine.weight_map.contributions(engine.runtime.layout, engine.runtime.rank)
    params = engine.weights.parameters()
    shapes = engine.weight_map.hf_shapes()
    states: Mapping[str, StateShard] = {}
    if engine.optimizer is not None:
        states = state_shards(engine.optimizer, params)
    for number, (param, replica, replicas) in enumerate(contributions):
        # Replicas take turns, so that each writes its share.
        mine = number % replicas == replica
        if mine:
            yield from _weight_items(param, params[param.name], shapes)
        if param.name in states and engine.optimizer is not None and (mine or is_sharded(engine.optimizer)):
            yield from _state_items(param, states[param.name], shapes)


def _wanted_items(engine: MegatronEngine) -> Iterator[Item]:
    """The memory of everything this rank holds, set to zero where a checkpoint has nothing: vocabulary padding."""
    params, shapes = engine.weights.parameters(), engine.weight_map.hf_shapes()
    states: Mapping[str, StateShard] = {}
    if engine.optimizer is not None:
        states = state_shards(engine.optimizer, params)
    for param in engine.weight_map.megatron_params(engine.runtime.layout, engine.runtime.rank):
        params[param.name].detach().zero_()
        yield from _weight_items(param, params[param.name], shapes)
        if param.name in states:
            for tensor in states[param.name].tensors.values():
                tensor.zero_()
            yield from _state_items(param, states[param.name], shapes)


def _weight_items(param: LocalParam, weight: nn.Parameter, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Item]:
    flat = weight.detach().view(-1)
    yield from items_of(WEIGHT, blocks_of_range(param, 0, flat.numel()), shapes, flat)


def _state_items(param: LocalParam, shard: StateShard, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Item]:
    for kind, tensor in shard.tensors.items():
        yield from items_of(kind, blocks_of_range(param, shard.start, shard.stop), shapes, tensor)


def _check_fits(
    engine: MegatronEngine, folder: Path, state: RoleState, found: Mapping[str, Mapping[str, tuple[int, ...]]]
) -> None:
    """Refuses a checkpoint of another model, another number format, or without the optimizer's state."""
    kinds = [WEIGHT]
    if state.dtype != _dtype_name(engine):
        raise CheckpointError(
            f"checkpoint {folder} has dtype={state.dtype}, this run dtype={_dtype_name(engine)}: they must agree"
        )
    if engine.optimizer is not None:
        if state.steps is None:
            raise CheckpointError(f"checkpoint {folder} has no optimizer state: a model that only computes saved it")
        kinds += [*MOMENTS] if engine.options.dtype is torch.float32 else [*MOMENTS, MASTER]
    whole = engine.weight_map.hf_shapes()
    trained = {name: shape for name, shape in whole.items() if not engine.weight_map.is_float32(name)}
    for kind in kinds:
        expected = whole if kind == WEIGHT else trained
        shapes = found.get(kind, {})
        for name in sorted(expected.keys() | shapes.keys()):
            if expected.get(name) != shapes.get(name):
                saved, own = (_shape(table.get(name)) for table in (shapes, expected))
                raise CheckpointError(
                    f"checkpoint {folder} is of another model: {kind} of '{name}' {saved} in the checkpoint, {own} here"
                )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "is absent" if shape is None else f"has shape {list(shape)}"


def _check_empty(folder: Path) -> None:
    if any(folder.iterdir()):
        raise CheckpointError(f"{folder} is not empty")


def _write_state(folder: Path, state: RoleState) -> None:
    with open(folder / STATE_FILE, "w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, **asdict(state), "layout": state.layout._asdict()}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _read_state(folder: Path) -> RoleState:
    path = folder / STATE_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise CheckpointError(f"{path}: format={document['format']!r}, this megarl reads {FORMAT}")
        steps = document["steps"]
        return RoleState(
            dtype=str(document["dtype"]),
            steps=None if steps is None else int(steps),
            layout=ParallelLayout(**document["layout"]),
            device=str(document["device"]),
            skipped_in_a_row=int(document.get("skipped_in_a_row", 0)),
            megarl_version=str(document["megarl_version"]),
        )
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: not a checkpoint of a role") from None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is malformed: {error!r}") from error


def _dtype_name(engine: MegatronEngine) -> str:
    return str(engine.options.dtype).removeprefix("torch.")


def _random_file(rank: int) -> str:
    return f"random_{rank:05d}.safetensors"


def _together(runtime: Runtime, action: Callable[[], _T], doing: str) -> _T:
    """Runs ``action`` on every rank; if it raises on any, all raise, and none waits for another in vain."""
    failure, result = None, None
    try:
        result = action()
    except CheckpointError as error:
        failure = str(error)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    failures: list[str | None] = [None] * runtime.layout.world_size
    dist.all_gather_object(failures, failure)
    for rank, text in enumerate(failures):
        if text is not None:
            raise CheckpointError(f"{doing} failed on rank {rank}: {text}")
    return result  # type: ignore[return-value]  # no failure: the action has returned
