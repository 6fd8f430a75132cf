"""How a sharded checkpoint is written and read: torch's distributed checkpoint, with plans made of blocks.

Each rank writes the blocks that it contributes and reads those it wants; torch brings the plans together, checks that
every element of every tensor is written once, and raises on all ranks what failed on any. The files hold tensors,
read with ``weights_only``; the index ``.metadata`` is a pickle that may name a few harmless classes and nothing else.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
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

from megarl.checkpoint_index import INDEX
from megarl.errors import CheckpointError
from megarl.megatron.checkpoint_blocks import Block
from megarl.megatron.runtime import Runtime
from megarl.megatron.together import on_first_rank, together


class Item(NamedTuple):
    """A block of the tensor ``key`` of shape ``full_shape``, and the memory with its elements."""

    key: str
    full_shape: tuple[int, ...]
    block: Block
    data: Tensor


def items_of(
    key: str, blocks: Iterable[Block], shapes: Mapping[str, tuple[int, ...]], buffer: Tensor
) -> Iterable[Item]:
    """Items of kind ``key`` for blocks whose elements lie in the flat ``buffer``.

    Args:
        key: what the values are: weights, or a kind of optimizer state.
        blocks: where they belong.
        shapes: of the Hugging Face tensors.
        buffer: ``[n]``; the items are views of it.
    """
    for block in blocks:
        data = buffer[block.at : block.at + block.numel].view(block.shape)
        yield Item(f"{key}/{block.hf_name}", shapes[block.hf_name], block, data)


class ItemWriter:
    """Writes the blocks of all ranks, in three parts of which only the middle one may run beside training.

    Args:
        runtime: this rank's place.
        folder: folder that all ranks share.
        items: what this rank writes.
    """

    def __init__(self, runtime: Runtime, folder: Path, items: Sequence[Item]) -> None:
        self._runtime = runtime
        self._doing = f"saving to {folder}"
        self._storage = _Writer(folder, sync_files=True)
        self._planner = _SavePlanner(items)
        self._results: list[WriteResult] = []
        self._metadata: Metadata | None = None

    def plan(self) -> None:
        """Agrees with the other ranks on who writes what; communicates.

        Raises:
            CheckpointError: on every rank, if the blocks are not each element of each tensor once.
        """
        is_first = self._runtime.rank == 0
        self._planner.set_up_planner({}, is_coordinator=is_first)
        self._storage.set_up_storage_writer(is_first)
        own = together(self._runtime, self._local_plan, self._doing)
        plan = on_first_rank(self._runtime, own, self._global_plans, self._doing)
        self._plan = self._planner.finish_plan(plan)

    def write(self) -> set[str]:
        """Writes this rank's files and flushes them to disk; does not communicate.

        Returns:
            Names of the files.

        Raises:
            Exception: of whatever kind torch makes of an error of the file system.
        """
        self._results = self._storage.write_data(self._plan, self._planner).value()
        return {result.storage_data.relative_path for result in self._results}

    def finish(self) -> None:
        """Writes the index, once every rank has written; communicates.

        Raises:
            CheckpointError: on every rank, if it cannot be written.
        """

        def write_index(results: list[list[WriteResult]]) -> list[None]:
            assert self._metadata is not None, "rank 0 made the plan"
            self._storage.finish(self._metadata, results)
            return [None] * len(results)

        on_first_rank(self._runtime, self._results, write_index, self._doing)

    def _local_plan(self) -> SavePlan:
        return self._storage.prepare_local_plan(self._planner.create_local_plan())

    def _global_plans(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans, self._metadata = self._planner.create_global_plan(plans)
        return self._storage.prepare_global_plan(plans)


def read_items(folder: Path, metadata: Metadata, items: Sequence[Item]) -> None:
    """Fills the memory of this rank's items; communicates.

    Args:
        folder: the checkpoint.
        metadata: its index, from :func:`megarl.checkpoint_index.read_index`.
        items: what this rank wants; cut in any way.

    Raises:
        CheckpointError: on every rank, if on any of them a file is missing or damaged, or the checkpoint lacks some.
    """
    try:
        dcp.load({}, storage_reader=_Reader(folder, metadata), planner=_LoadPlanner(items))
    except CheckpointException as error:
        raise CheckpointError(f"checkpoint {folder} cannot be loaded: {_reasons(error)}") from error


def tensor_shapes(metadata: Metadata) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes of the tensors in a checkpoint by kind and Hugging Face name."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for full_key, stored in metadata.state_dict_metadata.items():
        key, _, name = full_key.partition("/")
        if isinstance(stored, TensorStorageMetadata):
            shapes[key][name] = tuple(stored.size)
    return shapes


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        """Without the folder's own path, which would be wrong once it is renamed."""
        return StorageMeta()


