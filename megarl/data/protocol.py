"""``DataProto``: the batch that travels between the driver and the workers."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from megarl.data.columns import column_widths
from megarl.data.joining import join_rows, merge_mappings, require_same_keys
from megarl.data.wire import PackedBatch, pack_columns, unpack_columns
from megarl.errors import DataError

Index = int | slice | Sequence[int] | np.ndarray | Tensor


@dataclass(eq=False)
class DataProto:
    """Rows of tensors and of Python objects, with facts about the whole batch beside them.

    Methods return new batches and leave this one alone, except :meth:`pop`; new batches may share memory with the old.
    Pickling sends no padding (see ``megarl.data.wire``).

    Attributes:
        batch: tensors whose first dimension is the row; None where a batch has none.
        non_tensor_batch: object arrays ``[rows]``.
        meta_info: anything that holds for all rows.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = len(self)
        for name, values in self.non_tensor_batch.items():
            if not isinstance(values, np.ndarray) or values.dtype != object or values.ndim != 1:
                raise DataError(f"non-tensor column {name!r} must be an object array [rows], got {values!r:.200}")
            _check_rows(f"non-tensor column {name!r}", len(values), rows)
        both = sorted(self.non_tensor_batch.keys() & self.tensors.keys())
        if both:
            raise DataError(f"columns {both} are both tensors and non-tensors; rename one of each")
        column_widths(self.tensors)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """A batch of these columns.

        Args:
            tensors: each ``[b, ...]``.
            non_tensors: each a sequence or array of b values, of any type.
            meta_info: copied.

        Raises:
            DataError: columns differ in their number of rows, a tensor is no tensor or has no row dimension, or a
                declared column has the wrong shape.
        """
        tensors, non_tensors = dict(tensors or {}), non_tensors or {}
        rows = None
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor) or tensor.dim() == 0:
                raise DataError(f"column {name!r} must be a tensor with one entry per row, got {tensor!r:.200}")
            rows = len(tensor) if rows is None else rows
            _check_rows(f"column {name!r}", len(tensor), rows)
        objects = {name: object_array(values) for name, values in non_tensors.items()}
        batch = TensorDict(tensors, batch_size=[rows or 0]) if tensors else None
        return cls(batch, objects, dict(meta_info or {}))

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Tensor | Sequence[Any] | np.ndarray], meta_info: Mapping[str, Any] | None = None
    ) -> DataProto:
        """A batch of mixed columns: tensors become tensor columns, everything else non-tensor columns."""
        tensors = {name: values for name, values in data.items() if isinstance(values, Tensor)}
        others = {name: values for name, values in data.items() if not isinstance(values, Tensor)}
        return cls.from_dict(tensors, others, meta_info)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensor columns by name; empty where there are none."""
        return {} if self.batch is None else dict(self.batch.items())

    def __len__(self) -> int:
        """Number of rows."""
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return len(next(iter(self.non_tensor_batch.values()), ()))

    def __getitem__(self, index: Index) -> DataProto:
        """The rows at a position (a batch of one row), a slice, a list of positions, or where a mask is True.

        Raises:
            IndexError: a position is outside the batch.
            DataError: a mask has another length than the batch.
        """
        rows = _row_selector(index, len(self))
        batch = None
        if self.batch is not None:
            batch = self.batch[rows if isinstance(rows, slice) else torch.from_numpy(rows)]
        return DataProto(batch, {k: v[rows] for k, v in self.non_tensor_batch.items()}, dict(self.meta_info))

    def __iter__(self) -> Iterator[DataProto]:
        """Batches of one row each."""
        return (self[row] for row in range(len(self)))

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """A batch with only these keys; None keeps all of a kind.

        Raises:
            DataError: a key is not there.
        """
        batch = self.batch
        if batch_keys is not None:
            picked = _pick(self.tensors, batch_keys, "tensor column")
            batch = TensorDict(picked, batch_size=[len(self)]) if self.batch is not None else None
        objects, meta = self.non_tensor_batch, self.meta_info
        if non_tensor_batch_keys is not None:
            objects = _pick(objects, non_tensor_batch_keys, "non-tensor column")
        if meta_info_keys is not None:
            meta = _pick(meta, meta_info_keys, "meta_info key")
        return DataProto(batch, dict(objects), dict(meta))

    def pop(
        self,
        batch_keys: Sequence[str] = (),
        non_tensor_batch_keys: Sequence[str] = (),
        meta_info_keys: Sequence[str] = (),
    ) -> DataProto:
        """Take these keys out of this batch and return them as a batch of their own.

        Raises:
            DataError: a key is not there; nothing has been taken then.
        """
        taken = self.select(batch_keys, non_tensor_batch_keys, meta_info_keys)
        if self.batch is not None:
            self.batch = self.batch.exclude(*batch_keys)
        for mapping, keys in ((self.non_tensor_batch, non_tensor_batch_keys), (self.meta_info, meta_info_keys)):
            for key in keys:
                del mapping[key]
        return taken

    def with_columns(
        self,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
    ) -> DataProto:
        """This batch with columns added or replaced.

        Raises:
            DataError: a column has another number of rows, or the wrong shape.
        """
        merged = {**self.tensors, **(tensors or {})}
        return DataProto.from_dict(merged, {**self.non_tensor_batch, **(non_tensors or {})}, self.meta_info)

    def union(self, other: DataProto) -> DataProto:
        """The columns of both batches side by side.

        Raises:
            DataError: the batches differ in rows, or both have a key with different values.
        """
        _check_rows("the other batch", len(other), len(self))
        tensors = merge_mappings([self.tensors, other.tensors], "tensor column")
        objects = merge_mappings([self.non_tensor_batch, other.non_tensor_batch], "non-tensor column")
        return DataProto.from_dict(tensors, objects, merge_mappings([self.meta_info, other.meta_info], "meta_info key"))

    def repeat(self, times: int, interleave: bool = True) -> DataProto:
        """Each row ``times`` times: ``a a b b`` interleaved, ``a b a b`` otherwise.

        Raises:
            DataError: ``times`` is below 1.
        """
        if times < 1:
            raise DataError(f"times must be at least 1, got {times}")
        rows = np.arange(len(self))
        return self[np.repeat(rows, times) if interleave else np.tile(rows, times)]

    def reorder(self, indices: Sequence[int] | np.ndarray | Tensor) -> DataProto:
        """Row ``i`` of the result is row ``indices[i]`` of this batch.

        Raises:
            DataError: ``indices`` does not name each row once.
        """
        order = np.asarray(indices, dtype=np.int64)
        if not np.array_equal(np.sort(order), np.arange(len(self))):
            raise DataError(f"indices must name each of the {len(self)} rows once, got {order.tolist()!s:.200}")
        return self[order]

    def split(self, sizes: Sequence[int]) -> list[DataProto]:
        """Consecutive parts of these sizes.

        Raises:
            DataError: the sizes do not add up to the batch.
        """
        if sum(sizes) != len(self) or min(sizes, default=0) < 0:
            raise DataError(f"sizes must add up to the {len(self)} rows of the batch, got {list(sizes)}")
        ends = np.cumsum(sizes).tolist()
        return [self[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def chunk(self, chunks: int) -> list[DataProto]:
        """``chunks`` consecutive parts of equal size.

        Raises:
            DataError: the rows do not divide; :meth:`pad_to_divisor` makes them.
        """
        if chunks < 1 or len(self) % chunks:
            raise DataError(f"{len(self)} rows cannot be cut into {chunks} equal chunks; use pad_to_divisor or split")
        return self.split([len(self) // chunks] * chunks)

    @staticmethod
    def concat(parts: Sequence[DataProto]) -> DataProto:
        """The rows of all parts below each other; declared columns are padded to the widest part.

        Raises:
            DataError: there are no parts, their columns differ, or two have different values for a meta_info key.
        """
        if not parts:
            raise DataError("concat needs at least one part")
        if len({part.batch is None for part in parts}) > 1:
            raise DataError("some parts have tensors and others have none; add or drop them")
        require_same_keys([part.non_tensor_batch.keys() for part in parts], "non-tensor columns")
        rows = sum(map(len, parts))
        batch = None
        if parts[0].batch is not None:
            batch = TensorDict(join_rows([part.tensors for part in parts]), batch_size=[rows])
        names = parts[0].non_tensor_batch
        objects = {name: np.concatenate([part.non_tensor_batch[name] for part in parts]) for name in names}
        return DataProto(batch, objects, merge_mappings([part.meta_info for part in parts], "meta_info key"))

    def pad_to_divisor(self, divisor: int) -> tuple[DataProto, int]:
        """This batch with its first rows repeated until ``divisor`` divides its length, and how many were added.

        Raises:
            DataError: the divisor is below 1, or the batch has no row to repeat.
        """
        if divisor < 1 or not len(self):
            raise DataError(f"cannot pad {len(self)} rows to a multiple of {divisor}; both must be at least 1")
        added = -len(self) % divisor
        return (self[np.arange(len(self) + added) % len(self)] if added else self), added

    def unpad(self, added: int) -> DataProto:
        """This batch without its last ``added`` rows; undoes :meth:`pad_to_divisor`.

        Raises:
            DataError: there are fewer rows than that.
        """
        if not 0 <= added <= len(self):
            raise DataError(f"cannot take {added} rows off a batch of {len(self)}")
        return self[: len(self) - added]

    def __reduce__(self) -> tuple[Any, ...]:
        packed = None if self.batch is None else pack_columns(self.tensors)
        return _restore, (packed, len(self), self.non_tensor_batch, self.meta_info)


def _restore(
    packed: PackedBatch | None, rows: int, objects: dict[str, np.ndarray], meta_info: dict[str, Any]
) -> DataProto:
    batch = None if packed is None else TensorDict(unpack_columns(packed), batch_size=[rows])
    return DataProto(batch, objects, meta_info)


def object_array(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """One-dimensional object array of the values; lists and arrays among them stay whole."""
    if isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1:
        return values
    array = np.empty(len(values), dtype=object)
    # assigned one by one, because numpy would turn nested lists into further dimensions
    for row, value in enumerate(values):
        array[row] = value.item() if isinstance(value, np.generic) else value
    return array


def _check_rows(what: str, rows: int, wanted: int) -> None:
    if rows != wanted:
        raise DataError(f"{what} has {rows} rows; the batch has {wanted}")


def _pick(mapping: Mapping[str, Any], keys: Sequence[str], what: str) -> dict[str, Any]:
    for key in keys:
        if key not in mapping:
            near = difflib.get_close_matches(key, mapping, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise DataError(f"{what} {key!r} is not in the batch; {hint}there are {sorted(mapping)}")
    return {key: mapping[key] for key in keys}


def _row_selector(index: Index, rows: int) -> slice | np.ndarray:
    """The index as a slice or as an array of row positions, checked against the number of rows."""
    if isinstance(index, slice):
        return index if index.step is None or index.step > 0 else np.arange(rows)[index].copy()
    if isinstance(index, int | np.integer):
        index = [int(index)]
    positions = np.asarray(index)
    if positions.dtype == bool:
        if positions.shape != (rows,):
            raise DataError(f"a mask must have one flag for each of the {rows} rows, got shape {list(positions.shape)}")
        return positions.nonzero()[0]
    positions = positions.astype(np.int64).reshape(-1)
    if len(positions) and not -rows <= positions.min() <= positions.max() < rows:
        raise IndexError(f"rows {positions.min()} to {positions.max()} are outside a batch of {rows}")
    return positions % rows if rows else positions
