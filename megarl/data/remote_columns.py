"""Batches whose token values are in other processes: chunks of values, and functions on rows where the values are.

A process writes values (:func:`write_values`) and sends the batch with the references to its chunks instead of bytes
(:func:`detach_chunks`). The receiver attaches the references (:func:`attach_chunks`), and reads all values at once
(:func:`fetch_values`) or each column at its first use. A row function works on each row independently, on parts of the
batch in several processes at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from megarl.data.column_store import Columns, StoredColumn
from megarl.data.columns import COLUMNS
from megarl.data.protocol import DataProto
from megarl.data.ragged import (
    Chunk,
    ChunkReference,
    ChunkTuple,
    RaggedColumn,
    RemoteValues,
    RowPlaces,
    RowSelection,
    fetch_chunks,
)

FEW_CHUNKS = 4
"""A part has few of the chunks of its batch if this many times as many exist."""


def write_values(
    batch: DataProto, parts: Sequence[Sequence[int]], write: Callable[[Chunk], ChunkReference]
) -> DataProto:
    """Write the values of all ragged columns that are in this process to chunks; return the batch with remote values.

    Args:
        parts: rows of each chunk; together all rows, a row may repeat.
        write: writes a chunk and returns the reference to it.

    Raises:
        DataError: the attention mask has holes, or the padding of a column contains several values.
    """
    columns = batch.tensors.to_ragged()
    local = _local_columns(columns)
    if not local:
        return batch
    references, numbers = [], np.zeros(len(batch), np.int32)
    begins = {id(column.lengths): np.zeros(len(batch), np.int64) for column in local.values()}
    for number, rows in enumerate(parts):
        selection = RowSelection(np.asarray(rows, dtype=np.int64))
        chosen = {name: column.take(selection) for name, column in local.items()}
        references.append(write(_chunk(chosen)))
        numbers[selection.rows] = number
        for column in local.values():
            lengths = selection.of(column.lengths)
            begins[id(column.lengths)][selection.rows] = np.cumsum(lengths) - lengths
    chunks = tuple(references)
    places = {key: RowPlaces(chunks, numbers, begin) for key, begin in begins.items()}
    stored = {
        name: column._replace(values=RemoteValues(places[id(column.lengths)], name, column.trailing))
        for name, column in local.items()
    }
    return _with_columns(batch, {**columns.stored, **stored})


def separate(batch: DataProto) -> tuple[DataProto, Chunk]:
    """Return the batch with numbered chunks in place of its values, and its only chunk; empty without ragged columns.

    Raises:
        DataError: the attention mask has holes, or the padding of a column contains several values.
    """
    columns = fetch_values(batch).tensors.to_ragged()
    local = _local_columns(columns)
    numbers = np.zeros(len(batch), np.int32)
    places: dict[int, RowPlaces] = {}
    stored = dict(columns.stored)
    for name, column in local.items():
        begins = np.cumsum(column.lengths) - column.lengths
        place = places.setdefault(id(column.lengths), RowPlaces(0, numbers, begins))
        stored[name] = column._replace(values=RemoteValues(place, name, column.trailing))
    return _with_columns(batch, stored), _chunk(local)


def detach_chunks(batch: DataProto) -> tuple[DataProto, list[ChunkTuple]]:
    """Return the batch with numbers in place of its tuples of chunks, and these tuples.

    Parts of one batch share the tuples, so a caller can send each tuple once for all parts. A part
    with rows in few of many chunks has a tuple of its own: its receiver must not read all references.
    """
    tuples: dict[int, ChunkTuple] = {}
    chosen: dict[tuple[int, bytes], ChunkTuple] = {}

    def number(places: RowPlaces) -> RowPlaces:
        used, inverse = np.unique(places.numbers, return_inverse=True)
        chunks = places.references
        if len(used) * FEW_CHUNKS <= len(chunks):
            own = tuple(chunks[number] for number in used.tolist())
            own = chosen.setdefault((id(chunks), used.tobytes()), own)
            places = RowPlaces(own, inverse, places.begins)
        key = id(places.references)
        tuples.setdefault(key, places.references)
        return places._replace(chunks=list(tuples).index(key))

    return _with_places(batch, number), list(tuples.values())


def attach_chunks(batch: DataProto, tuples: Sequence[ChunkTuple]) -> DataProto:
    """Put tuples of chunks back in place of the numbers from :func:`detach_chunks` or :func:`separate`."""

    def attach(places: RowPlaces) -> RowPlaces:
        return places._replace(chunks=tuples[places.chunks]) if isinstance(places.chunks, int) else places

    return _with_places(batch, attach)


def fetch_values(batch: DataProto) -> DataProto:
    """Return the batch with all values in this process; reads each chunk once."""
    remote = _remote_columns(batch)
    if not remote:
        return batch
    places = {id(values.places): values.places.compact() for _, values in remote.values()}
    chunks = fetch_chunks(list(dict.fromkeys(chunk for place in places.values() for chunk in place.references)))
    stored = dict(batch.tensors.stored)
    for name, (column, values) in remote.items():
        stored[name] = column._replace(values=values.fetch(column.lengths, chunks))
    return _with_columns(batch, stored)


def _with_places(batch: DataProto, change: Callable[[RowPlaces], RowPlaces]) -> DataProto:
    """Change the places of all remote columns; columns that share places still do."""
    remote = _remote_columns(batch)
    if not remote:
        return batch
    changed: dict[int, RowPlaces] = {}
    stored = dict(batch.tensors.stored)
    for name, (column, values) in remote.items():
        if id(values.places) not in changed:
            changed[id(values.places)] = change(values.places)
        stored[name] = column._replace(values=values._replace(places=changed[id(values.places)]))
    return _with_columns(batch, stored)


def _with_columns(batch: DataProto, stored: dict[str, StoredColumn]) -> DataProto:
    result = DataProto(Columns(stored), batch.non_tensor_batch, batch.meta_info)
    result.partitions = batch.partitions
    return result


def _local_columns(columns: Columns) -> dict[str, RaggedColumn]:
    return {name: column for name, column in columns.ragged.items() if column.is_local}


def _remote_columns(batch: DataProto) -> dict[str, tuple[RaggedColumn, RemoteValues]]:
    ragged = batch.tensors.ragged
    return {name: (column, column.values) for name, column in ragged.items() if isinstance(column.values, RemoteValues)}


def _chunk(columns: dict[str, RaggedColumn]) -> Chunk:
    arrays = {name: column.array() for name, column in columns.items()}
    return {name: values for name, values in arrays.items() if values is not None}


RowFunction = Callable[..., tuple[DataProto, Any]]
"""Maps a part of a batch, and further arguments, to new columns of its rows and facts about the part.

