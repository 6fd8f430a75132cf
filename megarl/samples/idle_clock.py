"""Idle ratios of trainer and engines in disaggregated training, under verl's names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megarl.base.reductions import Metrics


class IdleClock:
    """Measures the share of a sync interval in which the trainer waits for samples.

    An interval ends with a weight sync, and the next one begins with it.

    Args:
        clock: monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began: float | None = None
        self._waited = 0.0

    def start(self) -> None:
        """Begin the first interval; later calls have no effect."""
        if self._began is None:
            self._began = self._clock()

    @property
    def waited_s(self) -> float:
        """Seconds of the current interval in which the trainer has waited."""
        return self._waited

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as a wait of the trainer."""
        started = self._clock()
        try:
            yield
        finally:
            self._waited += self._clock() - started

    def metrics(self, utilization: float) -> Metrics:
        """End an interval, and return ``fully_async/{trainer,rollouter}/idle_ratio``.

        Args:
            utilization: mean share of the interval in which an engine had a request.
        """
        now, began, waited = self._clock(), self._began, self._waited
        self._began, self._waited = now, 0.0
        if began is None or now <= began:
            return {}
        return {
            "fully_async/trainer/idle_ratio": waited / (now - began),
            "fully_async/rollouter/idle_ratio": 1.0 - utilization,
        }
