"""Local search: exchange items between the most expensive part and cheap ones until parts are even."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

TOLERANCE = 1e-4
"""Unevenness, relative to the best possible, at which the search ends."""
_ITEMS_PER_PART = 256
# What is compared at once: little, since most steps succeed with one of the cheapest parts.
_PAIRS_AT_ONCE = 1 << 14
# Ends searches over thousands of parts after about a second; it counts work, not time, so that plans are reproducible.
_WORK = 1 << 25
_WORK_PER_PART = 256

Parts = list[np.ndarray]


class Room(NamedTuple):
    """A second measure of every item, and how much of it a part may hold."""

    weights: np.ndarray
    limit: float


def even_out(costs: np.ndarray, parts: Parts, *, fixed_sizes: bool, room: Room | None = None) -> Parts:
    """Make the most expensive part cheaper, step by step, as long as one exchange with another part does.

    Deterministic. The most expensive part never becomes more expensive, and no part becomes empty. It ends where the
    most expensive part is within :data:`TOLERANCE` of :func:`lowest_maximum`, where no exchange helps, or after a fixed
    amount of work. Of parts with more than 256 items an evenly spaced sample is looked at: such parts are nearly even
    from the start.

    Args:
        costs: cost of each item, ``[items]``, not negative.
        parts: item numbers of each part.
        fixed_sizes: exchange one item for one; otherwise an item may also be given for nothing.
        room: what no part may exceed; the given parts do not.

    Returns:
        The parts in the given order, their items in no particular one.
    """
    if len(parts) < 2:
        return list(parts)
    search = _Search(costs, parts, fixed_sizes, room or Room(np.zeros(len(costs)), 0.0))
    goal = lowest_maximum(costs, len(parts), fixed_sizes=fixed_sizes) * (1 + TOLERANCE)
    while search.sums.max() > goal and search.improve():
        pass
    return search.parts


def lowest_maximum(costs: np.ndarray, k: int, *, fixed_sizes: bool) -> float:
    """What the most expensive of ``k`` parts costs at least; often more than can be reached.

    That is the mean of the parts, or the most expensive item. With ``fixed_sizes``, where all parts have ``c`` items,
    the ``j`` most expensive items either share a part, or are in ``j`` parts that need company: at least the
    ``j * (c - 1)`` cheapest items among them and, for pairs, one of them at least the ``j``-th cheapest.
    """
    if not len(costs):
        return 0.0
    mean = float(costs.sum()) / k
    if not fixed_sizes or len(costs) <= k:
        return max(mean, float(costs.max()))
    ascending = np.sort(costs)
    descending, size, j = ascending[::-1], len(costs) // k, np.arange(1, k + 1)
    totals = np.concatenate([[0.0], np.cumsum(ascending)])
    apart = (np.cumsum(descending[:k]) + totals[j * (size - 1)]) / j
    if size == 2:
        apart = np.maximum(apart, descending[:k] + ascending[:k])
    together = descending[:k] + np.append(np.inf, descending[: k - 1]) + totals[size - 2]
    return max(mean, float(np.minimum(apart, together).max()))


class _Search:
    """The parts, their costs, and what they hold of the room."""

    def __init__(self, costs: np.ndarray, parts: Parts, fixed_sizes: bool, room: Room) -> None:
        self.costs = costs
        self.fixed_sizes = fixed_sizes
        self.room = room
        self.parts = list(parts)
        self.sums = np.array([costs[part].sum() for part in parts])
        self.held = np.array([room.weights[part].sum() for part in parts])
        self.work = 0

    def improve(self) -> bool:
        """Make the best exchange of the most expensive part with the cheapest parts that have any; False: none helps.

        The best is the one after which the more expensive of the two parts is cheapest.
        """
        heavy = int(np.argmax(self.sums))
        given = _sample(self.parts[heavy])
        for partners, taken in self._offers(heavy, _PAIRS_AT_ONCE // len(given)):
            moved = self.costs[given][:, None] - _of(self.costs, taken)
            weight = self.room.weights[given][:, None] - _of(self.room.weights, taken)
            after = np.maximum(self.sums[heavy] - moved, self.sums[partners] + moved)
            fits = (self.held[heavy] - weight <= self.room.limit) & (self.held[partners] + weight <= self.room.limit)
            after = np.where(fits, after, np.inf)
            self.work += after.size
            best = int(np.argmin(after))
            # Without the margin, rounding could make two parts exchange the same items for ever.
            if after.flat[best] < self.sums[heavy] * (1 - 1e-12):
                row, column = divmod(best, len(taken))
                self._exchange(heavy, int(given[row]), int(partners[column]), int(taken[column]))
                return True
        return False

    def _offers(self, heavy: int, at_once: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """What other parts, cheapest first, can give: pairs of (part, item), about ``at_once`` in each lot.

        Where sizes are free every part also offers nothing, as item -1. Nothing more is offered once the work is done.
        """
        partners: list[np.ndarray] = []
        items: list[np.ndarray] = []
        size = 0
        for part in np.argsort(self.sums, kind="stable").tolist():
            if part == heavy or self.work > _WORK:
                continue
            offered = _sample(self.parts[part])
            if not self.fixed_sizes:
                offered = np.append(offered, -1)
            items.append(offered)
            partners.append(np.full(len(offered), part))
            size += len(offered)
            self.work += _WORK_PER_PART
            if size >= at_once:
                yield np.concatenate(partners), np.concatenate(items)
                partners, items, size = [], [], 0
        if items:
            yield np.concatenate(partners), np.concatenate(items)

    def _exchange(self, heavy: int, given: int, light: int, taken: int) -> None:
        for part, old, new in ((heavy, given, taken), (light, taken, given)):
            kept = self.parts[part][self.parts[part] != old]
            self.parts[part] = kept if new < 0 else np.append(kept, new)
            self.sums[part] = self.costs[self.parts[part]].sum()
            self.held[part] = self.room.weights[self.parts[part]].sum()


def _sample(part: np.ndarray) -> np.ndarray:
    return part[:: -(-len(part) // _ITEMS_PER_PART) or 1]


def _of(values: np.ndarray, items: np.ndarray) -> np.ndarray:
    """``values`` of items, 0 for nothing."""
    return np.where(items >= 0, values[items], 0)