class _SavePlanner(DefaultSavePlanner):
    """Writes each item as one chunk."""

    def __init__(self, items: Sequence[Item]) -> None:
        super().__init__(flatten_state_dict=False)
        self._items = {(item.key, item.block.start): item for item in items}

    def create_local_plan(self) -> SavePlan:
        """One write per item."""
        self.plan = SavePlan([self._write(item) for item in self._items.values()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The memory of an item."""
        return self._items[write_item.index.fqn, tuple(write_item.index.offset or ())].data

    @staticmethod
    def _write(item: Item) -> WriteItem:
        start, shape = torch.Size(item.block.start), torch.Size(item.block.shape)
        return WriteItem(
            MetadataIndex(item.key, start),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(start, shape), TensorProperties(item.data.dtype), torch.Size(item.full_shape)
            ),
        )


class _LoadPlanner(DefaultLoadPlanner):
    """Reads each item from the stored chunks that it overlaps."""

    def __init__(self, items: Sequence[Item]) -> None:
        super().__init__(flatten_state_dict=False)
        self._wanted = items

    def create_local_plan(self) -> LoadPlan:
        """Reads of all items.

        Raises:
            CheckpointError: an element is in no chunk.
        """
        by_key: dict[str, list[int]] = defaultdict(list)
        for position, item in enumerate(self._wanted):
            by_key[item.key].append(position)
        assert self.metadata is not None
        reads = [
            read
            for key, positions in by_key.items()
            for read in self._reads(key, positions, self.metadata.state_dict_metadata[key])
        ]
        return LoadPlan(reads)

    def _reads(self, key: str, positions: list[int], stored: Any) -> Iterable[ReadItem]:
        blocks = [self._wanted[position].block for position in positions]
        chunks = [ChunkStorageMetadata(torch.Size(block.start), torch.Size(block.shape)) for block in blocks]
        reads = create_read_items_for_chunk_list(key, stored, chunks)
        found = sum(math.prod(read.lengths) for read in reads)
        wanted = sum(block.numel for block in blocks)
        if found != wanted:
            raise CheckpointError(f"'{key}': {found} of {wanted} wanted elements are in the checkpoint")
        # The index of a destination is its position among the chunks of this key; make it that among all items.
        return [
            replace(read, dest_index=replace(read.dest_index, index=positions[read.dest_index.index or 0]))
            for read in reads
        ]

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of an item's memory that a read fills."""
        target = self._wanted[read_item.dest_index.index or 0].data
        for dimension, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dimension, start, length)
        return target


class _Reader(FileSystemReader):
    """Reads with an index that is already there, and looks at each file before it is read."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index given."""
        return self._metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Makes sure that the files are there and long enough.

        Raises:
            CheckpointError: names the file that is not.
        """
        ends: dict[str, int] = defaultdict(int)
        for read in plan.items:
            info = self.storage_data[read.storage_index]
            ends[info.relative_path] = max(ends[info.relative_path], info.offset + info.length)
        for name, end in ends.items():
            path = Path(self.path) / name
            if Path(name).name != name:
                raise CheckpointError(f"{INDEX} names the file {name!r}, which is outside the checkpoint")
            if not path.is_file():
                raise CheckpointError(f"{path} is missing")
            if path.stat().st_size < end:
                raise CheckpointError(f"{path} is truncated: {path.stat().st_size} bytes, expected at least {end}")
        return plan

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Reads file by file.

        Raises:
            CheckpointError: names the file that is damaged.
        """
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for read in plan.items:
            by_file[self.storage_data[read.storage_index].relative_path].append(read)
        for name, reads in by_file.items():
            try:
                super().read_data(replace(plan, items=reads), planner)
            except Exception as error:  # what a damaged file raises is anyone's guess
                raise CheckpointError(f"{Path(self.path) / name} is damaged: {error}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _reasons(error: CheckpointException) -> str:
    """What went wrong, each reason once, with the first rank that had it."""
    reasons: dict[str, int] = {}
    for rank, (exception, _) in sorted(error.failures.items()):
        text = str(exception) if isinstance(exception, CheckpointError) else f"{type(exception).__name__}: {exception}"
        reasons.setdefault(text, rank)
    return "; ".join(f"rank {rank}: {text}" for text, rank in reasons.items())
