"""Checkpoints of one role in any layout: weights, optimizer, schedule and random states of every rank.

::

    <path>/.metadata, __<rank>_0.distcp     weights and optimizer state by Hugging Face name and rectangle
    <path>/state.json                       optimizer steps, number format, saved layout, contents, versions
    <path>/random_<rank>.safetensors        random generator states of each rank
    <path>/huggingface/                     config and tokenizer; if configured, the weights in Hugging Face format

Every rank writes and reads its part, including its shard of the optimizer's state, which is cut over data- and
context-parallel ranks: nothing is gathered. In the saved layout, a restored role continues bit for bit. In another
layout it has the same weights and state, and fresh random generators.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.base.checkpoint_files import HF_FOLDER, read_index
from megarl.base.errors import CheckpointError
from megarl.megatron.checkpoint.pending_save import HostSnapshot, PendingSave, export_beside
from megarl.megatron.checkpoint.role_state import (
    EXTRA,
    HF_MODEL,
    MODEL,
    OPTIMIZER_STATE,
    RESUMABLE,
    RoleState,
    load_random_state,
    read_state,
    save_random_state,
    write_state,
)
from megarl.megatron.checkpoint.storage import Item, ItemWriter, blocks_of_range, items_of, read_items, tensor_shapes
from megarl.megatron.engine.megatron_engine import MegatronEngine
from megarl.megatron.engine.offload import OPTIMIZER, PARAM
from megarl.megatron.engine.optimizer import (
    MASTER,
    MOMENTS,
    StateShard,
    check_steps,
    is_sharded,
    set_steps,
    state_shards,
)
from megarl.megatron.runtime import cuda_on_cpu
from megarl.megatron.runtime.memory import TensorMemory
from megarl.megatron.runtime.process_groups import all_ranks_or_raise
from megarl.models.adapters import TOWER_SETTINGS
from megarl.models.hf_writer import NO_FILES, write_companions
from megarl.models.weight_map import Contribution

WEIGHT = "weight"

logger = logging.getLogger(__name__)


def begin_save(
    engine: MegatronEngine,
    path: str | Path,
    contents: Collection[str] = RESUMABLE,
    *,
    snapshot: HostSnapshot | None = None,
    copy_from: str | Path | None = None,
    export_files: Mapping[str, str] = NO_FILES,
) -> PendingSave:
    """Begin a save, completed by :meth:`PendingSave.finish`; all ranks must call both, with no other save in between.

    Args:
        engine: after a finished optimizer step.
        path: folder on storage that all ranks share; created if missing, must be empty.
        contents: of :data:`~megarl.megatron.checkpoint.role_state.CONTENTS`. The optimizer includes the step count,
            which determines the learning rate. The Hugging Face export is written before this returns.
        snapshot: host memory for a copy, so that the engine may train while a thread writes; None writes immediately.
        copy_from: folder of the initial model, whose tokenizer the Hugging Face export gets.
        export_files: text of files, by name, that replace those of ``copy_from``.

    Raises:
        CheckpointError: on every rank, if any of them cannot begin; names rank and reason. Written files remain.
    """
    folder, runtime, optimizer = Path(path), engine.runtime, engine.optimizer
    doing, has_optimizer = f"saving to {folder}", OPTIMIZER_STATE in contents and optimizer is not None
    state = _state_of(engine, contents, copy_from)

    def prepare() -> None:
        if optimizer is not None:
            check_steps(optimizer)
        folder.mkdir(parents=True, exist_ok=True)

    def check_empty() -> None:
        if any(folder.iterdir()):
            text = f"checkpoint folder {folder} is not empty; remove its files or save into another folder"
            raise CheckpointError(text, code="checkpoint.folder-not-empty")

    all_ranks_or_raise(runtime, prepare, doing)
    all_ranks_or_raise(runtime, check_empty, doing)
    files = all_ranks_or_raise(
        runtime, partial(_write_local_files, engine, folder, state, copy_from, export_files), doing
    )
    if HF_MODEL in contents:
        files |= export_beside(engine, folder, copy_from, export_files)
    writer = None
    if MODEL in contents:
        items = all_ranks_or_raise(runtime, partial(_copied_items, engine, has_optimizer, snapshot), doing)
        writer = ItemWriter(runtime, folder, items, _stored_shapes(engine, has_optimizer))
        writer.plan()
    pending = PendingSave(runtime, folder, writer, files, in_background=snapshot is not None)
    engine.offload_manager.pin_until_saved(lambda: not pending.is_written)
    return pending


def _state_of(engine: MegatronEngine, contents: Collection[str], copy_from: str | Path | None) -> RoleState:
    runtime, optimizer = engine.runtime, engine.optimizer
    return RoleState(
        dtype=_dtype_name(engine),
        steps=optimizer.steps if OPTIMIZER_STATE in contents and optimizer is not None else None,
        layout=runtime.layout,
        device=runtime.device.type,
        skipped_in_a_row=0 if optimizer is None else optimizer.skipped_in_a_row,
        contents=tuple(name for name in contents if name != OPTIMIZER_STATE or optimizer is not None),
        lora=engine.options.lora,
        base=engine.base,
        initial=None if copy_from is None else str(Path(copy_from).absolute()),
    )


def _copied_items(engine: MegatronEngine, with_optimizer: bool, snapshot: HostSnapshot | None) -> list[Item]:
    """The items that this rank saves, from a new snapshot if there is memory for one."""
    contributions = engine.trained_map.contributions(engine.runtime.layout, engine.runtime.rank)
    items = list(saved_items(contributions, _stored_state(engine, with_optimizer), engine.offload_manager.memory))
    return items if snapshot is None else snapshot.take(items)


def _write_local_files(
    engine: MegatronEngine,
    folder: Path,
    state: RoleState,
    copy_from: str | Path | None,
    export_files: Mapping[str, str],
) -> set[str]:
    """Write this rank's small files; returns their names."""
    runtime, names = engine.runtime, set()
    if EXTRA in state.contents:
        names.add(_random_file(runtime.rank))
        with cuda_on_cpu.active():
            save_random_state(folder / _random_file(runtime.rank), runtime.device)
    if runtime.rank == 0:
        names.add(write_state(folder, state))
        if HF_MODEL not in state.contents:
            names |= write_companions(folder / HF_FOLDER, engine.model.raw, copy_from, export_files)
    return names


