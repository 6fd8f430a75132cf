"""Ragged columns: each row's values without padding, in this process or remote, from and to padded tensors.

The padding of a declared tensor is found in one of two ways. With an ``attention_mask`` in the batch, its lengths apply
to all columns. Without a mask (a worker that returns only log-probs), pad values are trimmed from each row at the
padded side. Either way the padded tensor of the ragged column equals the original.

Remote values are in chunks outside this process; each row has a chunk and a position in it. The process that computes
values writes them once, as one chunk of several columns. Batches refer to the chunk until a process reads the values.
This module knows no store; :mod:`megarl.cluster.stored_chunks` implements chunks in Ray's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from megarl.base.errors import DataError
from megarl.data.columns import Alignment, Column, Spans, Widths

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
    """Read chunks, one call per store."""
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
        """Copy a column's values of the rows, ``lengths [b]`` each; a view if they are adjacent in one chunk."""
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
        """Read the values of all rows, ``[sum of lengths, ...]``, maybe read-only; ``chunks`` were read before."""
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


Rows = Sequence[Sequence[float] | np.ndarray]
Regions = Mapping[Alignment, tuple[np.ndarray, np.ndarray | None]]
"""Lengths of the rows, and starts (see :class:`RaggedColumn`), of the columns of each alignment."""


class TerminalValues(NamedTuple):
    """Values that are zero except at the last entry of each row, such as scores of responses.

    Attributes:
        ends: ``[b]`` value at the last entry of each row; ignored for an empty row.
    """

    ends: np.ndarray

    def dense(self, lengths: np.ndarray) -> np.ndarray:
        """Return the values of all rows, ``[sum of lengths]``."""
        values, filled = np.zeros(int(lengths.sum()), self.ends.dtype), lengths > 0
        values[np.cumsum(lengths)[filled] - 1] += self.ends[filled]
        return values


class RowValues(NamedTuple):
    """Each row's values in a separate array, as samples arrive.

    They are joined when the column is read or written to a chunk.

    Attributes:
        rows: values of each row, equal in dtype and trailing shape; at least one row.
    """

    rows: Sequence[np.ndarray]

    def dense(self) -> np.ndarray:
        """Return the values of all rows, ``[sum of lengths, ...]``."""
        return np.concatenate(self.rows)


