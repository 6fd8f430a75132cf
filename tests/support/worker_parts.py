"""Row maps over parts of a batch whose token values only row functions can read, as the values of other processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from megarl.cluster.partition import Partition, Rows, partition_groups
from megarl.data import DataProto
from megarl.data.ragged import Chunk, ChunkReference
from megarl.data.remote_columns import RowFunction, RowMap, attach_chunks, fetch_values, separate, write_values


class WorkerChunk(ChunkReference):
    """A chunk that the driver cannot read.

    Attributes:
        readable: whether a row function, or the test, reads.
    """

    readable = False

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk

    @classmethod
    def fetch(cls, references: Sequence[WorkerChunk]) -> list[Chunk]:
        """Read chunks.

        Raises:
            AssertionError: in the driver.
        """
        assert cls.readable, f"the driver reads token columns: {sorted(references[0].chunk)}"
        return [reference.chunk for reference in references]


@contextmanager
def reading() -> Iterator[None]:
    """Allow to read chunks."""
    before, WorkerChunk.readable = WorkerChunk.readable, True
    try:
        yield
    finally:
        WorkerChunk.readable = before


def on_workers(batch: DataProto, plan: Rows) -> DataProto:
    """Return a batch whose token values are in one chunk per part, and not in the driver."""
    return write_values(batch, plan, WorkerChunk)


def values_of(batch: DataProto, name: str) -> np.ndarray:
    """Read a token column in the test."""
    with reading():
        return batch.packed(name).numpy().copy()


def map_over(plan: Rows) -> RowMap:
    """Return a row map over these parts; over as many parts of whole groups where rows stay together."""

    def map_rows(
        function: RowFunction, columns: Sequence[str], batch: DataProto, *args: Any, group_by: str | None = None
    ) -> tuple[DataProto, list[Any]]:
        groups = None if group_by is None else batch.non_tensor_batch[group_by]
        partition = Partition(plan) if groups is None else partition_groups(batch, len(plan), groups)
        results, facts = [], []
        for part in partition.split(batch.present(columns), write=WorkerChunk):
            with reading():
                result, fact = function(fetch_values(part), *args)
            kept, chunk = separate(result)
            results.append(attach_chunks(kept, [(WorkerChunk(chunk),)]))
            facts.append(fact)
        return partition.collect(results), facts

    return map_rows
