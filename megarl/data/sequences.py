"""Token spans of a batch: lengths, attention masks, and padded tensors from ragged rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from megarl.base.errors import DataError
from megarl.data.columns import Alignment, column_widths

Row: TypeAlias = Sequence[float] | np.ndarray

_CACHED_SPANS: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Version (number of changes in place) and spans of attention masks, which all phases of a step read."""


class TensorBatch(Protocol):
    """A batch with tensor columns by name, such as :class:`megarl.data.DataProto`."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Tensor columns by name."""


@runtime_checkable
class KnownSpans(Protocol):
    """Tensor columns whose spans and shapes are known without padded tensors, see :mod:`megarl.data.column_store`."""

    def spans(self) -> Spans | None:
        """Return the token spans of the rows; None if they have to be read from ``attention_mask``."""

    def shapes(self) -> dict[str, Tensor]:
        """Return tensors without data, with the shapes and dtypes of the columns."""


class Spans(NamedTuple):
    """Token spans of each row: the last ``prompt_lengths`` of P prompt columns, the first of R response columns.

    Attributes:
        prompt_width: P.
        response_width: R.
        prompt_lengths: ``[b]`` int64.
        response_lengths: ``[b]`` int64.
    """

    prompt_width: int
    response_width: int
    prompt_lengths: Tensor
    response_lengths: Tensor

    def mask(self, alignment: Alignment) -> Tensor:
        """Mask of the unpadded entries of a column: ``[b, P]``, ``[b, R]`` or ``[b, P+R]`` by alignment."""
        parts = []
        if alignment in ("prompt", "sequence"):
            columns = torch.arange(self.prompt_width)
            parts.append(columns >= self.prompt_width - self.prompt_lengths[:, None])
        if alignment in ("response", "sequence"):
            parts.append(torch.arange(self.response_width) < self.response_lengths[:, None])
        return torch.cat(parts, dim=1)


def read_spans(tensors: Mapping[str, Tensor]) -> Spans | None:
    """Read spans from ``attention_mask``; None without a mask or without columns that determine both widths.

    Raises:
        DataError: the mask of a row is not contiguous, or widths are inconsistent (see ``column_widths``).
    """
    if "attention_mask" not in tensors:
        return None
    shapes = tensors
    if isinstance(tensors, KnownSpans):
        if (spans := tensors.spans()) is not None:
            return spans
        shapes = tensors.shapes()
    widths = column_widths(shapes)
    if widths.prompt is None or widths.response is None:
        return None
    mask = tensors["attention_mask"]
    if mask.is_inference():  # its changes in place are not counted
        return _spans_of(mask, widths.prompt, widths.response)
    entry: tuple[int, Spans] | None = _CACHED_SPANS.get(mask)
    if entry is None or (entry[0], entry[1].prompt_width, entry[1].response_width) != (mask._version, *widths):
        entry = mask._version, _spans_of(mask, widths.prompt, widths.response)
        _CACHED_SPANS[mask] = entry
    return entry[1]


def _spans_of(mask: Tensor, prompt_width: int, response_width: int) -> Spans:
    real = mask.cpu() != 0
    prompt, response = real[:, :prompt_width], real[:, prompt_width:]
    spans = Spans(prompt_width, response_width, prompt.sum(-1), response.sum(-1))
    broken = (spans.mask("sequence") != real).any(-1).nonzero().flatten()
    if len(broken):
        raise DataError(
            f"column 'attention_mask', row {int(broken[0])}: real tokens are not contiguous; prompts must be padded at "
            f"their left and responses at their right (the prompt part is {prompt_width} wide)",
            code="batch.mask-holes",
        )
    return spans


def sequence_lengths(batch: TensorBatch) -> tuple[Tensor, Tensor]:
    """Count the prompt and response tokens of each row in ``attention_mask``.

    Returns:
        ``(prompt_lengths, response_lengths)``, both ``[b]`` int64; response lengths are 0 before generation.

    Raises:
        DataError: ``attention_mask`` or the columns that determine the widths are missing, or the mask has holes.
    """
    tensors = batch.tensors
    spans = read_spans(tensors)
    if spans is None:
        text = f"sequence lengths need 'attention_mask' and 'prompts' or a response column; there are {sorted(tensors)}"
        raise DataError(text, code="batch.missing-column")
    return spans.prompt_lengths, spans.response_lengths


def token_counts(batch: TensorBatch) -> list[int]:
    """Count the tokens of each row, prompt and response.

    Raises:
        DataError: see :func:`sequence_lengths`.
    """
    prompts, responses = sequence_lengths(batch)
    return (prompts + responses).tolist()


def attention_mask_of(
    prompt_lengths: Sequence[int], response_lengths: Sequence[int], prompt_width: int, response_width: int
) -> Tensor:
    """Build the ``attention_mask`` ``[b, P+R]`` int64 of rows with the given lengths.

    Raises:
        DataError: a length exceeds its width, or the numbers of prompts and responses differ.
    """
    if len(prompt_lengths) != len(response_lengths):
        text = f"{len(prompt_lengths)} prompt lengths for {len(response_lengths)} response lengths"
        raise DataError(text, code="batch.length-counts")
    for part, lengths, width in (
        ("prompt", prompt_lengths, prompt_width),
        ("response", response_lengths, response_width),
    ):
        if len(lengths) and not 0 <= min(lengths) <= max(lengths) <= width:
            text = f"{part} lengths must be between 0 and {width}, got {min(lengths)} to {max(lengths)}"
            raise DataError(text, code="batch.length-range")
    prompt, response = (torch.tensor(lengths, dtype=torch.int64) for lengths in (prompt_lengths, response_lengths))
    return Spans(prompt_width, response_width, prompt, response).mask("sequence").long()


def pad_left(rows: Sequence[Row], pad: float = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    """Left-pad rows to a tensor ``[rows, longest]``, as for prompts."""
    return _pad(rows, pad, dtype, left=True)


def pad_right(rows: Sequence[Row], pad: float = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    """Right-pad rows to a tensor ``[rows, longest]``, as for responses."""
    return _pad(rows, pad, dtype, left=False)


def _pad(rows: Sequence[Row], pad: float, dtype: torch.dtype, *, left: bool) -> Tensor:
    width = max(map(len, rows), default=0)
    padded = torch.full((len(rows), width), pad, dtype=dtype)
    values = padded.numpy()  # takes read-only rows, and is faster for lists
    for index, row in enumerate(rows):
        start = width - len(row) if left else 0
        values[index, start : start + len(row)] = row
    return padded