class RaggedColumn(NamedTuple):
    """A column of rows with different lengths.

    Attributes:
        values: ``[sum of lengths, ...]``, all rows in order, in this process or remote; bfloat16 as int16 bits; or
            :class:`TerminalValues` or :class:`RowValues`; None = all ones.
        lengths: ``[b]`` entries per row.
        starts: ``[b]`` position of a row's first entry in the padded tensor; None = it follows from the alignment.
        width: width of the padded tensor.
        dtype: name of the padded tensor's torch dtype, such as ``int64``.
        alignment: ``prompt``, ``response`` or ``sequence``.
        pad: value in the padding; None = there was no padding, and ``default_pad`` applies.
        default_pad: padding value of the column's declaration.
    """

    values: np.ndarray | RemoteValues | TerminalValues | RowValues | None
    lengths: np.ndarray
    starts: np.ndarray | None
    width: int
    dtype: str
    alignment: Alignment
    pad: float | None = None
    default_pad: float = 0

    @classmethod
    def of_rows(cls, column: Column, rows: Rows, pad: float | None = None) -> RaggedColumn:
        """Build a prompt- or response-aligned column from its rows; arrays that are narrow enough are not copied."""
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        dtype = torch.empty(0, dtype=column.dtype).numpy().dtype
        kinds = {row.dtype for row in rows if isinstance(row, np.ndarray)}
        narrow = kinds.pop() if len(kinds) == 1 else dtype
        if narrow != np.int64 and (narrow == dtype or narrow.kind == "i" == dtype.kind):
            dtype = narrow  # of rows without an array too, such as the padding token of an empty response
        arrays = [
            row if isinstance(row, np.ndarray) and row.dtype.kind == "i" else np.asarray(row, dtype) for row in rows
        ]
        stored: np.ndarray | RowValues
        if arrays and all(array.dtype == narrow != np.int64 for array in arrays):
            stored = RowValues(arrays)
        else:
            values = np.concatenate(arrays) if arrays else np.empty(0, dtype)
            stored = values.astype(_narrowest(values), copy=False)
        width, name = int(lengths.max(initial=0)), dtype_name(column.dtype)
        return cls(stored, lengths, None, width, name, column.alignment, pad, column.pad)

    @classmethod
    def of_flat(
        cls, column: Column, values: Tensor, lengths: np.ndarray, starts: np.ndarray | None, width: int
    ) -> RaggedColumn:
        """Build a column from all rows' values ``[sum of lengths, ...]``; booleans get the declared dtype."""
        if values.dtype == torch.bool:
            name, array = dtype_name(column.dtype), values.to(torch.int8).numpy()
        else:
            name, array = dtype_name(values.dtype), _array(values.detach().cpu().contiguous())
        stored = array.astype(_narrowest(array), copy=False)
        return cls(stored, lengths, starts, width, name, column.alignment, default_pad=column.pad)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the padded tensor."""
        return (len(self.lengths), self.width, *self.trailing)

    @property
    def trailing(self) -> tuple[int, ...]:
        """Shape of one entry; empty for scalars."""
        if isinstance(self.values, RemoteValues):
            return self.values.trailing
        values = self.values.rows[0] if isinstance(self.values, RowValues) else self.values
        return values.shape[1:] if isinstance(values, np.ndarray) else ()

    @property
    def is_local(self) -> bool:
        """Whether the values are arrays in this process."""
        return isinstance(self.values, np.ndarray | RowValues)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of the padded tensor."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def array(self) -> np.ndarray | None:
        """Return the values, from another process if they are remote; possibly read-only; None = all ones."""
        if isinstance(self.values, RemoteValues):
            return self.values.fetch(self.lengths)
        if isinstance(self.values, RowValues):
            return self.values.dense()
        return self.values.dense(self.lengths) if isinstance(self.values, TerminalValues) else self.values

    def local(self) -> RaggedColumn:
        """Return the column with its values in one array of this process; end values, and values on the way, stay."""
        remote = isinstance(self.values, RemoteValues) and self.values.attached
        return self._replace(values=self.array()) if remote or isinstance(self.values, RowValues) else self

    def flat(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return all rows' values in a dtype, by default the padded tensor's; possibly a view."""
        dtype = self.torch_dtype if dtype is None else dtype
        array = self.array()
        if array is None:
            return torch.ones(int(self.lengths.sum()), dtype=dtype)
        values = torch.from_numpy(writeable(array))
        return (values.view(torch.bfloat16) if self.torch_dtype == torch.bfloat16 else values).to(dtype)

    def padded(self) -> Tensor:
        """Build the padded tensor."""
        pad = self.default_pad if self.pad is None else self.pad
        tensor = torch.full(self.shape, pad, dtype=self.torch_dtype)
        starts = row_starts(self.alignment, self.width, self.lengths, self.starts).tolist()
        target, ends, values = _array(tensor), np.cumsum(self.lengths).tolist(), self.array()
        for row, (start, length, end) in enumerate(zip(starts, self.lengths.tolist(), ends, strict=True)):
            target[row, start : start + length] = 1 if values is None else values[end - length : end]
        return tensor

    def take(self, rows: RowSelection) -> RaggedColumn:
        """Select rows. Columns that share lengths, starts or places still do, and are then sent with one copy."""
        lengths = rows.of(self.lengths)
        selected = self._replace(lengths=lengths, starts=None if self.starts is None else rows.of(self.starts))
        if self.values is None:
            return selected
        if isinstance(self.values, RemoteValues):
            return selected._replace(values=self.values._replace(places=rows.of(self.values.places)))
        if isinstance(self.values, TerminalValues):
            return selected._replace(values=TerminalValues(rows.of(self.values.ends)))
        if isinstance(self.values, RowValues) and len(rows.rows):
            return selected._replace(values=RowValues([self.values.rows[row] for row in rows.rows.tolist()]))
        array = self.values.dense() if isinstance(self.values, RowValues) else self.values
        ends = np.cumsum(self.lengths)[rows.rows].tolist()
        parts = [array[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True) if length]
        return selected._replace(values=np.concatenate(parts) if parts else array[:0])