A process imports it by name, so it is a function of a module.
"""


class RowMap(Protocol):
    """Runs row functions on a batch."""

    def __call__(
        self,
        function: RowFunction,
        columns: Sequence[str],
        batch: DataProto,
        *args: Any,
        group_by: str | None = None,
    ) -> tuple[DataProto, list[Any]]:
        """Run a function on the parts of a batch.

        Args:
            columns: what the function reads, tensors and others; absent ones are left out.
            group_by: non-tensor column; rows with equal values are in one part, such as the responses to one prompt.
                None: each part is any rows.

        Returns:
            The new columns in the order of ``batch``, whose token values stay where they were computed; and the facts
            of each part.
        """


def map_in_process(
    function: RowFunction, columns: Sequence[str], batch: DataProto, *args: Any, group_by: str | None = None
) -> tuple[DataProto, list[Any]]:
    """Run a row function on the whole batch in this process; a :class:`RowMap`."""
    result, facts = function(batch.present(columns), *args)
    return result, [facts]


def with_tokens(batch: DataProto, result: DataProto) -> DataProto:
    """Return the batch with a row function's token columns, added or replaced."""
    return batch.with_columns(token_part(result).tensors)


def token_part(result: DataProto) -> DataProto:
    """Select the token columns of a row function's result."""
    return result.select([name for name in result.tensors if name in COLUMNS])
