"""Ragged columns: drop the padding of a batch for transport, restore it, and concatenate batches of different widths.

Declared columns travel as flat unpadded values with lengths, other columns as they are. Integers travel in the smallest
type that holds them. The payload contains numpy arrays only: a view never sends its complete storage, and Ray moves the
bytes without a copy. It describes itself; the receiver needs no declarations.

The padding of a declared column is found in one of two ways. With an ``attention_mask`` in the batch, its lengths apply
to all columns, and the mask itself is not sent. Without a mask (a worker that returns only log-probs), pad values are
trimmed from each row at the padded side. Either way the receiver's tensor equals the sender's.

A batch is split for many ranks without a padded copy of their rows: a :class:`RowSelection` packs its rows from the
columns of the whole batch.
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
from megarl.data.columns import COLUMNS, Alignment, Column, Widths, column_widths
from megarl.data.sequences import Spans, read_spans


class PackedColumn(NamedTuple):
    """A column in transport.

    Attributes:
        dtype: name of the torch dtype, such as ``bfloat16``.
        shape: shape of the padded tensor.
        data: bytes of the values, ``uint8``; None = all ones.
        alignment: None for an undeclared column, which keeps its padding.
        pad: padding value.
        lengths: ``[b]`` values per row; None if the spans of the batch apply.
        stored: name of the dtype in ``data``; empty: ``dtype``.
    """

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray | None
    alignment: Alignment | None = None
    pad: float = 0
    lengths: np.ndarray | None = None
    stored: str = ""


class _Region:
    """Unpadded entries of all columns of one alignment: ``[start, stop)`` of each row."""

    def __init__(self, spans: Spans, alignment: Alignment) -> None:
        self._spans, self._alignment = spans, alignment
        prompts, responses = spans.prompt_lengths.tolist(), spans.response_lengths.tolist()
        offset = 0 if alignment == "response" else spans.prompt_width
        self.starts = [offset - length for length in prompts] if alignment != "response" else [0] * len(prompts)
        self.stops = [offset + length for length in responses] if alignment != "prompt" else [offset] * len(prompts)

    @cached_property
    def mask(self) -> Tensor:
        """True for unpadded entries, ``[b, width]``."""
        return self._spans.mask(self._alignment)

    @cached_property
    def _index(self) -> Tensor:
        return self.mask.flatten().nonzero().flatten()

    def gather(self, padded: Tensor) -> Tensor:
        """Gather unpadded entries: ``[b, width, ...]`` to ``[entries, ...]``."""
        return padded.flatten(0, 1).index_select(0, self._index)

    def scatter(self, values: Tensor, shape: tuple[int, ...], pad: float) -> Tensor:
        """Restore the padded tensor; the inverse of :meth:`gather`."""
        padded = torch.full(shape, pad, dtype=values.dtype)
        padded.view(-1, *shape[2:])[self._index] = values.reshape(-1, *shape[2:])
        return padded


class PackedBatch(NamedTuple):
    """The tensors of a batch in transport: ``spans`` is ``(P, R, prompt lengths, response lengths)``."""

    columns: dict[str, PackedColumn]
    spans: tuple[int, int, np.ndarray, np.ndarray] | None


class RowSelection(Mapping[str, Tensor]):
    """Some rows of the columns of a batch: copied when a column is read, packed without a copy.

    Args:
        columns: of the whole batch.
        rows: ``[n]`` int64.
        spans: of the whole batch; None = without an ``attention_mask``.
    """

    def __init__(self, columns: Mapping[str, Tensor], rows: np.ndarray, spans: Spans | None) -> None:
        self.columns, self.rows, self.spans = columns, rows, spans

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name][torch.from_numpy(self.rows)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    def pack(self) -> PackedBatch:
        """Drop the padding of the rows; see :func:`pack_columns`."""
        if self.spans is None:
            return pack_columns(dict(self))
        prompts, responses = (
            lengths[torch.from_numpy(self.rows)] for lengths in (self.spans.prompt_lengths, self.spans.response_lengths)
        )
        spans = self.spans._replace(prompt_lengths=prompts, response_lengths=responses)
        return _pack_all(self.columns, self.rows, spans)


def pack_columns(tensors: Mapping[str, Tensor]) -> PackedBatch:
    """Drop the padding of all declared columns.

    Raises:
        DataError: the attention mask has holes, or the padding of a column contains several values.
    """
    return _pack_all(tensors, None, read_spans(tensors))


def _pack_all(tensors: Mapping[str, Tensor], rows: np.ndarray | None, spans: Spans | None) -> PackedBatch:
    """Pack all rows, or those of ``rows``, whose spans are given."""
    regions = _regions(spans, {COLUMNS[name].alignment for name in tensors.keys() & COLUMNS.keys()})
    columns = {name: _pack(name, tensor.detach().cpu(), rows, regions) for name, tensor in tensors.items()}
    if spans is None:
        return PackedBatch(columns, None)
    prompt, response = (lengths.numpy().astype(np.int32) for lengths in (spans.prompt_lengths, spans.response_lengths))
    return PackedBatch(columns, (spans.prompt_width, spans.response_width, prompt, response))


def unpack_columns(packed: PackedBatch) -> dict[str, Tensor]:
    """Restore the padded tensors of :func:`pack_columns`, on the CPU."""
    spans = None
    if packed.spans is not None:
        prompt_width, response_width, *lengths = packed.spans
        spans = Spans(prompt_width, response_width, *(torch.from_numpy(length.astype(np.int64)) for length in lengths))
    regions = _regions(spans, {column.alignment for column in packed.columns.values() if column.lengths is None})
    return {name: _unpack(column, regions) for name, column in packed.columns.items()}


def _regions(spans: Spans | None, alignments: set[Any]) -> dict[Alignment, _Region]:
    """Create a region per alignment from the spans of the batch; empty without spans."""
    if spans is None:
        return {}
    return {alignment: _Region(spans, alignment) for alignment in alignments if alignment not in (None, "row")}


def _pack(name: str, tensor: Tensor, rows: np.ndarray | None, regions: dict[Alignment, _Region]) -> PackedColumn:
    column = COLUMNS.get(name)
    if column is not None and tensor.dim() == 2 and column.alignment in regions and tensor.dtype != torch.bfloat16:
        return _pack_spans(column, tensor, rows, regions[column.alignment])
    tensor = tensor if rows is None else tensor[torch.from_numpy(rows)]
    dtype, shape = _dtype_name(tensor), tuple(tensor.shape)
    if column is None or column.alignment == "row" or (not regions and column.alignment == "sequence"):
        return PackedColumn(dtype, shape, _to_bytes(tensor))
    if not regions:
        lengths = _trimmed(tensor, column)
        values = _Region(_column_spans(column.alignment, shape[1], lengths), column.alignment).gather(tensor)
        packed_lengths = lengths.numpy().astype(np.int32)
        return PackedColumn(dtype, shape, _to_bytes(values), column.alignment, column.pad, packed_lengths)
    region = regions[column.alignment]
    pad = padding_value(tensor, region.mask, column)
    real = _to_bytes(region.gather(tensor))
    return PackedColumn(dtype, shape, real, column.alignment, column.pad if pad is None else pad)


def _pack_spans(column: Column, tensor: Tensor, rows: np.ndarray | None, region: _Region) -> PackedColumn:
    """Pack a column ``[b, width]`` row by row: one copy of its values, and one look at its padding."""
    numbers = range(len(tensor)) if rows is None else rows.tolist()
    values, pads, width = tensor.numpy(), list[Any](), tensor.shape[1]
    real = [values[row, start:stop] for row, start, stop in zip(numbers, region.starts, region.stops, strict=True)]
    for row, start, stop in zip(numbers, region.starts, region.stops, strict=True):
        for part in (values[row, :start], values[row, stop:]):
            if part.size:
                pads.append(part[0])
                if (part != pads[0]).any():
                    raise _several_paddings(column, row)
    joined = np.concatenate(real) if real else values[:0].reshape(-1)
    dtype, shape = _dtype_name(tensor), (len(numbers), width)
    pad = pads[0].item() if pads else column.pad
    if column.name == "attention_mask" and (joined == 1).all():
        return PackedColumn(dtype, shape, None, column.alignment)
    stored = _narrowest(joined)
    data = joined.astype(stored, copy=False).view(np.uint8)
    return PackedColumn(dtype, shape, data, column.alignment, pad, None, "" if stored == joined.dtype else stored.name)


def _narrowest(values: np.ndarray) -> np.dtype[Any]:
    """Return the smallest integer type that holds int64 values; other types are kept."""
    if values.dtype != np.int64 or not values.size:
        return values.dtype
    low, high = values.min(), values.max()
    kinds = (np.dtype(name) for name in ("int8", "int16", "int32"))
    return next((kind for kind in kinds if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max), values.dtype)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _several_paddings(column: Column, row: int) -> DataError:
    return DataError(
        f"column {column.name!r}, row {row}: entries outside attention_mask hold several values and would be "
        f"lost in transport; set them to {column.pad:g}"
    )


def _unpack(packed: PackedColumn, regions: dict[Alignment, _Region]) -> Tensor:
    dtype = getattr(torch, packed.dtype)
    if packed.alignment is None:
        assert packed.data is not None  # only an aligned mask is sent without data
        return _from_bytes(packed.data, dtype).reshape(packed.shape)
    if packed.lengths is None:
        region = regions[packed.alignment]
    else:
        spans = _column_spans(packed.alignment, packed.shape[1], torch.from_numpy(packed.lengths.astype(np.int64)))
        region = _Region(spans, packed.alignment)
    if packed.data is None:
        return region.mask.to(dtype)
    values = _from_bytes(packed.data, getattr(torch, packed.stored or packed.dtype)).to(dtype)
    return region.scatter(values, packed.shape, packed.pad)


def padding_value(tensor: Tensor, mask: Tensor, column: Column) -> float | None:
    """Return the padding value of a column; None if it has no padding.

    Args:
        tensor: ``[b, width, ...]``.
        mask: ``[b, width]``, True for unpadded entries.
        column: its declaration, for the error.

    Raises:
        DataError: the padding contains more than one value.
    """
    if bool(mask.all()) or not tensor.numel():
        return None
    row, column_number = divmod(int(mask.flatten().int().argmin()), mask.shape[1])
    pad = tensor[row, column_number].flatten()[0]
    others = _anywhere(tensor != pad) & ~mask
    if bool(others.any()):
        raise _several_paddings(column, int(others.any(-1).nonzero()[0]))
    return pad.item()


def _trimmed(tensor: Tensor, column: Column) -> Tensor:
    """Count the entries of each row ``[b]`` without the pad values at the padded side."""
    kept = _anywhere(tensor != column.pad)
    width = kept.shape[1]
    if width == 0:
        return torch.zeros(len(kept), dtype=torch.int64)
    # argmax finds the first True; from the padded side that is the first value
    from_padded_side = kept if column.alignment == "prompt" else kept.flip(1)
    return torch.where(kept.any(1), width - from_padded_side.int().argmax(1), 0)


def _anywhere(flags: Tensor) -> Tensor:
    """Reduce ``[b, width, ...]`` to ``[b, width]``: whether any flag of an entry is set."""
    return flags.flatten(2).any(-1) if flags.dim() > 2 else flags


def _column_spans(alignment: Alignment, width: int, lengths: Tensor) -> Spans:
    zeros = torch.zeros_like(lengths)
    if alignment == "prompt":
        return Spans(width, 0, lengths, zeros)
    return Spans(0, width, zeros, lengths)


def _to_bytes(tensor: Tensor) -> np.ndarray:
    # as bytes, because numpy has no bfloat16
    return tensor.contiguous().flatten().view(torch.uint8).numpy()


def _from_bytes(data: np.ndarray, dtype: torch.dtype) -> Tensor:
    # arrays out of shared memory are read-only, and torch tensors cannot be
    if not data.size:  # numpy gives an empty array a stride that torch refuses to view
        return torch.empty(0, dtype=dtype)
    return torch.from_numpy(data if data.flags.writeable else data.copy()).view(dtype)


def join_rows(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the rows of several batches; declared columns are padded to the widest part.

    Raises:
        DataError: the parts have different columns, or an undeclared column differs in shape or dtype.
    """
    require_same_keys([part.keys() for part in parts], "tensor columns")
    widths = [column_widths(part) for part in parts]
    prompt = max((w.prompt or 0 for w in widths), default=0)
    response = max((w.response or 0 for w in widths), default=0)
    if any(width not in (Widths(prompt, response), Widths(None, None)) for width in widths):
        pads = _paddings(parts)
        parts = [_widen(part, width, prompt, response, pads) for part, width in zip(parts, widths, strict=True)]
    return {name: _stack(name, [part[name] for part in parts]) for name in parts[0]}