@torch.no_grad()
def load_sharded(engine: MegatronEngine, path: str | Path, contents: Collection[str] = RESUMABLE) -> None:
    """Restore a checkpoint of :func:`begin_save` in any layout; all ranks must call this.

    An engine without optimizer loads the weights only.

    Args:
        engine: a new engine of the same model; its state is overwritten.
        contents: parts to restore; must include ``model``. Without ``optimizer`` Adam and the learning-rate schedule
            restart; without ``extra`` the random generators do.

    Raises:
        CheckpointError: on every rank, if any rank's part is missing, malformed, truncated, or of another model. The
            engine is unusable then.
    """
    folder, runtime = Path(path), engine.runtime
    doing = f"loading {folder}"
    optimizer = engine.optimizer if OPTIMIZER_STATE in contents else None

    def read_local() -> tuple[RoleState, Any]:
        state = read_state(folder)
        _check_contents(folder, state, {*contents} if engine.optimizer is not None else {MODEL})
        index = read_index(folder)
        _check_fits(engine, folder, state, tensor_shapes(index), optimizer is not None)
        return state, index

    state, index = all_ranks_or_raise(runtime, read_local, doing)
    items = all_ranks_or_raise(runtime, lambda: list(_wanted_items(engine, optimizer is not None)), doing)
    read_items(runtime, folder, index, items)
    engine.offload_manager.mark_changed(PARAM, OPTIMIZER)
    engine.drop_features()
    if optimizer is not None:
        assert state.steps is not None
        set_steps(optimizer, state.steps)
        optimizer.skipped_in_a_row = state.skipped_in_a_row
    else:
        engine.weights_changed()
    if EXTRA in contents and EXTRA in state.contents:
        _restore_random(engine, folder, state)


def _restore_random(engine: MegatronEngine, folder: Path, state: RoleState) -> None:
    """Restore this rank's random generators if the layout is the saved one; communicates."""
    runtime = engine.runtime

    def restore() -> None:
        with cuda_on_cpu.active():
            load_random_state(folder / _random_file(runtime.rank), runtime.device)

    if (state.layout, state.device) == (runtime.layout, runtime.device.type):
        all_ranks_or_raise(runtime, restore, f"loading {folder}")
    elif runtime.rank == 0:
        logger.warning(
            "%s was saved by %s on %s: random generators restart on %s on %s",
            folder,
            state.layout.describe(),
            state.device,
            runtime.layout.describe(),
            runtime.device.type,
        )


def saved_items(
    contributions: Iterable[Contribution], state: StoredState, memory: Callable[[Tensor], TensorMemory]
) -> Iterator[Item]:
    """Select the blocks that one rank writes: over all ranks each element of each tensor once."""
    for param, _, is_writer in contributions:
        for kind, start, stop, tensor in state.tensors(param.name):
            if is_writer or (kind != WEIGHT and state.is_sharded):
                yield from items_of(kind, blocks_of_range(param, start, stop), state.shapes, memory(tensor))


def _wanted_items(engine: MegatronEngine, with_optimizer: bool) -> Iterator[Item]:
    """This rank's shard, each item in one piece, zeroed because a checkpoint has no vocabulary padding."""
    state, memory = _stored_state(engine, with_optimizer), engine.offload_manager.memory
    for param in engine.trained_map.megatron_params(engine.runtime.layout, engine.runtime.rank):
        for kind, start, _, tensor in state.tensors(param.name):
            whole = memory(tensor)
            for piece in whole.pieces:
                blocks = blocks_of_range(param, start, start + len(piece.zero_()))
                yield from items_of(kind, blocks, state.shapes, whole._replace(pieces=(piece,)))
                start += len(piece)


