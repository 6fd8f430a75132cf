"""Stops of an embedded engine, so that its requests are under way when a test interrupts them, however late that is."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from megarl.rollout.embedded.generation import ContinuousBatcher

LONGEST_S = 120.0


class Stops:
    """Lets engines stand still after every ``every`` decoding steps, ``count`` times.

    Args:
        monkeypatch: undoes it.
        every: number of steps between two stops.
        count: number of stops.
        is_interrupted: ends a stop: whether the test's interruption has reached the engine's server.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, every: int, count: int, is_interrupted: Callable[[], object]
    ) -> None:
        self._reached = threading.Semaphore(0)
        advance, steps, stops = ContinuousBatcher.advance, itertools.count(1), range(every, every * count + 1, every)

        def advance_or_stop(batcher: ContinuousBatcher) -> Any:
            if next(steps) in stops:
                self._reached.release()
                deadline = time.monotonic() + LONGEST_S
                while not is_interrupted() and time.monotonic() < deadline:
                    time.sleep(0.001)
            return advance(batcher)

        monkeypatch.setattr(ContinuousBatcher, "advance", advance_or_stop)

    def wait(self) -> None:
        """Wait for the next stop."""
        assert self._reached.acquire(timeout=LONGEST_S), "the engine has no request any more"
