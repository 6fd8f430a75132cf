"""Which elements of a parameter a weight update wrote."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from megarl.errors import WeightSyncError


class Coverage:
    """Which elements of one parameter a session wrote, as rectangles that may not overlap."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name, self.shape = name, shape
        self.expected = math.prod(shape)
        self.written = 0
        # [rectangles, start or stop, dimensions], grown as rectangles come in.
        self._bounds = np.empty((0, 2, len(shape)), dtype=np.int64)

    def add(self, start: Sequence[int], shape: Sequence[int]) -> None:
        """Records a rectangle.

        Raises:
            WeightSyncError: it leaves the parameter or overlaps an earlier one.
        """
        stop = [a + n for a, n in zip(start, shape, strict=False)]
        name, whole = self.name, list(self.shape)
        fits = len(start) == len(shape) == len(whole) and all(
            0 <= a < b <= n for a, b, n in zip(start, stop, whole, strict=True)
        )
        if not fits:
            raise WeightSyncError(f"'{name}': slab {list(shape)} at {list(start)} does not fit shape {whole}")
        apart = (self._bounds[:, 0] >= stop) | (self._bounds[:, 1] <= start)
        overlapping = np.flatnonzero(~apart.any(axis=1))
        if len(overlapping):
            other_start, other_stop = self._bounds[overlapping[0]].tolist()
            raise WeightSyncError(
                f"'{name}': slab [{list(start)}, {stop}) overlaps [{other_start}, {other_stop}), "
                "already written in this update"
            )
        self._bounds = np.concatenate([self._bounds, np.array([[list(start), stop]], dtype=np.int64)])
        self.written += math.prod(shape)


def check_complete(covers: Iterable[Coverage], version: int) -> None:
    """Makes sure that every element was written.

    Raises:
        WeightSyncError: some were not; names the first parameter.
    """
    covers = list(covers)
    gaps = [cover for cover in covers if cover.written != cover.expected]
    if gaps:
        first = gaps[0]
        raise WeightSyncError(
            f"weight version {version} is incomplete: {len(gaps)} of {len(covers)} parameters, first "
            f"'{first.name}' with {first.written} of {first.expected} elements written"
        )