def _paddings(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Padding value of each declared column in the parts, so that padding never mixes two values."""
    pads: dict[str, float] = {}
    for part in parts:
        spans = read_spans(part)
        for name in part.keys() & COLUMNS.keys() - pads.keys():
            column = COLUMNS[name]
            if spans is None or column.alignment == "row":
                continue
            pad = padding_value(part[name], spans.mask(column.alignment), column)
            if pad is not None:
                pads[name] = pad
    return pads


def _widen(
    part: Mapping[str, Tensor], widths: Widths, prompt: int, response: int, pads: Mapping[str, float]
) -> dict[str, Tensor]:
    """Pad the declared columns of a part to the widths ``prompt`` and ``response``."""
    left = prompt - widths.prompt if widths.prompt is not None else 0
    right = response - widths.response if widths.response is not None else 0
    result = {}
    for name, tensor in part.items():
        column = COLUMNS.get(name)
        if column is None or column.alignment == "row":
            result[name] = tensor
            continue
        before = left if column.alignment in ("prompt", "sequence") else 0
        after = right if column.alignment in ("response", "sequence") else 0
        result[name] = functional.pad(
            tensor, (0, 0) * (tensor.dim() - 2) + (before, after), value=pads.get(name, column.pad)
        )
    return result


def _stack(name: str, tensors: list[Tensor]) -> Tensor:
    first = tensors[0]
    for tensor in tensors[1:]:
        if tensor.shape[1:] != first.shape[1:] or tensor.dtype != first.dtype:
            raise DataError(
                f"column {name!r} cannot be joined: {list(first.shape)} {first.dtype} and "
                f"{list(tensor.shape)} {tensor.dtype}; only the columns of megarl.data.COLUMNS may differ in width"
            )
    return torch.cat(tensors)


def require_same_keys(keys: Sequence[Any], kind: str) -> None:
    """Raise DataError for keys that some of the parts lack."""
    common, union = set(keys[0]).intersection(*keys[1:]), set().union(*keys)
    if common != union:
        raise DataError(f"{kind} {sorted(union - common)} are in some parts and not in others; add or drop them")


def merge_mappings(parts: Sequence[Mapping[str, Any]], kind: str) -> dict[str, Any]:
    """Merge the entries of all parts.

    Raises:
        DataError: two parts have different values for a key.
    """
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if key in merged and not same_value(merged[key], value):
                raise DataError(f"{kind} {key!r} has two different values; rename or drop one of them")
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
