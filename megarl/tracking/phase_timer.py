"""Timers of a step's phases, for the metrics ``timing_s/<phase>``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager


def unhidden_seconds(names: Iterable[str], seconds: Mapping[str, float], hidden: Mapping[str, float]) -> float:
    """Return the seconds that phases add to the step: those during a longer phase count once."""
    return sum(seconds.get(name, 0.0) - hidden.get(name, 0.0) for name in names)


class PhaseTimer:
    """Sums the wall seconds of named phases; phases may nest and repeat."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}
        self.hidden: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to ``name``, also if it raises."""
        with self.phases([name]):
            yield

    @contextmanager
    def phases(self, names: Sequence[str]) -> Iterator[Callable[[int], None]]:
        """Time phases that begin together, also if the block raises.

        The yielded function ends a phase by its number; the last phase ends with the block. The others are hidden: they
        add nothing to the seconds of the step.
        """
        start = self._clock()
        ends: dict[int, float] = {}

        def end(number: int) -> None:
            if len(ends) + 1 < len(names):
                ends[number] = self._clock()

        try:
            yield end
        finally:
            now = self._clock()
            longest = next((number for number in reversed(range(len(names))) if number not in ends), -1)
            for number, name in enumerate(names):
                seconds = ends.get(number, now) - start
                self.seconds[name] = self.seconds.get(name, 0.0) + seconds
                if number != longest:
                    self.hidden[name] = self.hidden.get(name, 0.0) + seconds

    def exposed(self, names: Iterable[str]) -> float:
        """Return the seconds of these phases that no longer phase hid, so far."""
        return unhidden_seconds(names, self.seconds, self.hidden)

    def metrics(self, tokens: Mapping[str, int] | None = None) -> dict[str, float]:
        """Return ``timing_s/<phase>``, and ``timing_per_token_ms/<phase>`` for phases with a token count.

        ``timing_hidden_s/<phase>`` is the part of the seconds during a longer phase on other devices.

        Args:
            tokens: number of tokens that a phase processed, by phase.
        """
        metrics = {f"timing_s/{name}": seconds for name, seconds in self.seconds.items()}
        metrics |= {f"timing_hidden_s/{name}": seconds for name, seconds in self.hidden.items()}
        for name, count in (tokens or {}).items():
            if name in self.seconds and count > 0:
                metrics[f"timing_per_token_ms/{name}"] = 1000.0 * self.seconds[name] / count
        return metrics

    def reset(self) -> None:
        """Reset all timers; call it between steps."""
        self.seconds, self.hidden = {}, {}