def row_starts(alignment: Alignment, width: int, lengths: np.ndarray, starts: np.ndarray | None) -> np.ndarray:
    """Return the position of each row's first entry in a padded tensor, ``[b]``."""
    if starts is not None:
        return starts
    return width - lengths if alignment == "prompt" else np.zeros_like(lengths)


JoinedPlaces = dict[tuple[int, ...], RowPlaces]
"""Joined places by the ids of the parts, so that columns which share places in all parts share them in the result."""


def join_ragged(
    columns: Sequence[RaggedColumn],
    widths: Sequence[Widths],
    width: Widths,
    rows: np.ndarray | None = None,
    joined: JoinedPlaces | None = None,
) -> RaggedColumn:
    """Concatenate the rows of a column; remote values stay remote if those of all parts are.

    Args:
        columns: the same column of each batch, equal in dtype, alignment and trailing shape.
        rows: positions in the concatenation that the result has, in order; None = all.
        joined: places that were joined before, for the columns of one batch; gets those of this column.
    """
    first, starts = columns[0], None
    if first.alignment == "sequence":
        moved = [
            column.starts + (width.prompt or 0) - (own.prompt or 0)
            for column, own in zip(columns, widths, strict=True)
            if column.starts is not None
        ]
        starts = np.concatenate(moved)
        total = (width.prompt or 0) + (width.response or 0)
    else:
        total = max(column.width for column in columns)
    pad = next((column.pad for column in columns if column.pad is not None), None)
    lengths = np.concatenate([column.lengths for column in columns])
    if rows is not None:
        lengths, starts = lengths[rows], None if starts is None else starts[rows]
    values: np.ndarray | RemoteValues | TerminalValues | None
    if all(isinstance(column.values, TerminalValues) for column in columns):
        ends = np.concatenate([column.values.ends for column in columns if isinstance(column.values, TerminalValues)])
        values = TerminalValues(ends if rows is None else ends[rows])
    else:
        values = _join_remote(columns, rows, {} if joined is None else joined) or _join_values(columns, rows)
    return first._replace(values=values, lengths=lengths, starts=starts, width=total, pad=pad)


def _join_remote(columns: Sequence[RaggedColumn], rows: np.ndarray | None, joined: JoinedPlaces) -> RemoteValues | None:
    """Join remote values without reading them; None if values of some part are not remote."""
    parts = [column.values for column in columns if isinstance(column.values, RemoteValues)]
    if len(parts) < len(columns) or len({part.name for part in parts}) > 1:
        return None
    places = [part.places for part in parts]
    key = tuple(map(id, places))
    if key not in joined:
        joined[key] = RowPlaces.join(places, rows)
    return parts[0]._replace(places=joined[key])


def _join_values(columns: Sequence[RaggedColumn], rows: np.ndarray | None) -> np.ndarray | None:
    """Copy the values of the rows, each once; None if all are ones."""
    arrays = [column.array() for column in columns]
    stored = [values for values in arrays if values is not None]
    if not stored:
        return None
    kind, trailing = np.result_type(*(values.dtype for values in stored)), stored[0].shape[1:]
    parts = [
        np.ones((int(column.lengths.sum()), *trailing), kind) if values is None else values
        for column, values in zip(columns, arrays, strict=True)
    ]
    if rows is None:
        return np.concatenate(parts)
    part = np.repeat(np.arange(len(columns)), [len(column.lengths) for column in columns])[rows].tolist()
    ends = np.concatenate([np.cumsum(column.lengths) for column in columns])[rows]
    begins = ends - np.concatenate([column.lengths for column in columns])[rows]
    slices = [parts[n][begin:end] for n, begin, end in zip(part, begins.tolist(), ends.tolist(), strict=True)]
    return np.concatenate(slices, dtype=kind) if slices else np.empty((0, *trailing), kind)


