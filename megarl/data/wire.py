"""How a batch travels: declared columns as flat real values and lengths, everything else whole.

The payload holds numpy arrays only, so that a tensor that is a view never drags its whole storage along and Ray can
move the bytes without copying. It describes itself: the receiver needs no declarations.

Two ways to find a declared column's padding. With an ``attention_mask`` in the batch, its lengths hold for all columns;
it is then itself not sent. Without one (a worker that returns nothing but log-probs), each row is trimmed of the pad
values at its padded side. Either way the receiver's rectangle equals the sender's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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
    columns = {name: _pack(name, tensor.detach().cpu(), spans) for name, tensor in tensors.items()}
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
    return {name: _unpack(column, spans) for name, column in packed.columns.items()}


def _pack(name: str, tensor: Tensor, spans: Spans | None) -> PackedColumn:
    column = COLUMNS.get(name)
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if column is None or column.alignment == "row" or (spans is None and column.alignment == "sequence"):
        return PackedColumn(dtype, shape, _to_bytes(tensor))
    if spans is None:
        own = _trimmed(tensor, column)
        values = tensor[_own_spans(column.alignment, shape[1], own).mask(column.alignment)]
        return PackedColumn(dtype, shape, _to_bytes(values), column.alignment, column.pad, own.numpy().astype(np.int32))
    if name == "attention_mask" and bool((tensor[tensor != 0] == 1).all()):
        return PackedColumn(dtype, shape, None, column.alignment)
    mask = spans.mask(column.alignment)
    pad = padding_value(tensor, mask, column)
    return PackedColumn(dtype, shape, _to_bytes(tensor[mask]), column.alignment, column.pad if pad is None else pad)


def _unpack(packed: PackedColumn, spans: Spans | None) -> Tensor:
    dtype = getattr(torch, packed.dtype)
    if packed.alignment is None:
        assert packed.data is not None  # only an aligned mask is sent without data
        return _from_bytes(packed.data, dtype).reshape(packed.shape)
    if packed.lengths is not None:
        spans = _own_spans(packed.alignment, packed.shape[1], torch.from_numpy(packed.lengths.astype(np.int64)))
    assert spans is not None  # sent with every column that has no lengths of its own
    rectangle = torch.full(packed.shape, packed.pad, dtype=dtype)
    mask = spans.mask(packed.alignment)
    if packed.data is None:
        rectangle[mask] = 1
    else:
        rectangle[mask] = _from_bytes(packed.data, dtype).reshape(-1, *packed.shape[2:])
    return rectangle


def padding_value(tensor: Tensor, mask: Tensor, column: Column) -> float | None:
    """The one value that a column's padding holds, None if it has no padding.

    Args:
        tensor: ``[b, width, ...]``.
        mask: ``[b, width]``, True where an entry is real.
        column: its declaration, for the error.

    Raises:
        DataError: padding holds more than one value.
    """
    padding = tensor[~mask].flatten()
    if not padding.numel():
        return None
    if not bool((padding == padding[0]).all()):
        row = int((~mask & _anywhere(tensor != padding[0])).any(-1).nonzero()[0])
        raise DataError(
            f"column {column.name!r}, row {row}: entries outside attention_mask hold several values, which would be "
            f"lost on the way; set them to {column.pad:g}"
        )
    return padding[0].item()


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
    return torch.from_numpy(data if data.flags.writeable else data.copy()).view(dtype)
