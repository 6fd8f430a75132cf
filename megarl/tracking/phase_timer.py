"""Wall seconds per phase of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class PhaseTimer:
    """Adds up the seconds spent in named phases; phases may nest and may be entered several times.

    Args:
        clock: seconds that never run backwards.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds of the block under ``name``, also where it raises."""
        start = self._clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - start

    def metrics(self, tokens: Mapping[str, int] | None = None) -> dict[str, float]:
        """``timing_s/<phase>`` of each phase, and ``timing_per_token_ms/<phase>`` of those with a token count.

        Args:
            tokens: how many tokens each phase worked on; a phase without tokens gets no time per token.
        """
        metrics = {f"timing_s/{name}": seconds for name, seconds in self.seconds.items()}
        for name, count in (tokens or {}).items():
            if name in self.seconds and count > 0:
                metrics[f"timing_per_token_ms/{name}"] = 1000.0 * self.seconds[name] / count
        return metrics

    def reset(self) -> None:
        """Forget all phases; call it between steps."""
        self.seconds = {}
