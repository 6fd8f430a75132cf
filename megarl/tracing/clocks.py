"""How far the clock of another machine is ahead of this one's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Exchange(NamedTuple):
    """A question and its answer, in nanoseconds: when it was asked and answered here, what the clock there said."""

    asked: int
    there: int
    answered: int


class Offset(NamedTuple):
    """How far a clock is ahead, and by how much that may be wrong, in nanoseconds."""

    ahead_ns: int = 0
    error_ns: int = 0


def measure(exchanges: Iterable[Exchange]) -> Offset:
    """The offset from the fastest of some exchanges, as in NTP (RFC 5905, section 8).

    The answer was given at some moment between question and answer here; the middle is wrong by at most half of that.
    """
    best = min(exchanges, key=lambda exchange: exchange.answered - exchange.asked)
    half = (best.answered - best.asked) // 2
    return Offset(best.there - (best.asked + half), half)
