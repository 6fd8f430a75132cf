"""How a batch travels: declared columns as flat real values and lengths, everything else whole.

The payload holds numpy arrays only, so that a tensor that is a view never drags its whole storage along and Ray can
move the bytes without copying. It describes itself: the receiver needs no declarations.

Two ways to find a declared column's padding. With an ``attention_mask`` in the batch, its lengths hold for all columns;
it is then itself not sent. Without one (a worker that returns nothing but log-probs), each row is trimmed of the pad
values at its padded side. Either way the receiver's rectangle equals the sender's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.data.columns import COLUMNS, Alignment, Column
from megarl.data.sequences import Spans, read_spans
from megarl.errors import DataError


class PackedColumn(NamedTuple):
    """One column on its way.

    Attributes:
        dtype: name of the torch dtype, such as ``bfloat16``.
        shape: shape of the rectangle.
        data: bytes of the values, ``uint8``; None stands for ones.
        alignment: None for a column that travels whole.
        pad: what the padding holds.
        lengths: ``[b]`` values per row where the batch's own spans do not tell.
    """

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray | None
    alignment: Alignment | None = None
    pad: float = 0
    lengths: np.ndarray | None = None


class _Region:
    """The real entries of a column by its alignment; computed once for all columns that share it."""

    def __init__(self, spans: Spans, alignment: Alignment) -> None:
        self.mask = spans.mask(alignment)
        self._index = self.mask.flatten().nonzero().flatten()

    def gather(self, rectangle: Tensor) -> Tensor:
        """``[b, width, ...]`` to ``[real entries, ...]``."""
        return rectangle.flatten(0, 1).index_select(0, self._index)

    def scatter(self, values: Tensor, shape: tuple[int, ...], pad: float) -> Tensor:
        """The inverse of :meth:`gather`."""
        rectangle = torch.full(shape, pad, dtype=values.dtype)
        rectangle.view(-1, *shape[2:])[self._index] = values.reshape(-1, *shape[2:])
        return rectangle


class PackedBatch(NamedTuple):
    """The tensors of a batch on their way: ``spans`` is ``(P, R, prompt lengths, response lengths)``."""

    columns: dict[str, PackedColumn]
    spans: tuple[int, int, np.ndarray, np.ndarray] | None


def pack_columns(tensors: Mapping[str, Tensor]) -> PackedBatch:
    """Drop the padding of all declared columns.

    Raises:
        DataError: the attention mask has holes, or the padding of a column holds several values, which would be lost.
    """
    spans = read_spans(tensors)
    regions = _regions(spans, {COLUMNS[name].alignment for name in tensors.keys() & COLUMNS.keys()})
    columns = {name: _pack(name, tensor.detach().cpu(), regions) for name, tensor in tensors.items()}
    if spans is None:
        return PackedBatch(columns, None)
    prompt, response = (lengths.numpy().astype(np.int32) for lengths in (spans.prompt_lengths, spans.response_lengths))
    return PackedBatch(columns, (spans.prompt_width, spans.response_width, prompt, response))


def unpack_columns(packed: PackedBatch) -> dict[str, Tensor]:
    """The rectangles that :func:`pack_columns` was given, on the CPU."""
    spans = None
    if packed.spans is not None:
        prompt_width, response_width, *lengths = packed.spans
        spans = Spans(prompt_width, response_width, *(torch.from_numpy(length.astype(np.int64)) for length in lengths))
    regions = _regions(spans, {column.alignment for column in packed.columns.values() if column.lengths is None})
    return {name: _unpack(column, regions) for name, column in packed.columns.items()}


def _regions(spans: Spans | None, alignments: set[Any]) -> dict[Alignment, _Region]:
    """A region for each alignment that the spans of the batch describe; none without spans."""
    if spans is None:
        return {}
    return {alignment: _Region(spans, alignment) for alignment in alignments if alignment not in (None, "row")}


def _pack(name: str, tensor: Tensor, regions: dict[Alignment, _Region]) -> PackedColumn:
    column = COLUMNS.get(name)
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if column is None or column.alignment == "row" or (not regions and column.alignment == "sequence"):
        return PackedColumn(dtype, shape, _to_bytes(tensor))
    if not regions:
        own = _trimmed(tensor, column)
        values = _Region(_own_spans(column.alignment, shape[1], own), column.alignment).gather(tensor)
        return PackedColumn(dtype, shape, _to_bytes(values), column.alignment, column.pad, own.numpy().astype(np.int32))
    region = regions[column.alignment]
    if name == "attention_mask" and bool((tensor[tensor != 0] == 1).all()):
        return PackedColumn(dtype, shape, None, column.alignment)
    pad = padding_value(tensor, region.mask, column)
    real = _to_bytes(region.gather(tensor))
    return PackedColumn(dtype, shape, real, column.alignment, column.pad if pad is None else pad)


def _unpack(packed: PackedColumn, regions: dict[Alignment, _Region]) -> Tensor:
    dtype = getattr(torch, packed.dtype)
    if packed.alignment is None:
        assert packed.data is not None  # only an aligned mask is sent without data
        return _from_bytes(packed.data, dtype).reshape(packed.shape)
    if packed.lengths is None:
        region = regions[packed.alignment]
    else:
        own = _own_spans(packed.alignment, packed.shape[1], torch.from_numpy(packed.lengths.astype(np.int64)))
        region = _Region(own, packed.alignment)
    if packed.data is None:
        return region.mask.to(dtype)
    return region.scatter(_from_bytes(packed.data, dtype), packed.shape, packed.pad)


def padding_value(tensor: Tensor, mask: Tensor, column: Column) -> float | None:
    """The one value that a column's padding holds, None if it has no padding.

    Args:
        tensor: ``[b, width, ...]``.
        mask: ``[b, width]``, True where an entry is real.
        column: its declaration, for the error.

    Raises:
        DataError: padding holds more than one value.
    """
    if bool(mask.all()) or not tensor.numel():
        return None
    row, column_number = divmod(int(mask.flatten().int().argmin()), mask.shape[1])
    pad = tensor[row, column_number].flatten()[0]
    others = _anywhere(tensor != pad) & ~mask
    if bool(others.any()):
        row = int(others.any(-1).nonzero()[0])
        raise DataError(
            f"column {column.name!r}, row {row}: entries outside attention_mask hold several values, which would be "
            f"lost on the way; set them to {column.pad:g}"
        )
    return pad.item()


def _trimmed(tensor: Tensor, column: Column) -> Tensor:
    """Entries of each row ``[b]`` that remain without the pad values at its padded side."""
    kept = _anywhere(tensor != column.pad)
    width = kept.shape[1]
    if width == 0:
        return torch.zeros(len(kept), dtype=torch.int64)
    # argmax finds the first True; from the padded side that is where the values begin
    from_padded_side = kept if column.alignment == "prompt" else kept.flip(1)
    return torch.where(kept.any(1), width - from_padded_side.int().argmax(1), 0)


def _anywhere(flags: Tensor) -> Tensor:
    """``[b, width, ...]`` to ``[b, width]``: whether any flag of an entry is set."""
    return flags.flatten(2).any(-1) if flags.dim() > 2 else flags


def _own_spans(alignment: Alignment, width: int, lengths: Tensor) -> Spans:
    nothing = torch.zeros_like(lengths)
    if alignment == "prompt":
        return Spans(width, 0, lengths, nothing)
    return Spans(0, width, nothing, lengths)


def _to_bytes(tensor: Tensor) -> np.ndarray:
    # as bytes, because numpy has no bfloat16
    return tensor.contiguous().flatten().view(torch.uint8).numpy()


def _from_bytes(data: np.ndarray, dtype: torch.dtype) -> Tensor:
    # arrays out of shared memory are read-only, and torch tensors cannot be
    if not data.size:  # numpy gives an empty array a stride that torch refuses to view
        return torch.empty(0, dtype=dtype)
    return torch.from_numpy(data if data.flags.writeable else data.copy()).view(dtype)
