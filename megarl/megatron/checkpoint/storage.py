"""Format of a sharded checkpoint: torch's distributed checkpoint, planned over blocks of Hugging Face tensors.

Everything is addressed by Hugging Face tensor and rectangle, so that a file depends on no layout: neither the tensor-
and pipeline-parallel split, nor the data-parallel cuts of the optimizer's state, nor vocabulary padding. Each rank
writes the blocks that it contributes and reads those it needs. Before a byte is written, rank 0 checks in the merged
index that every element of every tensor occurs once, and before the index is written, that every block is in a file.
The files hold tensors, read with ``weights_only``; the index ``.metadata`` is a pickle restricted to a few harmless
classes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megarl.base.checkpoint_files import INDEX
from megarl.base.errors import CheckpointError
from megarl.megatron.runtime.memory import TensorMemory
from megarl.megatron.runtime.process_groups import Runtime, all_ranks_or_raise, gather_apply_scatter
from megarl.models import LocalParam
from megarl.models.verification import Coverage

Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]
"""Shapes of tensors by kind (weights, or a kind of optimizer state) and Hugging Face name."""


class Item(NamedTuple):
    """A block of the tensor ``key`` with shape ``full_shape``, and its elements' memory."""

    key: str
    full_shape: tuple[int, ...]
    block: TensorBlock
    memory: TensorMemory

    @property
    def data(self) -> Tensor:
        """The elements in the block's shape: a view of their memory if it is in one piece, otherwise a copy."""
        return self.memory.joined().view(self.block.shape)


def items_of(
    key: str, blocks: Iterable[TensorBlock], shapes: Mapping[str, tuple[int, ...]], memory: TensorMemory
) -> Iterable[Item]:
    """Build the items of kind ``key`` for blocks whose elements are in ``memory``."""
    for block in blocks:
        part = memory.part(block.at, block.at + block.numel)
        yield Item(f"{key}/{block.hf_name}", shapes[block.hf_name], block, part)


class ItemWriter:
    """Writes blocks, of all tensors of ``shapes``, in three steps; only the second may run during training."""

    def __init__(self, runtime: Runtime, folder: Path, items: Sequence[Item], shapes: Shapes) -> None:
        self._runtime = runtime
        self._doing = f"saving to {folder}"
        self._storage = _Writer(folder, sync_files=True)
        self._planner = SavePlanner(items, shapes)
        self._results: list[WriteResult] = []
        self._metadata: Metadata | None = None

    def plan(self) -> None:
        """Agree with the other ranks on each rank's writes; communicates.

        Raises:
            CheckpointError: on every rank, if the blocks do not cover each element of each tensor once.
        """
        is_first = self._runtime.rank == 0
        self._planner.set_up_planner({}, is_coordinator=is_first)
        self._storage.set_up_storage_writer(is_first)

        def plan_locally() -> SavePlan:
            return self._storage.prepare_local_plan(self._planner.create_local_plan())

        def plan_globally(plans: list[SavePlan]) -> list[SavePlan]:
            plans, self._metadata = self._planner.create_global_plan(plans)
            return self._storage.prepare_global_plan(plans)

        local_plan = all_ranks_or_raise(self._runtime, plan_locally, self._doing)
        plan = gather_apply_scatter(self._runtime, local_plan, plan_globally, self._doing)
        self._plan = self._planner.finish_plan(plan)

    def write(self) -> set[str]:
        """Write this rank's files and flush them to disk; does not communicate.

        Raises:
            Exception: any type that torch makes of a file system error.
        """
        self._results = self._storage.write_data(self._plan, self._planner).value()
        return {result.storage_data.relative_path for result in self._results}

    def finish(self) -> None:
        """Write the index, after every rank has written; communicates.

        Raises:
            CheckpointError: on every rank, if it cannot be written, or a block is in no file.
        """

        def write_index(results: list[list[WriteResult]]) -> list[None]:
            assert self._metadata is not None, "rank 0 made the plan"
            check_written(self._metadata, {(part.index.fqn, part.index.offset) for rank in results for part in rank})
            self._storage.finish(self._metadata, results)
            return [None] * len(results)

        gather_apply_scatter(self._runtime, self._results, write_index, self._doing)


def read_items(runtime: Runtime, folder: Path, metadata: Metadata, items: Sequence[Item]) -> None:
    """Fill the memory of this rank's items; communicates.

    Args:
        metadata: the folder's index, from :func:`megarl.base.checkpoint_files.read_index`.
        items: each in one piece; may be cut differently from the saved ones.

    Raises:
        CheckpointError: on every rank, if any finds a missing or damaged file, or the checkpoint lacks elements.
    """
    try:
        dcp.load({}, storage_reader=_Reader(runtime, folder, metadata), planner=_LoadPlanner(items))
    except CheckpointException as error:
        reasons = _reasons(error)
        text = "; ".join(f"rank {rank}: {reason.text}" for rank, reason in reasons.items())
        code = next(iter(reasons.values())).code
        raise CheckpointError(f"checkpoint {folder} cannot be loaded: {text}", code=code) from error


