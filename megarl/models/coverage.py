"""Coverage of a tensor by rectangles: every element once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megarl.base.errors import MegarlError

_RECENT = 16
"""Boxes that are compared one by one: most tensors have few, and an array of few is slower."""


class Coverage:
    """Written elements of one tensor, as boxes that must not overlap.

    Args:
        error: type of the error that :meth:`add` raises.
    """

    def __init__(self, name: str, shape: tuple[int, ...], error: type[MegarlError]) -> None:
        self.name, self.shape = name, shape
        self.expected = math.prod(shape)
        self.written = 0
        self._error = error
        self._recent: list[tuple[list[int], list[int]]] = []
        self._earlier = np.empty((0, 2, len(shape)), dtype=np.int64)  # [boxes, start or stop, dimensions]

    def add(self, start: Sequence[int], shape: Sequence[int]) -> None:
        """Record a slice.

        Raises:
            MegarlError: of type ``error``; the slice exceeds the tensor or overlaps an earlier slice.
        """
        stop = [a + n for a, n in zip(start, shape, strict=False)]
        name, whole = self.name, list(self.shape)
        fits = len(start) == len(shape) == len(whole) and all(
            0 <= a < b <= n for a, b, n in zip(start, stop, whole, strict=True)
        )
        if not fits:
            text = f"'{name}': slice {list(shape)} at {list(start)} does not fit shape {whole}"
            raise self._error(text, code="model.slice-outside")
        if other := self._overlapping(list(start), stop):
            text = (
                f"'{name}': slice [{list(start)}, {stop}) overlaps [{other[0]}, {other[1]}), which is already written"
            )
            raise self._error(text, code="model.slice-overlap")
        self._recent.append((list(start), stop))
        if len(self._recent) == _RECENT:
            self._earlier = np.concatenate([self._earlier, np.array(self._recent, dtype=np.int64)])
            self._recent = []
        self.written += math.prod(shape)

    def _overlapping(self, start: list[int], stop: list[int]) -> tuple[list[int], list[int]] | None:
        """Return a box that overlaps ``[start, stop)``."""
        for box in self._recent:
            if all(a < d and c < b for a, b, c, d in zip(start, stop, *box, strict=True)):
                return box
        if len(self._earlier):
            disjoint = (self._earlier[:, 0] >= stop) | (self._earlier[:, 1] <= start)
            overlapping = np.flatnonzero(~disjoint.any(axis=1))
            if len(overlapping):
                first, last = self._earlier[overlapping[0]].tolist()
                return first, last
        return None
