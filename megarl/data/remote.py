"""Remote values of ragged columns: for each row a chunk outside this process, and a position in the chunk.

The process that computes values writes them once, as one chunk of several columns. Batches refer to the chunk until a
process reads the values. This module knows no store; :mod:`megarl.cluster.stored_chunks` implements chunks in Ray's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

Chunk = Mapping[str, np.ndarray]
"""Flat values ``[sum of lengths, ...]`` of some rows, by column."""
_Rows = TypeVar("_Rows", "np.ndarray", "RowPlaces")


class ChunkReference(ABC):
    """A chunk in a store. The chunk lives as long as a reference to it."""

    @classmethod
    @abstractmethod
    def fetch(cls, references: Sequence[Self]) -> list[Chunk]:
        """Read chunks, all at once."""


ChunkTuple = tuple[ChunkReference, ...]


def fetch_chunks(references: Sequence[ChunkReference]) -> dict[ChunkReference, Chunk]:
    """Read chunks, those of one store at once."""
    kinds = {type(reference) for reference in references}
    chunks: dict[ChunkReference, Chunk] = {}
    for kind in kinds:
        chosen = [reference for reference in references if type(reference) is kind]
        chunks |= dict(zip(chosen, kind.fetch(chosen), strict=True))
    return chunks


class RowPlaces(NamedTuple):
    """Places of the rows of columns in chunks. Columns that were written together share them.

    Attributes:
        chunks: references to the chunks. While a batch travels: index into the reference tuples that travel with it.
        numbers: ``[b]`` index of each row's chunk in ``chunks``.
        begins: ``[b]`` position of each row's first value in its chunk.
    """

    chunks: ChunkTuple | int
    numbers: np.ndarray
    begins: np.ndarray

    @property
    def references(self) -> ChunkTuple:
        """The references; an error on the way to another process."""
        if isinstance(self.chunks, int):
            raise RuntimeError(f"reference tuple {self.chunks} of a batch is not attached")
        return self.chunks

    def take(self, rows: np.ndarray) -> RowPlaces:
        """Select rows, by position; the tuple of chunks stays the same object."""
        return self._replace(numbers=self.numbers[rows], begins=self.begins[rows])

    def compact(self) -> RowPlaces:
        """Drop the references to chunks without a row."""
        used, numbers = np.unique(self.numbers, return_inverse=True)
        references = self.references
        return RowPlaces(tuple(references[number] for number in used.tolist()), numbers, self.begins)

    @staticmethod
    def join(parts: Sequence[RowPlaces], rows: np.ndarray | None) -> RowPlaces:
        """Concatenate the rows of several batches; ``rows`` selects positions in the concatenation, None = all."""
        index: dict[ChunkReference, int] = {}
        numbers = []
        for part in parts:
            own = [index.setdefault(chunk, len(index)) for chunk in part.references]
            numbers.append(np.array(own, dtype=np.int32)[part.numbers])
        joined = RowPlaces(tuple(index), np.concatenate(numbers), np.concatenate([part.begins for part in parts]))
        return joined if rows is None else joined.take(rows)

    def gather(self, name: str, lengths: np.ndarray, chunks: Mapping[ChunkReference, Chunk]) -> np.ndarray:
        """Copy the values of the rows of a column, in order; a view if they are adjacent in one chunk.

        Args:
            lengths: ``[b]`` values per row.
        """
        arrays = [chunks[reference][name] for reference in self.references]
        ends = self.begins + lengths
        adjacent = (self.numbers[1:] == self.numbers[:-1]) & (self.begins[1:] == ends[:-1])
        first = np.flatnonzero(np.concatenate([[True], ~adjacent]))
        last = np.concatenate([first[1:] - 1, [len(ends) - 1]])
        runs = zip(self.numbers[first].tolist(), self.begins[first].tolist(), ends[last].tolist(), strict=True)
        parts = [arrays[number][begin:end] for number, begin, end in runs]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class RemoteValues(NamedTuple):
    """Values of a ragged column outside this process.

    Attributes:
        name: of the column in the chunks.
        trailing: shape of one entry; empty for scalars.
    """

    places: RowPlaces
    name: str
    trailing: tuple[int, ...]

    @property
    def attached(self) -> bool:
        """Whether this process can read the values; not so on the way to another process."""
        return not isinstance(self.places.chunks, int)

    def fetch(self, lengths: np.ndarray, chunks: Mapping[ChunkReference, Chunk] | None = None) -> np.ndarray:
        """Read the values of all rows in order, ``[sum of lengths, ...]``; the array may be read-only.

        Args:
            chunks: the chunks, if they were read before.
        """
        if not len(lengths):
            return np.empty((0, *self.trailing), np.int16)  # int16 is also bfloat16
        places = self.places.compact()
        return places.gather(self.name, lengths, fetch_chunks(places.references) if chunks is None else chunks)


class RowSelection:
    """Selects rows of arrays and places; an object that several columns share is selected once and stays shared."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
        self._selected: dict[int, tuple[Any, Any]] = {}

    def of(self, values: _Rows) -> _Rows:
        """Select the rows."""
        if id(values) not in self._selected:
            chosen = values.take(self.rows) if isinstance(values, RowPlaces) else values[self.rows]
            self._selected[id(values)] = values, chosen  # holding the object keeps its id
        selected: _Rows = self._selected[id(values)][1]
        return selected