def check_index(index: Metadata, shapes: Shapes) -> None:
    """Check that an index lists every element of every tensor exactly once, and no other tensor.

    Raises:
        CheckpointError: names the tensor, and what of it is missing, repeated or outside.
    """
    expected = {f"{kind}/{name}": shape for kind, of_kind in shapes.items() for name, shape in of_kind.items()}
    stored = index.state_dict_metadata
    for key in sorted(expected.keys() | stored.keys()):
        shape, tensor = expected.get(key), stored.get(key)
        if shape is None:
            text = f"'{key}' is to be written, but is no tensor of this checkpoint"
            raise CheckpointError(text, code="checkpoint.extra-tensor")
        if not isinstance(tensor, TensorStorageMetadata):
            text = f"no rank writes '{key}' of shape {list(shape)}"
            raise CheckpointError(text, code="checkpoint.tensor-not-written")
        if tuple(tensor.size) != shape:
            text = f"'{key}' has shape {list(shape)}, but is written with {list(tensor.size)}"
            raise CheckpointError(text, code="checkpoint.tensor-shape")
        cover = Coverage(key, shape, CheckpointError)
        for chunk in tensor.chunks:
            cover.add(chunk.offsets, chunk.sizes)
        if cover.written != cover.expected:
            text = f"'{key}': the ranks write {cover.written} of {cover.expected} elements"
            raise CheckpointError(text, code="checkpoint.tensor-incomplete")


def check_written(index: Metadata, written: Collection[tuple[str, torch.Size | None]]) -> None:
    """Check that every block of an index is among the written ones, tensor and first corner each.

    Raises:
        CheckpointError: names the first absent block.
    """
    for key, tensor in index.state_dict_metadata.items():
        for chunk in tensor.chunks if isinstance(tensor, TensorStorageMetadata) else ():
            if (key, chunk.offsets) not in written:
                text = f"'{key}': the block at {list(chunk.offsets)} was not written"
                raise CheckpointError(text, code="checkpoint.block-not-written")


def tensor_shapes(metadata: Metadata) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of the tensors in a checkpoint by kind and Hugging Face name."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for full_key, stored in metadata.state_dict_metadata.items():
        key, _, name = full_key.partition("/")
        if isinstance(stored, TensorStorageMetadata):
            shapes[key][name] = tuple(stored.size)
    return shapes


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        """Omit the folder's path, which would be wrong after a rename."""
        return StorageMeta()


class SavePlanner(DefaultSavePlanner):
    """Writes each item as one chunk."""

    def __init__(self, items: Sequence[Item], shapes: Shapes) -> None:
        super().__init__(flatten_state_dict=False)
        self._items = {(item.key, item.block.start): item for item in items}
        self._shapes = shapes

    def create_local_plan(self) -> SavePlan:
        """Plan one write per item."""
        self.plan = SavePlan([self._write(item) for item in self._items.values()])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Merge all ranks' plans; torch would drop a repeated block, and miss a tensor that no rank plans."""
        plans, index = create_default_global_save_plan(all_plans)
        check_index(index, self._shapes)
        return plans, index

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the memory of an item."""
        return self._items[write_item.index.fqn, tuple(write_item.index.offset or ())].data

    @staticmethod
    def _write(item: Item) -> WriteItem:
        start, shape = torch.Size(item.block.start), torch.Size(item.block.shape)
        return WriteItem(
            MetadataIndex(item.key, start),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(start, shape), TensorProperties(item.memory.dtype), torch.Size(item.full_shape)
            ),
        )


class _LoadPlanner(DefaultLoadPlanner):
    """Reads each item from the overlapping stored chunks."""

    def __init__(self, items: Sequence[Item]) -> None:
        super().__init__(flatten_state_dict=False)
        self._items = items

    def create_local_plan(self) -> LoadPlan:
        """Plan the reads of all items."""
        by_key: dict[str, list[int]] = defaultdict(list)
        for position, item in enumerate(self._items):
            by_key[item.key].append(position)
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        return LoadPlan([read for key, at in by_key.items() for read in self._reads(key, at, stored[key])])

    def _reads(self, key: str, positions: list[int], stored: Any) -> Iterable[ReadItem]:
        blocks = [self._items[position].block for position in positions]
        chunks = [ChunkStorageMetadata(torch.Size(block.start), torch.Size(block.shape)) for block in blocks]
        reads = create_read_items_for_chunk_list(key, stored, chunks)
        stored_count = sum(math.prod(read.lengths) for read in reads)
        count = sum(block.numel for block in blocks)
        if stored_count != count:
            text = f"'{key}': the checkpoint has {stored_count} of {count} elements"
            raise CheckpointError(text, code="checkpoint.elements-missing")
        # The index of a destination is its position among the chunks of this key; make it that among all items.
        return [
            replace(read, dest_index=replace(read.dest_index, index=positions[read.dest_index.index or 0]))
            for read in reads
        ]

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the part of an item's memory that a read fills."""
        target = self._items[read_item.dest_index.index or 0].data
        for dimension, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dimension, start, length)
        return target


