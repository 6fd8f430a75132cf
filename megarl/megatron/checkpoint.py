"""Saves and restores one role: weights, optimizer, schedule and the random states of every rank, in any layout.

::

    <path>/.metadata, __<rank>_0.distcp     weights and optimizer state by Hugging Face name and rectangle
    <path>/state.json                       steps taken, number format, layout that saved, what was saved, versions
    <path>/random_<rank>.safetensors        generators of each rank
    <path>/huggingface/                     config and tokenizer of the model; where asked for, its weights as others
                                            read them

Every rank writes and reads its own part, its shard of the optimizer's state included, which is cut over data- and
context-parallel ranks: nothing is gathered. In the layout that saved, a restored role goes on bit for bit; in another
one, with the same numbers in fresh generators.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megarl.checkpoint_index import read_index
from megarl.errors import CheckpointError
from megarl.megatron import cuda_on_cpu
from megarl.megatron.checkpoint_blocks import blocks_of_range
from megarl.megatron.checkpoint_export import HF_FOLDER, export_beside
from megarl.megatron.checkpoint_format import Item, ItemWriter, items_of, read_items, tensor_shapes
from megarl.megatron.checkpoint_save import PendingSave
from megarl.megatron.checkpoint_snapshot import HostSnapshot
from megarl.megatron.checkpoint_state import (
    EXTRA,
    HF_MODEL,
    MODEL,
    OPTIMIZER_STATE,
    RESUMABLE,
    RoleState,
    read_state,
    write_state,
)
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
from megarl.megatron.together import together
from megarl.models import LocalParam
from megarl.models.companions import write_companions

WEIGHT = "weight"

logger = logging.getLogger(__name__)


def save_sharded(engine: MegatronEngine, path: str | Path, contents: Collection[str] = RESUMABLE) -> None:
    """Saves the engine and returns when all is written; all ranks call this together.

    Args:
        engine: after a finished optimizer step.
        path: folder on storage that all ranks share; made if need be, and must be empty.
        contents: see :func:`begin_save`.

    Raises:
        CheckpointError: on every rank, if any of them failed; says which and why. What was written stays.
    """
    begin_save(engine, path, contents).finish()


def begin_save(
    engine: MegatronEngine,
    path: str | Path,
    contents: Collection[str] = RESUMABLE,
    *,
    snapshot: HostSnapshot | None = None,
    copy_from: str | Path | None = None,
) -> PendingSave:
    """Begins a save, which :meth:`PendingSave.finish` ends; all ranks call both together, and none in between.

    Args:
        engine: after a finished optimizer step.
        path: folder on storage that all ranks share; made if need be, and must be empty.
        contents: what to save, of :data:`~megarl.megatron.checkpoint_state.CONTENTS`. The count of steps, on which
            the learning rate depends, goes with the optimizer. The Hugging Face export is written before this returns.
        snapshot: memory to copy the state to, so that the engine may train on while a thread writes; None writes here
            and now.
        copy_from: folder whose tokenizer the Hugging Face export gets.

    Raises:
        CheckpointError: on every rank, if any of them cannot begin; says which and why. What was written stays.
    """
    folder, runtime, optimizer = Path(path), engine.runtime, engine.optimizer
    doing = f"saving to {folder}"
    engine.residence.need(PARAM, OPTIMIZER)
    has_optimizer = OPTIMIZER_STATE in contents and optimizer is not None
    state = RoleState(
        dtype=_dtype_name(engine),
        steps=optimizer.steps if has_optimizer and optimizer is not None else None,
        layout=runtime.layout,
        device=runtime.device.type,
        skipped_in_a_row=0 if optimizer is None else optimizer.skipped_in_a_row,
        contents=tuple(name for name in contents if name != OPTIMIZER_STATE or has_optimizer),
    )

    def prepare() -> None:
        if optimizer is not None:
            check_steps(optimizer)
        folder.mkdir(parents=True, exist_ok=True)

    together(runtime, prepare, doing)
    together(runtime, partial(_check_empty, folder), doing)
    files = together(runtime, partial(_write_own, engine, folder, state, copy_from), doing)
    if HF_MODEL in contents:
        files |= export_beside(engine, folder, copy_from)
    writer = None
    if MODEL in contents:
        items = together(runtime, lambda: list(_saved_items(engine, has_optimizer)), doing)
        if snapshot is not None:
            items = together(runtime, lambda: snapshot.take(items), doing)
        writer = ItemWriter(runtime, folder, items)
        writer.plan()
    return PendingSave(runtime, folder, writer, files, in_background=snapshot is not None)


def _write_own(engine: MegatronEngine, folder: Path, state: RoleState, copy_from: str | Path | None) -> set[str]:
    """Writes this rank's small files, as they are now; returns their names."""
    runtime, names = engine.runtime, set()
    if EXTRA in state.contents:
        names.add(_random_file(runtime.rank))
        with cuda_on_cpu.active():
            save_random_state(folder / _random_file(runtime.rank), runtime.device)
    if runtime.rank == 0:
        names.add(write_state(folder, state))
        if HF_MODEL not in state.contents:
            names |= write_companions(folder / HF_FOLDER, engine.model.raw, copy_from)
    return names


