"""The tensor columns of a batch: ragged where declared.

A declared column is stored as flat values with a length per row, in the smallest integer type that holds them. Other
columns are stored as they are. Stored columns do not change, and batches share them: a padded tensor is a copy. A
payload contains numpy arrays only: a view never sends its complete storage, and Ray moves the bytes without a copy. It
describes itself; the receiver needs no declarations.

The values of a ragged column may be remote (:mod:`megarl.data.ragged`). Each read of a remote column fetches them.
Selections and concatenations do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from megarl.base.errors import DataError
from megarl.data.columns import COLUMNS, Column, Spans, Widths, column_widths, spans_of_mask
from megarl.data.ragged import (
    JoinedPlaces,
    RaggedColumn,
    Rows,
    RowSelection,
    dtype_name,
    join_ragged,
    regions_of,
    trimmed_lengths,
    without_padding,
    writeable,
)


class DenseColumn(NamedTuple):
    """A column that is sent as it is.

    Attributes:
        data: its bytes, ``uint8``; numpy has no bfloat16.
    """

    data: np.ndarray
    shape: tuple[int, ...]
    dtype: str


StoredColumn = RaggedColumn | Tensor
PackedColumns = dict[str, RaggedColumn | DenseColumn]
"""The tensors of a batch in transport."""


class Columns(Mapping[str, Tensor]):
    """The tensor columns of a batch by name; reading one copies it to a padded tensor.

    Args:
        stored: columns by name, all with the same number of rows.
    """

    def __init__(self, stored: Mapping[str, StoredColumn]) -> None:
        self.stored = dict(stored)

    @classmethod
    def unpack(cls, packed: PackedColumns) -> Columns:
        """Restore the columns of :meth:`pack`, on the CPU."""
        return cls({name: _unpack(column) for name, column in packed.items()})

    def __getitem__(self, name: str) -> Tensor:
        stored = self.stored[name]
        return stored.padded() if isinstance(stored, RaggedColumn) else stored.clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        text = f"columns of a batch do not change; use `batch = batch.with_columns({{{name!r}: ...}})`"
        raise DataError(text, code="batch.read-only")

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    @cached_property
    def shapes(self) -> dict[str, Tensor]:
        """Tensors without data, with the shapes and dtypes of the columns."""
        return {name: _without_data(column) for name, column in self.stored.items()}

    @property
    def ragged(self) -> dict[str, RaggedColumn]:
        """The columns that are stored without padding."""
        return {name: column for name, column in self.stored.items() if isinstance(column, RaggedColumn)}

    def only(self, names: Sequence[str]) -> Columns:
        """Select columns."""
        return Columns({name: self.stored[name] for name in names})

    def merged(self, others: Mapping[str, Tensor]) -> Columns:
        """Add or replace columns."""
        return Columns({**self.stored, **(others.stored if isinstance(others, Columns) else others)})

    @cached_property
    def spans(self) -> Spans | None:
        """Token spans of the rows; None without ``attention_mask`` or without columns that determine both widths.

        Raises:
            DataError: the mask of a row is not contiguous, or widths are inconsistent (see ``column_widths``).
        """
        if "attention_mask" not in self.stored:
            return None
        mask, widths = self.stored["attention_mask"], column_widths(self.shapes)
        if widths.prompt is None or widths.response is None:
            return None
        if isinstance(mask, Tensor):
            return spans_of_mask(mask, widths.prompt, widths.response)
        assert mask.starts is not None  # of every sequence-aligned column
        prompts = torch.from_numpy(widths.prompt - mask.starts)
        responses = torch.from_numpy(mask.lengths.astype(np.int64)) - prompts
        return Spans(widths.prompt, widths.response, prompts, responses)

    def take(self, rows: slice | np.ndarray) -> Columns:
        """Select rows."""
        selection = RowSelection(np.arange(self.num_rows)[rows] if isinstance(rows, slice) else rows)
        index = rows if isinstance(rows, slice) else torch.from_numpy(rows)
        return Columns(
            {
                name: column.take(selection) if isinstance(column, RaggedColumn) else column[index]
                for name, column in self.stored.items()
            }
        )

    def to_ragged(self) -> Columns:
        """Return all declared columns without padding, as far as it can be found, and the other columns as they are.

        Raises:
            DataError: the attention mask has holes, or the padding of a column contains several values.
        """
        return Columns({name: self.unpad(name) for name in self.stored})

    def pack(self) -> PackedColumns:
        """Return the columns without padding, for transport; see :meth:`to_ragged`.

        Remote values are read, unless their chunks are numbers (:func:`megarl.data.remote_columns.detach_chunks`).
        """
        return {
            name: column.local() if isinstance(column, RaggedColumn) else _dense(column)
            for name, column in self.to_ragged().stored.items()
        }

    def unpad(self, name: str) -> StoredColumn:
        """Return a column without padding, as far as it can be found; see :meth:`to_ragged`."""
        stored, declaration = self.stored[name], COLUMNS.get(name)
        if isinstance(stored, RaggedColumn) or declaration is None or declaration.alignment == "row":
            return stored
        tensor = stored.detach().cpu()
        if self.spans is not None:
            return without_padding(declaration, tensor, *regions_of(self.spans)[declaration.alignment])
        if declaration.alignment == "sequence":
            return stored
        return without_padding(declaration, tensor, trimmed_lengths(tensor, declaration), None)

    @property
    def num_rows(self) -> int:
        """Number of rows; 0 without columns."""
        return next((column.shape[0] for column in self.stored.values()), 0)


def ragged_columns(rows: Mapping[str, Rows], pads: Mapping[str, float]) -> Columns:
    """Build the columns of samples from their rows, with an ``attention_mask`` over all tokens.

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
    return Columns(columns)


