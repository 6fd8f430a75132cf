"""``DataProto``: the batch that travels between the driver and the workers."""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from megarl.base.errors import DataError
from megarl.data.column_store import Columns, PackedColumns, StoredColumn, join_rows, merge_mappings, require_same_keys
from megarl.data.columns import COLUMNS, Alignment, Spans, column_widths
from megarl.data.ragged import RaggedColumn, TerminalValues, dtype_name, regions_of, row_starts

if TYPE_CHECKING:
    from tensordict import TensorDict

Index = int | slice | Sequence[int] | np.ndarray | Tensor
PARTITION_COLUMNS = {"attention_mask", "responses", "rejected", "kl_sequence", "prompts", "uid"}
"""Columns that a partition of the rows depends on."""


class DataProto:
    """Rows of tensors and Python objects, with metadata of the whole batch.

    Methods return new batches and do not change this one, except :meth:`pop`; new batches may share memory with the old
    one. Token columns have no padding: :meth:`padded` copies one to a padded tensor, :meth:`packed` reads it without.

    Args:
        batch: tensors ``[rows, ...]`` by column; None if the batch has no tensors.
        non_tensor_batch: object arrays ``[rows]`` by column.

    Attributes:
        tensors: the tensor columns by name; each read copies, like :meth:`padded`.
        partitions: partitions of the rows over data-parallel ranks, by request; see :mod:`megarl.cluster.partition`.
            Batches with the same rows and lengths share them.

    Raises:
        DataError: columns differ in their number of rows, or share a name.
    """

    def __init__(
        self,
        batch: Mapping[str, Tensor] | TensorDict | None = None,
        non_tensor_batch: dict[str, np.ndarray] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> None:
        self.tensors = batch if isinstance(batch, Columns) else Columns({} if batch is None else dict(batch.items()))
        self.partitions: dict[Hashable, Any] = {}
        self.non_tensor_batch = {} if non_tensor_batch is None else non_tensor_batch
        self.meta_info = {} if meta_info is None else meta_info
        rows, shapes = len(self), self.tensors.shapes
        for name, tensor in shapes.items():
            _check_rows(f"column {name!r}", len(tensor), rows)
        for name, values in self.non_tensor_batch.items():
            if not isinstance(values, np.ndarray) or values.dtype != object or values.ndim != 1:
                text = f"non-tensor column {name!r} must be an object array [rows], got {values!r:.200}"
                raise DataError(text, code="batch.column-type")
            _check_rows(f"non-tensor column {name!r}", len(values), rows)
        both = sorted(self.non_tensor_batch.keys() & shapes.keys())
        if both:
            raise DataError(f"{both} are tensor and non-tensor columns; rename one of each", code="batch.column-twice")
        column_widths(shapes)

    @property
    def batch(self) -> Columns:
        """Another name of :attr:`tensors`, which verl's users know."""
        return self.tensors

    def padded(self, name: str) -> Tensor:
        """Copy a column to a tensor ``[rows, ...]``, a declared one with padding (:mod:`megarl.data.columns`).

        Changes of the copy do not reach the batch; :meth:`with_columns` returns a batch with other values.

        Raises:
            DataError: the batch has no such column.
        """
        _pick(self.tensors.stored, [name], "tensor column")
        return self.tensors[name]

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """Build a batch from columns.

        Args:
            tensors: each ``[b, ...]``.
            non_tensors: each a sequence or array of b values, of any type.

        Raises:
            DataError: columns differ in their number of rows, a value is not a tensor or has no row dimension, or a
                declared column has the wrong shape.
        """
        tensors, non_tensors = _checked(tensors or {}), non_tensors or {}
        objects = {name: object_array(values) for name, values in non_tensors.items()}
        return cls(tensors, objects, dict(meta_info or {}))

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Tensor | Sequence[Any] | np.ndarray], meta_info: Mapping[str, Any] | None = None
    ) -> DataProto:
        """Build a batch from mixed columns: tensors become tensor columns, other values non-tensor columns."""
        tensors = {name: values for name, values in data.items() if isinstance(values, Tensor)}
        others = {name: values for name, values in data.items() if not isinstance(values, Tensor)}
        return cls.from_dict(tensors, others, meta_info)

    def unpadded(self, name: str, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return a declared column's entries by row, each ``[length, ...]``; see :meth:`packed`."""
        return list(self.packed(name, dtype).split(self.row_lengths(name).tolist()))

    def row_lengths(self, name: str) -> Tensor:
        """Count a declared column's entries by row, ``[b]`` int64; reads no values."""
        lengths, _ = regions_of(self._spans(name))[self._alignment(name)]
        return torch.from_numpy(lengths)

    def packed(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a declared column's entries in row order, ``[sum of lengths, ...]``.

        Do not change them in place: they may be a view of the column.

        Response-aligned columns have the lengths of ``sequence_lengths(batch)[1]``.

        Args:
            dtype: of the result; None = the column's.

        Raises:
            DataError: the batch has no ``attention_mask``, or one with holes.
        """
        spans, stored, alignment = self._spans(name), self.tensors.stored[name], self._alignment(name)
        lengths, starts = regions_of(spans)[alignment]
        if isinstance(stored, RaggedColumn):
            if np.array_equal(stored.lengths, lengths):
                return stored.flat(dtype)
            stored = stored.padded()
        begins = row_starts(alignment, spans.prompt_width, lengths, starts)
        ends = (begins + lengths).tolist()
        rows = [row[start:end] for row, start, end in zip(stored, begins.tolist(), ends, strict=True)]
        return torch.cat(rows).to(dtype) if rows else stored.new_empty((0, *stored.shape[2:]), dtype=dtype)

    def with_packed(self, tokens: Mapping[str, Tensor]) -> DataProto:
        """Return this batch with declared columns added or replaced, from packed values; see :meth:`packed`.

        Raises:
            DataError: the batch has no ``attention_mask``, or a column has another number of values.
        """
        return self.with_columns(self.token_columns(tokens).tensors)

    def ends(self, name: str) -> Tensor | None:
        """Return each row's last value in a column from :meth:`with_ends`, ``[b]``; None for another column."""
        stored = self.tensors.stored[name]
        if not isinstance(stored, RaggedColumn) or not isinstance(stored.values, TerminalValues):
            return None
        return torch.from_numpy(np.where(stored.lengths > 0, stored.values.ends, 0))

    def with_ends(self, ends: Mapping[str, Tensor]) -> DataProto:
        """Return this batch with declared columns added or replaced that are zero except at the last entry of a row.

        Args:
            ends: ``[b]`` value at the last entry of each row, by column, such as scores of responses.

        Raises:
            DataError: the batch has no ``attention_mask``.
        """
        columns: dict[str, StoredColumn] = {}
        for name, values in ends.items():
            column, (lengths, starts, width) = COLUMNS[name], self._region(name)
            stored = TerminalValues(values.detach().cpu().numpy())
            dtype = dtype_name(values.dtype)
            columns[name] = RaggedColumn(stored, lengths, starts, width, dtype, column.alignment, None, column.pad)
        return self.with_columns(Columns(columns))

    def token_columns(self, tokens: Mapping[str, Tensor]) -> DataProto:
        """Build a batch from only the columns that :meth:`with_packed` would add."""
        columns: dict[str, StoredColumn] = {}
        for name, values in tokens.items():
            lengths, starts, width = self._region(name)
            if len(values) != lengths.sum():
                text = f"column {name!r} has {len(values)} values; its rows have {lengths.sum()} tokens"
                raise DataError(text, code="batch.column-tokens")
            columns[name] = RaggedColumn.of_flat(COLUMNS[name], values, lengths, starts, width)
        return DataProto(Columns(columns))

    def _alignment(self, name: str) -> Alignment:
        stored = self.tensors.stored[name]
        return stored.alignment if isinstance(stored, RaggedColumn) else COLUMNS[name].alignment

    def _spans(self, name: str) -> Spans:
        if self.tensors.spans is None:
            text = f"rows of {name!r} without padding need 'attention_mask'; there are {sorted(self.tensors)}"
            raise DataError(text, code="batch.missing-column")
        return self.tensors.spans

    def _region(self, name: str) -> tuple[np.ndarray, np.ndarray | None, int]:
        """Return lengths, starts and width that a new column has; see :class:`RaggedColumn`."""
        alignment, spans = COLUMNS[name].alignment, self._spans(name)
        lengths, starts = regions_of(spans)[alignment]
        for ragged in self.tensors.ragged.values():
            if ragged.alignment == alignment and np.array_equal(ragged.lengths, lengths):
                lengths = ragged.lengths  # columns that share an array are sent with one
                break
        widths = {"prompt": spans.prompt_width, "response": spans.response_width}
        return lengths, starts, widths.get(alignment, sum(widths.values()))

    def __len__(self) -> int:
        """Number of rows."""
        return self.tensors.num_rows if self.tensors else len(next(iter(self.non_tensor_batch.values()), ()))

    def __getitem__(self, index: Index) -> DataProto:
        """Select rows by position (a batch of one row), slice, list of positions, or boolean mask.

        Raises:
            IndexError: a position is outside the batch.
            DataError: a mask has another length than the batch.
        """
        rows = _row_selector(index, len(self))
        objects = {name: values[rows] for name, values in self.non_tensor_batch.items()}
        return DataProto(self.tensors.take(rows), objects, dict(self.meta_info))

    def __iter__(self) -> Iterator[DataProto]:
        """Iterate over batches of one row each."""
        return (self[row] for row in range(len(self)))

    def parts(self, rows: Sequence[Sequence[int]]) -> list[DataProto]:
        """Select rows for several receivers, like ``[batch[part] for part in rows]``, without padding.

        Raises:
            IndexError: a position is outside the batch.
            DataError: the attention mask has holes, or the padding of a column contains several values.
        """
        ragged = DataProto(self.tensors.to_ragged(), self.non_tensor_batch, self.meta_info)
        return [ragged[part] for part in rows]

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Select keys; None keeps all keys of a kind.

        Raises:
            DataError: a key is missing.
        """
        columns = self.tensors
        if batch_keys is not None:
            columns = Columns(_pick(columns.stored, batch_keys, "tensor column"))
        objects, meta = self.non_tensor_batch, self.meta_info
        if non_tensor_batch_keys is not None:
            objects = _pick(objects, non_tensor_batch_keys, "non-tensor column")
        if meta_info_keys is not None:
            meta = _pick(meta, meta_info_keys, "meta_info key")
        return self._same_rows(DataProto(columns, dict(objects), dict(meta)))

    def present(self, names: Sequence[str]) -> DataProto:
        """Select columns of both kinds, if the batch has them; metadata is kept."""
        kinds = (self.tensors.stored, self.non_tensor_batch)
        return self.select(*([name for name in names if name in kind] for kind in kinds))

    def pop(
        self,
        batch_keys: Sequence[str] = (),
        non_tensor_batch_keys: Sequence[str] = (),
        meta_info_keys: Sequence[str] = (),
    ) -> DataProto:
        """Remove keys from this batch and return them as a new batch.

        Raises:
            DataError: a key is missing; the batch is then unchanged.
        """
        taken = self.select(batch_keys, non_tensor_batch_keys, meta_info_keys)
        if PARTITION_COLUMNS & {*batch_keys, *non_tensor_batch_keys}:
            self.partitions = {}
        self.tensors = self.tensors.only([name for name in self.tensors if name not in batch_keys])
        for mapping, keys in ((self.non_tensor_batch, non_tensor_batch_keys), (self.meta_info, meta_info_keys)):
            for key in keys:
                del mapping[key]
        return taken

    def with_columns(
        self,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
    ) -> DataProto:
        """Return this batch with columns added or replaced.

        Raises:
            DataError: a column has another number of rows, or the wrong shape.
        """
        merged = self.tensors.merged(_checked(tensors or {}))
        objects = {name: object_array(values) for name, values in (non_tensors or {}).items()}
        result = DataProto(merged, {**self.non_tensor_batch, **objects}, dict(self.meta_info))
        return self._same_rows(result, replaced={*(tensors or ()), *objects})

    def union(self, other: DataProto) -> DataProto:
        """Merge the columns of two batches.

        Raises:
            DataError: the batches differ in rows, or both have a key with different values.
        """
        _check_rows("the other batch", len(other), len(self))
        mine, theirs = self.tensors, other.tensors
        both = [name for name in theirs if name in mine and mine.stored[name] is not theirs.stored[name]]
        merge_mappings([{name: part[name] for name in both} for part in (mine, theirs)], "tensor column")
        objects = merge_mappings([self.non_tensor_batch, other.non_tensor_batch], "non-tensor column")
        columns = mine.merged(theirs.only([name for name in theirs if name not in mine]))
        meta = merge_mappings([self.meta_info, other.meta_info], "meta_info key")
        return self._same_rows(DataProto(columns, objects, meta))

    def _same_rows(self, result: DataProto, replaced: AbstractSet[str] = frozenset()) -> DataProto:
        """Share the partitions with a batch of the same rows, unless a column that they depend on differs."""
        if not replaced & PARTITION_COLUMNS and self._partition_columns() == result._partition_columns():
            result.partitions = self.partitions
        return result

    def _partition_columns(self) -> AbstractSet[str]:
        return PARTITION_COLUMNS & {*self.tensors, *self.non_tensor_batch}

    def repeat(self, times: int, interleave: bool = True) -> DataProto:
        """Repeat each row ``times`` times: ``a a b b`` interleaved, ``a b a b`` otherwise.

        Raises:
            DataError: ``times`` is below 1.
        """
        if times < 1:
            raise DataError(f"times must be at least 1, got {times}", code="batch.repeat-count")
        rows = np.arange(len(self))
        return self[np.repeat(rows, times) if interleave else np.tile(rows, times)]

    def reorder(self, indices: Sequence[int] | np.ndarray | Tensor) -> DataProto:
        """Permute rows: row ``i`` of the result is row ``indices[i]`` of this batch.

        Raises:
            DataError: ``indices`` is not a permutation of the rows.
        """
        order = np.asarray(indices, dtype=np.int64)
        if not np.array_equal(np.sort(order), np.arange(len(self))):
            text = f"indices must name each of the {len(self)} rows once, got {order.tolist()!s:.200}"
            raise DataError(text, code="batch.row-order")
        return self[order]

    def split(self, sizes: Sequence[int]) -> list[DataProto]:
        """Split into consecutive parts of the given sizes.

        Raises:
            DataError: the sizes do not add up to the batch.
        """
        if sum(sizes) != len(self) or min(sizes, default=0) < 0:
            raise DataError(f"the sizes {list(sizes)} must add up to {len(self)} rows", code="batch.split-sizes")
        ends = np.cumsum(sizes).tolist()
        return [self[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def chunk(self, chunks: int) -> list[DataProto]:
        """Split into ``chunks`` consecutive parts of equal size.

        Raises:
            DataError: the rows do not divide; use :meth:`pad_to_divisor` first.
        """
        if chunks < 1 or len(self) % chunks:
            text = f"{len(self)} rows cannot be cut into {chunks} equal chunks; use pad_to_divisor or split"
            raise DataError(text, code="batch.not-divisible")
        return self.split([len(self) // chunks] * chunks)

    @staticmethod
    def concat(parts: Sequence[DataProto], rows: np.ndarray | None = None) -> DataProto:
        """Concatenate the rows of all parts; declared columns are padded to the widest part.

        Args:
            parts: batches with the same columns.
            rows: positions in the concatenation that the result has, in order; None = all.

        Raises:
            DataError: there are no parts, their columns differ, or two have different values for a meta_info key.
        """
        if not parts:
            raise DataError("concat needs at least one part", code="batch.no-parts")
        require_same_keys([part.non_tensor_batch.keys() for part in parts], "non-tensor columns")
        columns = join_rows([part.tensors for part in parts], rows)
        names, chosen = parts[0].non_tensor_batch, slice(None) if rows is None else rows
        objects = {name: np.concatenate([part.non_tensor_batch[name] for part in parts])[chosen] for name in names}
        return DataProto(columns, objects, merge_mappings([part.meta_info for part in parts], "meta_info key"))

    def pad_to_divisor(self, divisor: int) -> tuple[DataProto, int]:
        """Repeat the first rows until ``divisor`` divides the length; return the batch and the number of added rows.

        Raises:
            DataError: the divisor is below 1, or the batch has no row to repeat.
        """
        if divisor < 1 or not len(self):
            raise DataError(f"cannot pad {len(self)} rows to a multiple of {divisor}", code="batch.pad-divisor")
        added = -len(self) % divisor
        return (self[np.arange(len(self) + added) % len(self)] if added else self), added

    def unpad(self, added: int) -> DataProto:
        """Drop the last ``added`` rows; the inverse of :meth:`pad_to_divisor`.

        Raises:
            DataError: the batch has fewer rows.
        """
        if not 0 <= added <= len(self):
            raise DataError(f"cannot take {added} rows off a batch of {len(self)}", code="batch.unpad-rows")
        return self[: len(self) - added]

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.tensors.pack(), self.non_tensor_batch, self.meta_info)


def _restore(packed: PackedColumns, objects: dict[str, np.ndarray], meta_info: dict[str, Any]) -> DataProto:
    return DataProto(Columns.unpack(packed), objects, meta_info)


def sequence_lengths(batch: DataProto) -> tuple[Tensor, Tensor]:
    """Count the prompt and response tokens of each row in ``attention_mask``.

    Returns:
        ``(prompt_lengths, response_lengths)``, both ``[b]`` int64; response lengths are 0 before generation.

    Raises:
        DataError: ``attention_mask`` or the columns that determine the widths are missing, or the mask has holes.
    """
    spans = batch.tensors.spans
    if spans is None:
        there = sorted(batch.tensors)
        text = f"sequence lengths need 'attention_mask' and 'prompts' or a response column; there are {there}"
        raise DataError(text, code="batch.missing-column")
    return spans.prompt_lengths, spans.response_lengths


def token_counts(batch: DataProto) -> list[int]:
    """Count the tokens of each row, prompt and response.

    Raises:
        DataError: see :func:`sequence_lengths`.
    """
    prompts, responses = sequence_lengths(batch)
    return (prompts + responses).tolist()


def object_array(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Build a one-dimensional object array of values; lists and arrays among them stay single entries."""
    if isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1:
        return values
    array = np.empty(len(values), dtype=object)
    # assigned one by one: numpy would turn nested lists into dimensions
    for row, value in enumerate(values):
        array[row] = value.item() if isinstance(value, np.generic) else value
    return array


def _checked(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Check that columns are tensors with one entry per row."""
    if isinstance(tensors, Columns):
        return tensors
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            text = f"column {name!r} must be a tensor with one entry per row, got {tensor!r:.200}"
            raise DataError(text, code="batch.column-type")
    return dict(tensors)


def _check_rows(what: str, rows: int, wanted: int) -> None:
    if rows != wanted:
        raise DataError(f"{what} has {rows} rows; the batch has {wanted}", code="batch.column-rows")


def _pick(mapping: Mapping[str, Any], keys: Sequence[str], what: str) -> dict[str, Any]:
    for key in keys:
        if key not in mapping:
            near = difflib.get_close_matches(key, mapping, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            text = f"{what} {key!r} is not in the batch; {hint}there are {sorted(mapping)}"
            raise DataError(text, code="batch.missing-column")
    return {key: mapping[key] for key in keys}


def _row_selector(index: Index, rows: int) -> slice | np.ndarray:
    """Convert an index to a slice or an array of row positions, checked against the number of rows."""
    if isinstance(index, slice):
        return index if index.step is None or index.step > 0 else np.arange(rows)[index].copy()
    if isinstance(index, int | np.integer):
        index = [int(index)]
    positions = np.asarray(index)
    if positions.dtype == bool:
        if positions.shape != (rows,):
            text = f"a mask must have one flag for each of the {rows} rows, got shape {list(positions.shape)}"
            raise DataError(text, code="batch.mask-shape")
        return positions.nonzero()[0]
    positions = positions.astype(np.int64).reshape(-1)
    if len(positions) and not -rows <= positions.min() <= positions.max() < rows:
        raise IndexError(f"rows {positions.min()} to {positions.max()} are outside a batch of {rows}")
    return positions % rows if rows else positions
