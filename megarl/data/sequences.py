"""Where the real tokens of a batch lie: lengths, masks, and building padded rectangles from rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megarl.data.columns import Alignment, column_widths
from megarl.errors import DataError

if TYPE_CHECKING:
    from megarl.data.protocol import DataProto


class Spans(NamedTuple):
    """The real tokens of each row: the last ``prompt_lengths`` of P prompt columns, the first of R response columns.

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
        """Boolean mask of the real entries of a column: ``[b, P]``, ``[b, R]`` or ``[b, P+R]`` by alignment."""
        parts = []
        if alignment in ("prompt", "sequence"):
            columns = torch.arange(self.prompt_width)
            parts.append(columns >= self.prompt_width - self.prompt_lengths[:, None])
        if alignment in ("response", "sequence"):
            parts.append(torch.arange(self.response_width) < self.response_lengths[:, None])
        return torch.cat(parts, dim=1)


def read_spans(tensors: Mapping[str, Tensor]) -> Spans | None:
    """Spans of a batch from its ``attention_mask``, or None if it has none or nothing tells where responses begin.

    Raises:
        DataError: the mask is not contiguous in some row, or widths contradict each other (see ``column_widths``).
    """
    widths = column_widths(tensors)
    if "attention_mask" not in tensors or widths.prompt is None or widths.response is None:
        return None
    real = tensors["attention_mask"].cpu() != 0
    prompt, response = real[:, : widths.prompt], real[:, widths.prompt :]
    spans = Spans(widths.prompt, widths.response, prompt.sum(-1), response.sum(-1))
    broken = (spans.mask("sequence") != real).any(-1).nonzero().flatten()
    if len(broken):
        raise DataError(
            f"column 'attention_mask', row {int(broken[0])}: real tokens are not contiguous; prompts must be padded at "
            f"their left and responses at their right (the prompt part is {widths.prompt} wide)"
        )
    return spans


def sequence_lengths(batch: DataProto) -> tuple[Tensor, Tensor]:
    """Real tokens of each row's prompt and response, from ``attention_mask``.

    Returns:
        ``(prompt_lengths, response_lengths)``, both ``[b]`` int64; response lengths are 0 before there are responses.

    Raises:
        DataError: there is no ``attention_mask``, no column tells where responses begin, or the mask has holes.
    """
    tensors = batch.tensors
    spans = read_spans(tensors)
    if spans is None:
        raise DataError(
            f"sequence lengths need 'attention_mask' and 'prompts' or a response column; there are {sorted(tensors)}"
        )
    return spans.prompt_lengths, spans.response_lengths


def attention_mask_of(
    prompt_lengths: Sequence[int], response_lengths: Sequence[int], prompt_width: int, response_width: int
) -> Tensor:
    """The ``attention_mask`` ``[b, P+R]`` int64 of rows with these lengths.

    Raises:
        DataError: a length is above its width, or there are not as many prompts as responses.
    """
    if len(prompt_lengths) != len(response_lengths):
        raise DataError(f"{len(prompt_lengths)} prompt lengths for {len(response_lengths)} response lengths")
    for part, lengths, width in (
        ("prompt", prompt_lengths, prompt_width),
        ("response", response_lengths, response_width),
    ):
        if len(lengths) and not 0 <= min(lengths) <= max(lengths) <= width:
            raise DataError(f"{part} lengths must be between 0 and {width}, got {min(lengths)} to {max(lengths)}")
    prompt, response = (torch.tensor(lengths, dtype=torch.int64) for lengths in (prompt_lengths, response_lengths))
    return Spans(prompt_width, response_width, prompt, response).mask("sequence").long()


def pad_left(rows: Sequence[Sequence[float]], pad: float = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    """Rectangle ``[rows, longest]`` with each row at its right edge, as prompts are."""
    return _rectangle(rows, pad, dtype, at_right_edge=True)


def pad_right(rows: Sequence[Sequence[float]], pad: float = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    """Rectangle ``[rows, longest]`` with each row at its left edge, as responses and their columns are."""
    return _rectangle(rows, pad, dtype, at_right_edge=False)


def _rectangle(rows: Sequence[Sequence[float]], pad: float, dtype: torch.dtype, *, at_right_edge: bool) -> Tensor:
    width = max(map(len, rows), default=0)
    rectangle = torch.full((len(rows), width), pad, dtype=dtype)
    for index, row in enumerate(rows):
        start = width - len(row) if at_right_edge else 0
        rectangle[index, start : start + len(row)] = torch.as_tensor(row, dtype=dtype)
    return rectangle