def join_rows(parts: Sequence[Columns], rows: np.ndarray | None = None) -> Columns:
    """Concatenate the rows of several batches; declared columns get the width of the widest part.

    Args:
        rows: positions in the concatenation that the result has, in order; None = all.

    Raises:
        DataError: the parts have different columns, or an undeclared column differs in shape or dtype.
    """
    require_same_keys([part.keys() for part in parts], "tensor columns")
    widths = [column_widths(part.shapes) for part in parts]
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
    stored = [part.stored[name] for part in parts]
    ragged = [column for column in stored if isinstance(column, RaggedColumn)]
    kinds = {(column.dtype, column.alignment, column.trailing) for column in ragged}
    if len(ragged) == len(stored) and len(kinds) == 1:
        return join_ragged(ragged, widths, width, rows, joined)
    tensors, declaration = [part[name] for part in parts], COLUMNS.get(name)
    differ = any(own not in (width, Widths(None, None)) for own in widths)
    if declaration is not None and declaration.alignment != "row" and differ:
        pad = _common_padding(declaration, parts)
        tensors = [_widen(tensor, declaration, w, width, pad) for tensor, w in zip(tensors, widths, strict=True)]
    stacked = _stack(name, tensors)
    return stacked if rows is None else stacked[torch.from_numpy(rows)]


def _common_padding(column: Column, parts: Sequence[Columns]) -> float:
    """Return the padding value of a column in the parts, so that padding never mixes two values."""
    for part in parts:
        if part.spans is not None:
            stored = part.unpad(column.name)
            if isinstance(stored, RaggedColumn) and stored.pad is not None:
                return stored.pad
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


def _without_data(column: StoredColumn) -> Tensor:
    dtype = column.torch_dtype if isinstance(column, RaggedColumn) else column.dtype
    return torch.empty(column.shape, dtype=dtype, device="meta")


def _dense(tensor: Tensor) -> DenseColumn:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return DenseColumn(data, tuple(tensor.shape), dtype_name(tensor.dtype))


def _unpack(packed: RaggedColumn | DenseColumn) -> StoredColumn:
    """Restore a column; arrays out of shared memory are read-only."""
    if isinstance(packed, RaggedColumn):
        starts = None if packed.starts is None else writeable(packed.starts)
        return packed._replace(lengths=writeable(packed.lengths), starts=starts)
    data, dtype = writeable(packed.data), getattr(torch, packed.dtype)
    if not data.size:  # numpy gives an empty array a stride that torch refuses to view
        return torch.empty(packed.shape, dtype=dtype)
    return torch.from_numpy(data).view(dtype).reshape(packed.shape)


def require_same_keys(keys: Sequence[Any], kind: str) -> None:
    """Raise DataError for keys that some of the parts lack."""
    common, union = set(keys[0]).intersection(*keys[1:]), set().union(*keys)
    if common != union:
        raise DataError(f"some parts lack {kind} {sorted(union - common)}; add or drop them", code="batch.keys-differ")


def merge_mappings(parts: Sequence[Mapping[str, Any]], kind: str) -> dict[str, Any]:
    """Merge the entries of all parts.

    Raises:
        DataError: two parts have different values for a key.
    """
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if key in merged and not same_value(merged[key], value):
                raise DataError(f"{kind} {key!r} has two values; rename or drop one", code="batch.values-differ")
            merged[key] = value
    return merged


def same_value(first: Any, second: Any) -> bool:
    """Return whether two values are equal: tensors and arrays elementwise, with NaN equal to NaN."""
    if first is second:
        return True
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.shape != second.shape or first.dtype != second.dtype:
            return False
        return bool(((first == second) | ((first != first) & (second != second))).all())
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return first.shape == second.shape and all(map(same_value, first.flat, second.flat))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same_value(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple) and type(first) is type(second):
        return len(first) == len(second) and all(map(same_value, first, second))
    if isinstance(first, float) and isinstance(second, float) and first != first and second != second:
        return True
    return type(first) is type(second) and bool(first == second)
