"""Coverage of a tensor by rectangles: every element once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megarl.base.errors import MegarlError


class Coverage:
    """Written elements of one tensor, as boxes that must not overlap.

    Args:
        name: name of the tensor, for messages.
        shape: its shape.
        error: type of the error that :meth:`add` raises.
    """

    def __init__(self, name: str, shape: tuple[int, ...], error: type[MegarlError]) -> None:
        self.name, self.shape = name, shape
        self.expected = math.prod(shape)
        self.written = 0
        self._error = error
        # [boxes, start or stop, dimensions], grown with each box.
        self._bounds = np.empty((0, 2, len(shape)), dtype=np.int64)

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
            raise self._error(f"'{name}': slice {list(shape)} at {list(start)} does not fit shape {whole}")
        disjoint = (self._bounds[:, 0] >= stop) | (self._bounds[:, 1] <= start)
        overlapping = np.flatnonzero(~disjoint.any(axis=1))
        if len(overlapping):
            other_start, other_stop = self._bounds[overlapping[0]].tolist()
            raise self._error(
                f"'{name}': slice [{list(start)}, {stop}) overlaps [{other_start}, {other_stop}), which is already "
                "written"
            )
        self._bounds = np.concatenate([self._bounds, np.array([[list(start), stop]], dtype=np.int64)])
        self.written += math.prod(shape)