def _stored_shapes(engine: MegatronEngine, with_optimizer: bool) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes of all tensors of a checkpoint by kind and Hugging Face name."""
    shapes = {WEIGHT: engine.trained_map.hf_shapes()}
    if with_optimizer:
        trained = {n: shape for n, shape in shapes[WEIGHT].items() if not engine.trained_map.is_float32(n)}
        kinds = [*MOMENTS] if engine.options.dtype is torch.float32 else [*MOMENTS, MASTER]
        shapes |= dict.fromkeys(kinds, trained)
    return shapes


@dataclass(frozen=True)
class StoredState:
    """Weights and optimizer state of one rank by parameter, on the device or offloaded.

    Attributes:
        shards: their optimizer state; empty without an optimizer.
        is_sharded: see :func:`~megarl.megatron.engine.optimizer.is_sharded`.
    """

    shapes: Mapping[str, tuple[int, ...]]
    params: Mapping[str, Tensor]
    shards: Mapping[str, StateShard]
    is_sharded: bool

    def tensors(self, name: str) -> Iterator[tuple[str, int, int, Tensor]]:
        """Kind, range of the flattened parameter, and values, for each tensor of a parameter."""
        param, shard = self.params[name], self.shards.get(name)
        yield WEIGHT, 0, param.numel(), param
        if shard is not None:
            for kind, tensor in shard.tensors.items():
                yield kind, shard.start, shard.stop, tensor


def _stored_state(engine: MegatronEngine, with_optimizer: bool) -> StoredState:
    shapes, params, optimizer = engine.trained_map.hf_shapes(), engine.weights.stored(), engine.optimizer
    if not with_optimizer or optimizer is None:
        return StoredState(shapes, params, {}, False)
    shards = state_shards(optimizer, params, engine.offload_manager.optimizer_zeros_like)
    return StoredState(shapes, params, shards, is_sharded(optimizer))


def _check_contents(folder: Path, state: RoleState, requested: Collection[str]) -> None:
    """Reject a checkpoint that lacks a part to restore."""
    if MODEL not in requested:
        text = f"load_contents={sorted(requested)} restores no {MODEL}: include it"
        raise CheckpointError(text, code="resume.contents-without-model")
    missing = [name for name in RESUMABLE if name in requested and name not in state.contents]
    if missing:
        raise CheckpointError(
            f"checkpoint {folder} has no {' and no '.join(missing)}: it was saved with save_contents="
            f"[{', '.join(state.contents)}]; leave {' and '.join(missing)} out of load_contents",
            code="resume.missing-contents",
        )


def _check_fits(
    engine: MegatronEngine,
    folder: Path,
    state: RoleState,
    saved_shapes: Mapping[str, Mapping[str, tuple[int, ...]]],
    with_optimizer: bool,
) -> None:
    """Reject a checkpoint of another model or another number format."""
    if state.dtype != _dtype_name(engine):
        text = f"checkpoint {folder} has dtype={state.dtype}, this run dtype={_dtype_name(engine)}: they must agree"
        raise CheckpointError(text, code="resume.other-dtype")
    _check_adapters(engine, folder, state)
    for kind, expected in _stored_shapes(engine, with_optimizer).items():
        shapes = saved_shapes.get(kind, {})
        for name in sorted(expected.keys() | shapes.keys()):
            pair = shapes.get(name), expected.get(name)
            if pair[0] != pair[1]:
                saved, here = ("is absent" if shape is None else f"has shape {list(shape)}" for shape in pair)
                raise CheckpointError(
                    f"checkpoint {folder} is of another model: {kind} of '{name}' {saved} in the checkpoint, "
                    f"{here} here",
                    code="resume.other-model",
                )


def _check_adapters(engine: MegatronEngine, folder: Path, state: RoleState) -> None:
    """Reject adapters of another rank, scale or kind, or of another base model; rank 0 identifies the base model."""
    keys = {"lora_rank": "rank", "lora_alpha": "alpha", "lora.use_rslora": "rank_stabilized", "lora.type": "kind"}
    keys |= {f"lora.{name}": name for name in TOWER_SETTINGS}
    for key, name in keys.items():
        saved, here = (getattr(options, name, 0) for options in (state.lora, engine.options.lora))
        if saved != here:
            text = f"checkpoint {folder} was saved with {key}={saved}, this run has {key}={here}"
            raise CheckpointError(text, code="resume.other-adapters")
    if engine.base is None or state.base is None:
        return
    part = engine.base.difference(state.base)
    if part is not None:
        raise CheckpointError(
            f"checkpoint {folder} has adapters of the base model {state.base.path}, this run has {engine.base.path}: "
            f"its {part} differ ({getattr(state.base, part)} and {getattr(engine.base, part)}); start from the same "
            "base model",
            code="resume.other-base-model",
        )


def _dtype_name(engine: MegatronEngine) -> str:
    return str(engine.options.dtype).removeprefix("torch.")


def _random_file(rank: int) -> str:
    return f"random_{rank:05d}.safetensors"
