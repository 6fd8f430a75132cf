"""Which rectangles of Hugging Face tensors a flat range of a local parameter is.

Checkpoints address everything by Hugging Face tensor and rectangle, so that a file knows no layout: neither the
tensor- and pipeline-parallel split, nor where data-parallel ranks cut the optimizer's state, nor vocabulary padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from megarl.models import LocalParam


class Block(NamedTuple):
    """A rectangle of a Hugging Face tensor whose elements lie one after the other in a local buffer."""

    hf_name: str
    start: tuple[int, ...]
    """First corner, in the Hugging Face tensor."""
    shape: tuple[int, ...]
    at: int
    """Where its elements begin in the buffer that holds the range."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def blocks_of_range(param: LocalParam, start: int, stop: int) -> Iterator[Block]:
    """The rectangles that elements ``[start, stop)`` of the flattened local parameter consist of.

    Each piece of the parameter gives at most three: the end of a row, whole rows, the beginning of a row. Elements of
    vocabulary padding are in none.

    Args:
        param: one- or two-dimensional; its pieces span whole rows, as those of training layouts do.
        start: first element.
        stop: one after the last.

    Raises:
        ValueError: the parameter has another form.
    """
    width = math.prod(param.shape[1:])
    for piece in param.pieces:
        if len(param.shape) > 2 or piece.shape[1:] != param.shape[1:]:
            raise ValueError(f"'{param.name}' of shape {list(param.shape)}: {piece} does not span its rows")
        base = piece.at[0] * width
        low, high = max(start, base) - base, min(stop, base + math.prod(piece.shape)) - base
        for first, last in _runs(low, high, width):
            # A run is whole rows, or a part of one row.
            row, column = divmod(first, width)
            rows, columns = divmod(last - first, width)
            corner, shape = (row, column), (rows, width) if rows else (1, columns)
            dimensions = len(param.shape)
            yield Block(
                piece.hf_name,
                tuple(a + b for a, b in zip(piece.start, corner[:dimensions], strict=True)),
                shape[:dimensions],
                base + first - start,
            )


def _runs(low: int, high: int, width: int) -> Iterator[tuple[int, int]]:
    """Cuts ``[low, high)`` at the first and the last multiple of ``width`` within it."""
    first, last = -(-low // width) * width, high // width * width
    cuts = [low, first, last, high] if first <= last else [low, high]
    for start, stop in pairwise(cuts):
        if start < stop:
            yield start, stop