@torch.no_grad()
def load_sharded(engine: MegatronEngine, path: str | Path, contents: Collection[str] = RESUMABLE) -> None:
    """Restores what :func:`save_sharded` wrote, in any layout; all ranks call this together.

    An engine without optimizer takes the weights alone.

    Args:
        engine: a new one of the same model; what it holds is overwritten.
        path: the folder.
        contents: what to restore; ``model`` is always part of it. Without ``optimizer`` Adam and the learning rate's
            schedule start anew; without ``extra`` the generators do.

    Raises:
        CheckpointError: on every rank, if on any of them something is missing, malformed, truncated, or of another
            model; names what. The engine is then not usable.
    """
    folder, runtime = Path(path), engine.runtime
    doing = f"loading {folder}"
    engine.residence.need(PARAM, OPTIMIZER)
    optimizer = engine.optimizer if OPTIMIZER_STATE in contents else None

    def read_own() -> tuple[RoleState, Any]:
        state = read_state(folder)
        _check_contents(folder, state, {*contents} if engine.optimizer is not None else {MODEL})
        index = read_index(folder)
        _check_fits(engine, folder, state, tensor_shapes(index), optimizer is not None)
        return state, index

    state, index = together(runtime, read_own, doing)
    items = together(runtime, lambda: list(_wanted_items(engine, optimizer is not None)), doing)
    read_items(folder, index, items)
    if optimizer is not None:
        assert state.steps is not None
        set_steps(optimizer, state.steps)
        optimizer.skipped_in_a_row = state.skipped_in_a_row
    elif engine.optimizer is not None:
        engine.optimizer.weights_changed()
    if EXTRA in contents and EXTRA in state.contents:
        _restore_random(engine, folder, state)


def _restore_random(engine: MegatronEngine, folder: Path, state: RoleState) -> None:
    """Restores this rank's generators where the layout is the one that saved; communicates."""
    runtime = engine.runtime

    def restore() -> None:
        with cuda_on_cpu.active():
            load_random_state(folder / _random_file(runtime.rank), runtime.device)

    if (state.layout, state.device) == (runtime.layout, runtime.device.type):
        together(runtime, restore, f"loading {folder}")
    elif runtime.rank == 0:
        logger.warning(
            "%s was saved by %s on %s: generators start anew on %s on %s",
            folder,
            state.layout.describe(),
            state.device,
            runtime.layout.describe(),
            runtime.device.type,
        )


def _saved_items(engine: MegatronEngine, with_optimizer: bool) -> Iterator[Item]:
    """What this rank contributes: each element of each tensor comes from one rank."""
    contributions = engine.weight_map.contributions(engine.runtime.layout, engine.runtime.rank)
    params = engine.weights.parameters()
    shapes = engine.weight_map.hf_shapes()
    states: Mapping[str, StateShard] = {}
    if with_optimizer and engine.optimizer is not None:
        states = state_shards(engine.optimizer, params)
    for number, (param, replica, replicas) in enumerate(contributions):
        # Replicas take turns, so that each writes its share.
        mine = number % replicas == replica
        if mine:
            yield from _weight_items(param, params[param.name], shapes)
        if param.name in states and engine.optimizer is not None and (mine or is_sharded(engine.optimizer)):
            yield from _state_items(param, states[param.name], shapes)


def _wanted_items(engine: MegatronEngine, with_optimizer: bool) -> Iterator[Item]:
    """The memory of everything this rank holds, set to zero where a checkpoint has nothing: vocabulary padding."""
    params, shapes = engine.weights.parameters(), engine.weight_map.hf_shapes()
    states: Mapping[str, StateShard] = {}
    if with_optimizer and engine.optimizer is not None:
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


def _check_contents(folder: Path, state: RoleState, wanted: Collection[str]) -> None:
    """Refuses a checkpoint that lacks what is to be restored, as it was asked to."""
    if MODEL not in wanted:
        raise CheckpointError(f"load_contents={sorted(wanted)} restores no {MODEL}: there is nothing to go on with")
    missing = [name for name in RESUMABLE if name in wanted and name not in state.contents]
    if missing:
        raise CheckpointError(
            f"checkpoint {folder} has no {' and no '.join(missing)}: it was saved with save_contents="
            f"[{', '.join(state.contents)}]; load_contents without {' and '.join(missing)} takes the rest"
        )


def _check_fits(
    engine: MegatronEngine,
    folder: Path,
    state: RoleState,
    found: Mapping[str, Mapping[str, tuple[int, ...]]],
    with_optimizer: bool,
) -> None:
    """Refuses a checkpoint of another model or another number format."""
    kinds = [WEIGHT]
    if state.dtype != _dtype_name(engine):
        raise CheckpointError(
            f"checkpoint {folder} has dtype={state.dtype}, this run dtype={_dtype_name(engine)}: they must agree"
        )
    if with_optimizer:
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


def _dtype_name(engine: MegatronEngine) -> str:
    return str(engine.options.dtype).removeprefix("torch.")


def _random_file(rank: int) -> str:
    return f"random_{rank:05d}.safetensors"
