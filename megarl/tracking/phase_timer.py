"""Timers of the phases of a step, for the metrics ``timing_s/<phase>``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class PhaseTimer:
    """Sums the wall seconds of named phases; phases may nest and repeat.

    Args:
        clock: monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to ``name``, also if it raises."""
        start = self._clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - start

    def metrics(self, tokens: Mapping[str, int] | None = None) -> dict[str, float]:
        """Return ``timing_s/<phase>``, and ``timing_per_token_ms/<phase>`` for phases with a token count.

        Args:
            tokens: number of tokens that a phase processed, by phase.
        """
        metrics = {f"timing_s/{name}": seconds for name, seconds in self.seconds.items()}
        for name, count in (tokens or {}).items():
            if name in self.seconds and count > 0:
                metrics[f"timing_per_token_ms/{name}"] = 1000.0 * self.seconds[name] / count
        return metrics

    def reset(self) -> None:
        """Reset all timers; call it between steps."""
        self.seconds = {}