def regions_of(spans: Spans) -> Regions:
    """Return the lengths and starts of the rows for each alignment."""
    prompts, responses = spans.prompt_lengths.numpy(), spans.response_lengths.numpy()
    return {
        "prompt": (prompts, None),
        "response": (responses, None),
        "sequence": (prompts + responses, spans.prompt_width - prompts),
    }


def without_padding(column: Column, tensor: Tensor, lengths: np.ndarray, starts: np.ndarray | None) -> RaggedColumn:
    """Convert a padded tensor ``[b, width, ...]``; one copy of its values, and one look at its padding.

    Raises:
        DataError: the padding contains several values.
    """
    name, width = dtype_name(tensor.dtype), tensor.shape[1]
    empty = RaggedColumn(None, lengths, starts, width, name, column.alignment, None, column.pad)
    source, begins = _array(tensor), row_starts(column.alignment, width, lengths, starts).tolist()
    real, pad = [], None
    for row, (start, length) in enumerate(zip(begins, lengths.tolist(), strict=True)):
        real.append(source[row, start : start + length])
        for part in (source[row, :start], source[row, start + length :]):
            if part.size:
                pad = part.flat[0] if pad is None else pad
                if (part != pad).any():
                    raise DataError(
                        f"column {column.name!r}, row {row}: entries outside attention_mask hold several values and "
                        f"would be lost in transport; set them to {column.pad:g}",
                        code="batch.values-in-padding",
                    )
    values = np.concatenate(real) if real else source[:0].reshape(0, *source.shape[2:])
    number = None if pad is None else _number(pad, tensor.dtype)
    if column.name == "attention_mask" and (values == 1).all():
        return empty._replace(pad=number)
    return empty._replace(values=values.astype(_narrowest(values), copy=False), pad=number)


def _number(value: Any, dtype: torch.dtype) -> float:
    """Convert an entry of :func:`_array` to a number."""
    if dtype == torch.bfloat16:
        return float(torch.tensor(int(value), dtype=torch.int16).view(torch.bfloat16))
    number: float = value.item()
    return number


def writeable(array: np.ndarray) -> np.ndarray:
    """Copy an array that is read-only, as arrays out of shared memory are."""
    return array if array.flags.writeable else array.copy()


def _array(tensor: Tensor) -> np.ndarray:
    """View a tensor as an array: bfloat16, which numpy lacks, as int16."""
    array: np.ndarray = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def _narrowest(values: np.ndarray) -> np.dtype[Any]:
    """Return the smallest integer type that holds int64 values; other types are kept."""
    if values.dtype != np.int64 or not values.size:
        return values.dtype
    low, high = values.min(), values.max()
    kinds = (np.dtype(name) for name in ("int8", "int16", "int32"))
    return next((kind for kind in kinds if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max), values.dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype, such as ``int64``."""
    return str(dtype).removeprefix("torch.")


def trimmed_lengths(tensor: Tensor, column: Column) -> np.ndarray:
    """Count the entries of each row ``[b]`` without the pad values at the padded side."""
    kept = tensor != column.pad
    kept = kept.flatten(2).any(-1) if kept.dim() > 2 else kept
    width = kept.shape[1]
    if width == 0:
        return np.zeros(len(kept), np.int64)
    # argmax finds the first True; from the padded side that is the first value
    from_padded_side = kept if column.alignment == "prompt" else kept.flip(1)
    lengths: np.ndarray = torch.where(kept.any(1), width - from_padded_side.int().argmax(1), 0).numpy()
    return lengths
