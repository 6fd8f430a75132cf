"""Checks of an engine's weights: coverage of an update, and changes after verification."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from megarl.base.errors import WeightSyncError
from megarl.rollout.interface import RolloutEngine


class Coverage:
    """Elements of one parameter that a weight update wrote, as boxes that must not overlap."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name, self.shape = name, shape
        self.expected = math.prod(shape)
        self.written = 0
        # [boxes, start or stop, dimensions], grown with each box.
        self._bounds = np.empty((0, 2, len(shape)), dtype=np.int64)

    def add(self, start: Sequence[int], shape: Sequence[int]) -> None:
        """Record a slice.

        Raises:
            WeightSyncError: it exceeds the parameter or overlaps an earlier slice.
        """
        stop = [a + n for a, n in zip(start, shape, strict=False)]
        name, whole = self.name, list(self.shape)
        fits = len(start) == len(shape) == len(whole) and all(
            0 <= a < b <= n for a, b, n in zip(start, stop, whole, strict=True)
        )
        if not fits:
            raise WeightSyncError(f"'{name}': slice {list(shape)} at {list(start)} does not fit shape {whole}")
        disjoint = (self._bounds[:, 0] >= stop) | (self._bounds[:, 1] <= start)
        overlapping = np.flatnonzero(~disjoint.any(axis=1))
        if len(overlapping):
            other_start, other_stop = self._bounds[overlapping[0]].tolist()
            raise WeightSyncError(
                f"'{name}': slice [{list(start)}, {stop}) overlaps [{other_start}, {other_stop}), "
                "already written in this update"
            )
        self._bounds = np.concatenate([self._bounds, np.array([[list(start), stop]], dtype=np.int64)])
        self.written += math.prod(shape)


def check_complete(covers: Iterable[Coverage], version: int) -> None:
    """Check that every element was written.

    Raises:
        WeightSyncError: elements are missing; names the first parameter.
    """
    covers = list(covers)
    gaps = [cover for cover in covers if cover.written != cover.expected]
    if gaps:
        first = gaps[0]
        raise WeightSyncError(
            f"weight version {version} is incomplete: {len(gaps)} of {len(covers)} parameters, first "
            f"'{first.name}' with {first.written} of {first.expected} elements written"
        )


class WeightFingerprint:
    """Detects changes of an engine's weights after their verification.

    Verification compares the written tensors. The fingerprint covers everything the engine holds, against any later
    change, at the cost of reading it once.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._recorded: tuple[str, ...] = ()

    def record(self) -> None:
        """Record the current fingerprint; a no-op for engines without fingerprints."""
        self._recorded = self._engine.fingerprint()

    def verify(self, when: str) -> None:
        """Compare the current fingerprint with the recorded one, if any.

        Args:
            when: time of a possible change, for the error.

        Raises:
            WeightSyncError: the weights have changed; names the first rank. The record is cleared.
        """
        if not self._recorded:
            return
        current = self._engine.fingerprint()
        changed = [rank for rank, (old, new) in enumerate(zip(self._recorded, current, strict=True)) if old != new]
        if changed:
            self._recorded = ()
            raise WeightSyncError(
                f"the engine's weights on its rank {changed[0]} were compared with the actor's and have changed "
                f"{when}, according to the engine's checksum"
            )

    def verify_and_clear(self, when: str) -> None:
        """Compare a last time before the weights are replaced or freed, and clear the record; see :meth:`verify`."""
        self.verify(when)
        self._recorded = ()
