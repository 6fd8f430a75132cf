"""Chunks of token columns in Ray's object store, and batches that travel between processes as references to them.

A chunk is written once, by the process that computed its values, and stays on that node. Batches travel with
references and row positions; a worker reads the chunks of its rows with one call, without a copy if they are on its
node. The driver owns the chunks: they live as long as one of its batches refers to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Self, cast

import numpy as np
import ray
from ray.exceptions import RayError

from megarl.base.errors import WorkerError
from megarl.data import DataProto
from megarl.data.ragged import Chunk, ChunkReference, ChunkTuple
from megarl.data.remote_columns import attach_chunks, detach_chunks, fetch_values, separate
from megarl.sharding.placement import Routes

RUN_GAIN = 8
"""A column is stored as runs of equal values if that takes this factor less memory."""
_SAMPLE = 4096
"""First values of a column that are searched for runs; a column with many runs there is stored as it is."""


class RunValues(NamedTuple):
    """Flat values of a column with long runs of equal values, such as masks, and scores at the last tokens.

    Attributes:
        begins: int64 position of each run's first value.
    """

    size: int
    begins: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> RunValues | np.ndarray:
        """Return the values as runs if that is much smaller, else unchanged."""
        if values.ndim != 1 or not values.flags.c_contiguous or not values.size:
            return values
        bits = values.view(f"u{values.itemsize}")  # a negative zero is no zero, and NaN equals itself
        entry = (values.itemsize + np.dtype(np.int64).itemsize) * RUN_GAIN
        for part in (bits[:_SAMPLE], bits):
            begins = np.flatnonzero(np.concatenate([[True], part[1:] != part[:-1]]))
            if len(begins) * entry >= part.nbytes:
                return values
        return cls(len(values), begins, values[begins])

    def dense(self) -> np.ndarray:
        """Return all values."""
        return np.repeat(self.values, np.diff(self.begins, append=self.size))

    @property
    def nbytes(self) -> int:
        """Memory of positions and values."""
        return self.begins.nbytes + self.values.nbytes


def encoded(chunk: Chunk) -> dict[str, RunValues | np.ndarray]:
    """Return a chunk as it is stored."""
    return {name: RunValues.of(values) for name, values in chunk.items()}


class StoredChunk(ChunkReference):
    """A chunk in Ray's object store."""

    def __init__(self, ref: ray.ObjectRef) -> None:
        self.ref = ref

    @classmethod
    def write(cls, chunk: Chunk) -> StoredChunk:
        """Write a chunk on this node."""
        return cls(ray.put(encoded(chunk)))

    @classmethod
    def fetch(cls, references: Sequence[Self]) -> list[Chunk]:
        """Read chunks, from other nodes if necessary.

        Raises:
            WorkerError: a chunk is lost, because its node is.
        """
        try:
            stored = ray.get([reference.ref for reference in references])
        except RayError as error:
            raise WorkerError(
                f"token values of the batch are lost with the node that held them: {error}; resume from a checkpoint",
                code="ray.values-lost",
            ) from error
        return [
            {name: values.dense() if isinstance(values, RunValues) else values for name, values in chunk.items()}
            for chunk in stored
        ]


class Payload(NamedTuple):
    """A part of a batch on its way to a worker.

    Attributes:
        batch: without the values of its remote columns.
        lists: lists of references to chunks, or references to such lists. Parts of a batch with rows in many chunks
            share stored lists, so the driver serializes each reference once. A part with rows in few chunks has a list
            of its own: 512 ranks that all read the references to 512 chunks would keep the driver, which owns the
            chunks, busy for seconds.
    """

    batch: DataProto
    lists: list[ray.ObjectRef | list[ray.ObjectRef]]


def payloads_of(parts: Sequence[DataProto]) -> list[Payload]:
    """Build the payloads of a batch's parts."""
    detached = [detach_chunks(part) for part in parts]
    uses = Counter(id(chunks) for _, tuples in detached for chunks in tuples)
    lists: dict[int, ray.ObjectRef | list[ray.ObjectRef]] = {}

    def list_of(chunks: ChunkTuple) -> ray.ObjectRef | list[ray.ObjectRef]:
        if id(chunks) not in lists:
            refs = [cast("StoredChunk", chunk).ref for chunk in chunks]
            lists[id(chunks)] = ray.put(refs) if uses[id(chunks)] > 1 else refs
        return lists[id(chunks)]

    return [Payload(batch, [list_of(chunks) for chunks in tuples]) for batch, tuples in detached]


def stored_once(args: Sequence[Any]) -> list[Any]:
    """Store large arguments, so that all processes of a node read the same copy."""
    return [ray.put(arg) if isinstance(arg, DataProto | Routes) else arg for arg in args]


def receive(args: Sequence[Any]) -> list[Any]:
    """Replace payloads among arguments by batches with all values."""
    return [_received(arg) if isinstance(arg, Payload) else arg for arg in args]


def _received(payload: Payload) -> DataProto:
    stored = [entry for entry in payload.lists if isinstance(entry, ray.ObjectRef)]
    values = iter(ray.get(stored) if stored else ())
    lists = [next(values) if isinstance(entry, ray.ObjectRef) else entry for entry in payload.lists]
    return fetch_values(attach_chunks(payload.batch, [tuple(map(StoredChunk, refs)) for refs in lists]))


def separated(result: Any) -> tuple[Any, Chunk | None]:
    """Split the result of a verb into the driver's part and the chunk that stays in the store."""
    if not isinstance(result, DataProto):
        return result, None
    batch, chunk = separate(result)
    return (batch, chunk) if chunk else (result, None)


def attached(result: Any, ref: ray.ObjectRef) -> Any:
    """Return the result of a verb with the reference to its chunk; nothing is read."""
    return attach_chunks(result, [(StoredChunk(ref),)]) if isinstance(result, DataProto) else result