class _Reader(FileSystemReader):
    """Reads with an already loaded index, and checks each file before it is read."""

    def __init__(self, runtime: Runtime, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._barrier = runtime.barrier
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the loaded index."""
        return self._metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check that the files exist and are long enough."""
        ends: dict[str, int] = defaultdict(int)
        for read in plan.items:
            info = self.storage_data[read.storage_index]
            ends[info.relative_path] = max(ends[info.relative_path], info.offset + info.length)
        for name, end in ends.items():
            path = Path(self.path) / name
            if Path(name).name != name:
                text = f"{INDEX} names the file {name!r}, which is outside the checkpoint"
                raise CheckpointError(text, code="checkpoint.file-outside")
            if not path.is_file():
                raise CheckpointError(f"{path} is missing", code="checkpoint.missing-file")
            if path.stat().st_size < end:
                text = f"{path} is truncated: {path.stat().st_size} bytes, expected at least {end}"
                raise CheckpointError(text, code="checkpoint.truncated-file")
        return plan

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Read file by file, and wait for the other ranks outside the collective that follows."""
        try:
            self._read_files(plan, planner)
        finally:
            self._barrier.wait_for_all()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_files(self, plan: LoadPlan, planner: Any) -> None:
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for read in plan.items:
            by_file[self.storage_data[read.storage_index].relative_path].append(read)
        for name, reads in by_file.items():
            try:
                super().read_data(replace(plan, items=reads), planner)
            except Exception as error:  # a damaged file may raise anything
                text = f"{Path(self.path) / name} is damaged: {error}"
                raise CheckpointError(text, code="checkpoint.corrupt-file") from error


def _reasons(error: CheckpointException) -> dict[int, CheckpointError]:
    """Reasons of a failure, each once, by the first rank that reported it."""
    reasons: dict[int, CheckpointError] = {}
    for rank, (reason, _) in sorted(error.failures.items()):
        if not isinstance(reason, CheckpointError):
            reason = CheckpointError(f"{type(reason).__name__}: {reason}", code="checkpoint.read-failed")
        if reason.text not in {known.text for known in reasons.values()}:
            reasons[rank] = reason
    return reasons


class TensorBlock(NamedTuple):
    """A rectangle of a Hugging Face tensor whose elements are consecutive in a local buffer, from offset ``at`` on."""

    hf_name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    at: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def blocks_of_range(param: LocalParam, start: int, stop: int) -> Iterator[TensorBlock]:
    """Find the rectangles of Hugging Face tensors in elements ``[start, stop)`` of a flattened local parameter.

    A piece of an ``n``-dimensional parameter gives at most ``2n - 1``: parts of rows at both ends, and whole rows
    between them. Vocabulary padding is in none.

    Raises:
        ValueError: a piece does not span whole rows, unlike in training layouts.
    """
    width = math.prod(param.shape[1:])
    for piece in param.pieces:
        if piece.shape[1:] != param.shape[1:]:
            raise ValueError(f"'{param.name}' of shape {list(param.shape)}: {piece} does not span its rows")
        base = piece.at[0] * width
        low, high = max(start, base) - base, min(stop, base + math.prod(piece.shape)) - base
        at = base + low - start
        for corner, shape in _rectangles(piece.shape, low, high):
            corner_in_tensor = tuple(a + b for a, b in zip(piece.start, corner, strict=True))
            yield TensorBlock(piece.hf_name, corner_in_tensor, shape, at)
            at += math.prod(shape)


def _rectangles(shape: tuple[int, ...], low: int, high: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Divide elements ``[low, high)`` of a flattened array into rectangles, in order: corner and shape of each."""
    if low >= high:
        return
    width = math.prod(shape[1:])
    first, last = -(-low // width), high // width  # whole rows
    if low < first * width:
        before = (first - 1) * width
        parts = _rectangles(shape[1:], low - before, min(high - before, width))
        yield from (((first - 1, *corner), (1, *extent)) for corner, extent in parts)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if first <= last and last * width < high:
        parts = _rectangles(shape[1:], 0, high - last * width)
        yield from (((last, *corner), (1, *extent)) for corner, extent in parts)
