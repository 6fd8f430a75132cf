"""How long answers are likely to be, learned while they are generated.

Lengths are known late and differ by orders of magnitude between prompts, but little between the samples of one. So one
sample of a prompt tells the others' length when it has ended, and while it has not, how long it has gone on: of lengths
with a heavy tail, the expected total is about twice what has passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

SURVIVAL = 2.0
"""Expected length of an answer over its length so far."""


@dataclass
class _Group:
    """What is known of the requests that share a key."""

    begun_at: float
    ended: int = 0
    tokens: int = 0


class Expectation:
    """Expected tokens of answers, by a key that alike requests share.

    Args:
        clock: seconds, by which the length so far of an answer that has not ended is estimated.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._groups: dict[str, _Group] = {}
        self._ended = self._tokens = 0
        self._seconds = 0.0

    def begin(self, key: str) -> float:
        """A request of this key is being answered from now on; returns the time."""
        now = self._clock()
        self._groups.setdefault(key, _Group(now))
        return now

    def end(self, key: str, begun_at: float, tokens: int) -> None:
        """An answer that was begun then has ended after so many tokens."""
        group = self._groups[key]
        group.ended += 1
        group.tokens += tokens
        self._ended += 1
        self._tokens += tokens
        self._seconds += self._clock() - begun_at

    def tokens(self, key: str, told: float | None = None) -> float | None:
        """Expected tokens of an answer of this key.

        Args:
            key: a request's.
            told: what was thought beforehand; counts until an answer has ended.

        Returns:
            None where nothing is known.
        """
        group = self._groups.get(key)
        if group is not None and group.ended:
            return group.tokens / group.ended
        if told is not None or group is None or not self._seconds:
            return told
        return SURVIVAL * (self._clock() - group.begun_at) * self._tokens / self._seconds

    def begun(self, key: str) -> bool:
        """Whether any request of this key has been given out."""
        return key in self._groups

    @property
    def mean(self) -> float | None:
        """Mean length of all answers that have ended; None before the first."""
        return self._tokens / self._ended if self._ended else None
