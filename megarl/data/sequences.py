"""Token spans of a batch: lengths, attention masks, and padded tensors from ragged rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from megarl.base.errors import DataError
from megarl.data.columns import Alignment

Row: TypeAlias = Sequence[float] | np.ndarray


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


def spans_of_mask(mask: Tensor, prompt_width: int, response_width: int) -> Spans:
    """Read spans from an ``attention_mask``.

    Raises:
        DataError: the mask of a row is not contiguous.
    """
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
