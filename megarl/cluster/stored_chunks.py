"""Chunks of token columns in Ray's object store, and batches that travel between processes as references to them.

A chunk is written once, by the process that computed its values, and stays on that node. Batches travel with
references and row positions; a worker reads the chunks of its rows with one call, without a copy if they are on its
node. The driver owns the chunks: they live as long as one of its batches refers to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import ray
from ray.exceptions import RayError

from megarl.base.errors import WorkerError
from megarl.data import DataProto
from megarl.data.remote import Chunk, ChunkReference
from megarl.data.remote_columns import attach, detach, fetch, separate


class StoredChunk(ChunkReference):
    """A chunk in Ray's object store.

    Args:
        ref: reference to the object.
    """

    def __init__(self, ref: ray.ObjectRef) -> None:
        self.ref = ref

    @classmethod
    def write(cls, chunk: Chunk) -> StoredChunk:
        """Write a chunk on this node."""
        return cls(ray.put(chunk))

    @classmethod
    def fetch(cls, references: Sequence[Self]) -> list[Chunk]:
        """Read chunks, from other nodes if necessary.

        Raises:
            WorkerError: a chunk is lost, because its node is.
        """
        try:
            chunks: list[Chunk] = ray.get([reference.ref for reference in references])
        except RayError as error:
            raise WorkerError(
                f"token values of the batch are lost with the node that held them: {error}; resume from a checkpoint"
            ) from error
        return chunks


class Payload(NamedTuple):
    """A batch on its way to a worker.

    Attributes:
        batch: without the values of its remote columns.
        refs: references to its chunks.
    """

    batch: DataProto
    refs: list[ray.ObjectRef]


def payload_of(batch: DataProto) -> Payload:
    """Build the payload of a batch; only references to chunks of its rows are in it."""
    detached, chunks = detach(batch)
    return Payload(detached, [chunk.ref for chunk in chunks if isinstance(chunk, StoredChunk)])


def receive(args: Sequence[Any]) -> list[Any]:
    """Replace payloads among arguments by batches with all values."""
    return [
        fetch(attach(arg.batch, [StoredChunk(ref) for ref in arg.refs])) if isinstance(arg, Payload) else arg
        for arg in args
    ]


def separated(result: Any) -> tuple[Any, Chunk | None]:
    """Split the result of a verb into the part that the driver receives, and the chunk that stays in the store."""
    if not isinstance(result, DataProto):
        return result, None
    batch, chunk = separate(result)
    return (batch, chunk) if chunk else (result, None)


def attached(result: Any, ref: ray.ObjectRef) -> Any:
    """Return the result of a verb with the reference to its chunk; nothing is read."""
    return attach(result, [StoredChunk(ref)]) if isinstance(result, DataProto) else result
