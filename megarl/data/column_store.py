"""The tensor columns of a batch: ragged where declared, with padded tensors as views.

A declared column is stored as flat values with a length per row, in the smallest integer type that holds them. Other
columns are stored as they are. Padded tensors are views: built when a column is read, and dropped when they need too
much memory. A payload contains numpy arrays only: a view never sends its complete storage, and Ray moves the bytes
without a copy. It describes itself; the receiver needs no declarations.

The values of a ragged column may be remote (:mod:`megarl.data.remote`). They are fetched when they are read, and
dropped like padded tensors. Selections and concatenations do not read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from megarl.base.errors import DataError
from megarl.data.columns import COLUMNS, Column, Widths, column_widths
from megarl.data.merging import require_same_keys
from megarl.data.ragged import (
    EndValues,
    JoinedPlaces,
    RaggedColumn,
    Regions,
    Rows,
    dtype_name,
    join_ragged,
    regions_of,
    row_starts,
    trimmed_lengths,
    writeable,
)
from megarl.data.remote import RemoteValues, RowSelection
from megarl.data.sequences import Spans, read_spans
from megarl.data.stored_column import StoredColumn


class DenseColumn(NamedTuple):
    """A column that is sent as it is.

    Attributes:
        data: its bytes, ``uint8``; numpy has no bfloat16.
        shape: shape of the tensor.
        dtype: name of the torch dtype.
    """

    data: np.ndarray
    shape: tuple[int, ...]
    dtype: str


PackedColumns = dict[str, RaggedColumn | DenseColumn]
"""The tensors of a batch in transport."""


class Columns(Mapping[str, Tensor]):
    """The tensor columns of a batch by name; reading one builds its padded tensor.

    Args:
        stored: columns by name, all with the same number of rows.
    """

    def __init__(self, stored: Mapping[str, StoredColumn]) -> None:
        self.stored = dict(stored)
        self._spans: Spans | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Columns:
        """Convert a mapping of tensors; columns of another batch are shared."""
        if isinstance(tensors, Columns):
            return tensors
        return cls({name: StoredColumn(tensor) for name, tensor in tensors.items()})

    @classmethod
    def of_ragged(cls, columns: Mapping[str, RaggedColumn]) -> Columns:
        """Build columns without padded tensors."""
        return cls({name: StoredColumn(None, column) for name, column in columns.items()})

    @classmethod
    def unpack(cls, packed: PackedColumns) -> Columns:
        """Restore the columns of :meth:`pack`, on the CPU."""
        return cls({name: _unpack(column) for name, column in packed.items()})

    def __getitem__(self, name: str) -> Tensor:
        return self.stored[name].tensor()

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    def shapes(self) -> dict[str, Tensor]:
        """Return tensors without data, with the shapes and dtypes of the columns."""
        return {name: column.meta for name, column in self.stored.items()}

    def only(self, names: Sequence[str]) -> Columns:
        """Select columns."""
        return Columns({name: self.stored[name] for name in names})

    def merged(self, others: Mapping[str, Tensor]) -> Columns:
        """Add or replace columns."""
        return Columns({**self.stored, **Columns.of(others).stored})

    def spans(self) -> Spans | None:
        """Return the token spans of the rows if they are known without the padded ``attention_mask``."""
        mask = self.stored["attention_mask"].current() if "attention_mask" in self.stored else None
        if mask is None:
            return None
        if self._spans is None:
            widths = column_widths(self.shapes())
            if widths.prompt is None or widths.response is None or mask.starts is None:
                return None
            prompts = torch.from_numpy(widths.prompt - mask.starts)
            responses = torch.from_numpy(mask.lengths.astype(np.int64)) - prompts
            self._spans = Spans(widths.prompt, widths.response, prompts, responses)
        return self._spans

    def take(self, rows: slice | np.ndarray) -> Columns:
        """Select rows."""
        selection = RowSelection(np.arange(self.num_rows)[rows] if isinstance(rows, slice) else rows)
        stored = {}
        for name, column in self.stored.items():
            ragged = column.current()
            if ragged is None:
                selected = rows if isinstance(rows, slice) else torch.from_numpy(rows)
                stored[name] = StoredColumn(column.tensor()[selected])
            else:
                stored[name] = StoredColumn(None, ragged.take(selection))
        return Columns(stored)

    def packed(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return the entries of all rows of a declared column in order, by the token spans of the batch.

        Args:
            name: of the column.
            dtype: of the result; None = that of the column.

        Raises:
            DataError: the batch has no ``attention_mask``, or one with holes.
        """
        spans, stored = self._known_spans(name), self.stored[name]
        ragged = stored.current()
        alignment = COLUMNS[name].alignment if ragged is None else ragged.alignment
        lengths, starts = regions_of(spans)[alignment]
        if ragged is not None and np.array_equal(ragged.lengths, lengths):
            return stored.flat(dtype)
        tensor = stored.tensor()
        begins = row_starts(alignment, spans.prompt_width, lengths, starts)
        ends = (begins + lengths).tolist()
        rows = [row[start:end] for row, start, end in zip(tensor, begins.tolist(), ends, strict=True)]
        return torch.cat(rows).to(dtype) if rows else tensor.new_empty((0, *tensor.shape[2:]), dtype=dtype)

    def unpadded(self, name: str, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return the entries of each row of a declared column; see :meth:`packed`."""
        return list(self.packed(name, dtype).split(self.row_lengths(name).tolist()))

    def row_lengths(self, name: str) -> Tensor:
        """Count the entries of each row of a declared column, ``[b]``."""
        alignment = COLUMNS[name].alignment if (ragged := self.stored[name].current()) is None else ragged.alignment
        lengths, _ = regions_of(self._known_spans(name))[alignment]
        return torch.from_numpy(lengths)

    def of_tokens(self, tokens: Mapping[str, Tensor]) -> Columns:
        """Build declared columns of these rows from packed values ``[sum of lengths, ...]``.

        Raises:
            DataError: the batch has no ``attention_mask``, or a column has another number of values.
        """
        return Columns.of_ragged({name: self._of_tokens(COLUMNS[name], values) for name, values in tokens.items()})

    def ends(self, name: str) -> Tensor | None:
        """Return the last value of each row, ``[b]``, of a column that is zero elsewhere; else None."""
        ragged = self.stored[name].current()
        if ragged is None or not isinstance(ragged.values, EndValues):
            return None
        return torch.from_numpy(np.where(ragged.lengths > 0, ragged.values.ends, 0))

    def of_ends(self, ends: Mapping[str, Tensor]) -> Columns:
        """Build declared columns of these rows that are zero except at the last entry of each row.

        Args:
            ends: ``[b]`` value at the last entry, by column.

        Raises:
            DataError: the batch has no ``attention_mask``.
        """
        columns = {}
        for name, values in ends.items():
            lengths, starts, width = self._region(COLUMNS[name])
            column, dtype = COLUMNS[name], dtype_name(values.dtype)
            stored = EndValues(values.detach().cpu().numpy())
            columns[name] = RaggedColumn(stored, lengths, starts, width, dtype, column.alignment, None, column.pad)
        return Columns.of_ragged(columns)

    def _of_tokens(self, column: Column, values: Tensor) -> RaggedColumn:
        lengths, starts, width = self._region(column)
        if len(values) != lengths.sum():
            text = f"column {column.name!r} has {len(values)} values; its rows have {lengths.sum()} tokens"
            raise DataError(text, code="batch.column-tokens")
        return RaggedColumn.of_flat(column, values, lengths, starts, width)

    def _region(self, column: Column) -> tuple[np.ndarray, np.ndarray | None, int]:
        """Return lengths, starts and width that a new column has; see :class:`RaggedColumn`."""
        spans = self._known_spans(column.name)
        lengths, starts = regions_of(spans)[column.alignment]
        for stored in self.stored.values():
            ragged = stored.current()
            if ragged is not None and ragged.alignment == column.alignment and np.array_equal(ragged.lengths, lengths):
                lengths = ragged.lengths  # columns that share an array are sent with one
                break
        widths = {"prompt": spans.prompt_width, "response": spans.response_width}
        return lengths, starts, widths.get(column.alignment, sum(widths.values()))

    def _known_spans(self, name: str) -> Spans:
        spans = read_spans(self)
        if spans is None:
            text = f"rows of {name!r} without padding need 'attention_mask'; there are {sorted(self)}"
            raise DataError(text, code="batch.missing-column")
        return spans

    def to_ragged(self) -> Columns:
        """Store all declared columns without padding, and return this mapping.

        Raises:
            DataError: the attention mask has holes, or the padding of a column contains several values.
        """
        spans = read_spans(self)
        regions = None if spans is None else regions_of(spans)
        for name in self.stored:
            self._ragged(name, regions)
        return self

    def pack(self) -> PackedColumns:
        """Return the columns without padding, for transport; see :meth:`to_ragged`.

        Remote values are read, unless their chunks are numbers (:func:`megarl.data.remote_columns.detach_chunks`).
        """
        spans = read_spans(self)
        regions = None if spans is None else regions_of(spans)
        packed: PackedColumns = {}
        for name, stored in self.stored.items():
            ragged = self._ragged(name, regions)
            if ragged is not None and (ragged.is_local or _is_attached(ragged.values)):
                ragged = stored.local()
            packed[name] = _dense(stored.tensor()) if ragged is None else ragged
        return packed

    def _ragged(self, name: str, regions: Regions | None) -> RaggedColumn | None:
        """Return a column without padding; None if it is not declared, or without padding that could be found."""
        stored, declaration = self.stored[name], COLUMNS.get(name)
        ragged = stored.current()
        if ragged is not None or declaration is None or declaration.alignment == "row":
            return ragged
        if regions is not None:
            return stored.to_ragged(declaration, *regions[declaration.alignment])
        if declaration.alignment == "sequence":
            return None
        return stored.to_ragged(declaration, trimmed_lengths(stored.tensor().detach().cpu(), declaration), None)

    @property
    def num_rows(self) -> int:
        """Number of rows; 0 without columns."""
        return next((column.meta.shape[0] for column in self.stored.values()), 0)


def ragged_columns(rows: Mapping[str, Rows], pads: Mapping[str, float]) -> Columns:
    """Build the columns of a batch of samples from their rows, with an ``attention_mask`` of all their tokens.

    Args:
        rows: values of each row by declared column; ``prompts`` and ``responses`` too.
        pads: padding values that differ from the declarations.
    """
    columns = {name: RaggedColumn.of_rows(COLUMNS[name], values, pads.get(name)) for name, values in rows.items()}
    prompts, responses = columns["prompts"], columns["responses"]
    # Columns of one alignment share their lengths, which are then sent once.
    whole = RaggedColumn(
        None,
        prompts.lengths + responses.lengths,
        prompts.width - prompts.lengths,
        prompts.width + responses.width,
        "int64",
        "sequence",
    )
    spans = {"prompt": prompts, "response": responses, "sequence": whole}
    for name, column in columns.items():
        span = spans[column.alignment]
        columns[name] = column._replace(lengths=span.lengths, starts=span.starts, width=span.width)
    columns["attention_mask"] = whole
    return Columns.of_ragged(columns)


def join_rows(parts: Sequence[Columns], rows: np.ndarray | None = None) -> Columns:
    """Concatenate the rows of several batches; declared columns get the width of the widest part.

    Args:
        parts: the batches.
        rows: positions in the concatenation that the result has, in order; None = all.

    Raises:
        DataError: the parts have different columns, or an undeclared column differs in shape or dtype.
    """
    require_same_keys([part.keys() for part in parts], "tensor columns")
    widths = [column_widths(part.shapes()) for part in parts]
    width = Widths(max((w.prompt or 0 for w in widths), default=0), max((w.response or 0 for w in widths), default=0))
    joined: JoinedPlaces = {}
    return Columns({name: _join(name, parts, widths, width, rows, joined) for name in parts[0]})


def _join(
    name: str,
    parts: Sequence[Columns],
    widths: Sequence[Widths],
    width: Widths,
    rows: np.ndarray | None,
    joined: JoinedPlaces,
) -> StoredColumn:
    ragged = [part.stored[name].current() for part in parts]
    first = ragged[0]
    if first is not None and all(
        column is not None and (column.dtype, column.alignment, column.shape[2:])
        == (first.dtype, first.alignment, first.shape[2:])
        for column in ragged
    ):  # fmt: skip
        return StoredColumn(None, join_ragged([c for c in ragged if c is not None], widths, width, rows, joined))
    tensors, column = [part[name] for part in parts], COLUMNS.get(name)
    differ = any(own not in (width, Widths(None, None)) for own in widths)
    if column is not None and column.alignment != "row" and differ:
        pad = _common_padding(column, parts)
        tensors = [_widen(tensor, column, w, width, pad) for tensor, w in zip(tensors, widths, strict=True)]
    stacked = _stack(name, tensors)
    return StoredColumn(stacked if rows is None else stacked[torch.from_numpy(rows)])


def _common_padding(column: Column, parts: Sequence[Columns]) -> float:
    """Return the padding value of a column in the parts, so that padding never mixes two values."""
    for part in parts:
        spans = read_spans(part)
        if spans is not None:
            region = regions_of(spans)[column.alignment]
            pad = part.stored[column.name].to_ragged(column, *region).pad
            if pad is not None:
                return pad
    return column.pad


def _widen(tensor: Tensor, column: Column, own: Widths, width: Widths, pad: float) -> Tensor:
    """Pad a declared column from the widths of its batch to other widths."""
    left = (width.prompt or 0) - own.prompt if own.prompt is not None else 0
    right = (width.response or 0) - own.response if own.response is not None else 0
    before = left if column.alignment in ("prompt", "sequence") else 0
    after = right if column.alignment in ("response", "sequence") else 0
    return functional.pad(tensor, (0, 0) * (tensor.dim() - 2) + (before, after), value=pad)


def _stack(name: str, tensors: list[Tensor]) -> Tensor:
    first = tensors[0]
    for tensor in tensors[1:]:
        if tensor.shape[1:] != first.shape[1:] or tensor.dtype != first.dtype:
            raise DataError(
                f"column {name!r} cannot be joined: {list(first.shape)} {first.dtype} and "
                f"{list(tensor.shape)} {tensor.dtype}; only the columns of megarl.data.COLUMNS may differ in width",
                code="batch.join-shapes",
            )
    return torch.cat(tensors)


def _is_attached(values: object) -> bool:
    return isinstance(values, RemoteValues) and values.attached


def _dense(tensor: Tensor) -> DenseColumn:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return DenseColumn(data, tuple(tensor.shape), dtype_name(tensor.dtype))


def _unpack(packed: RaggedColumn | DenseColumn) -> StoredColumn:
    """Restore a column; arrays out of shared memory are read-only, and values are copied when they are read."""
    if isinstance(packed, RaggedColumn):
        starts = None if packed.starts is None else writeable(packed.starts)
        return StoredColumn(None, packed._replace(lengths=writeable(packed.lengths), starts=starts))
    data, dtype = writeable(packed.data), getattr(torch, packed.dtype)
    if not data.size:  # numpy gives an empty array a stride that torch refuses to view
        return StoredColumn(torch.empty(packed.shape, dtype=dtype))
    return StoredColumn(torch.from_numpy(data).view(dtype).reshape(packed.shape))
