"""Which rank gets which rows, so that ranks that wait for each other have equal work.

Costs are an argument: tokens, or anything else that adds up. All plans are deterministic: the same costs give the same
plan on every machine.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from megarl.errors import DataError

Partition = list[list[int]]


def balanced_partition(costs: Sequence[float], k: int, equal_size: bool = False) -> Partition:
    """Cut items into ``k`` parts of nearly equal cost.

    Takes the better of the largest differencing method (Karmarkar and Karp, 1982) and the greedy rule (most expensive
    item first, to the cheapest part; Graham, 1969), so that the most expensive part is never above the greedy bound of
    4/3 - 1/(3k) times the best possible where sizes are free.

    Args:
        costs: cost of each item.
        k: number of parts.
        equal_size: give each part the same number of items; otherwise parts may differ in size, and be empty.

    Returns:
        Item numbers of each part, ascending; parts in the order of their first item, empty ones last.

    Raises:
        DataError: ``k`` is below 1, a cost is negative or not finite, or ``equal_size`` and the items do not divide.
    """
    values = np.asarray(costs, dtype=np.float64)
    if k < 1:
        raise DataError(f"k must be at least 1 part, got {k}")
    if not np.isfinite(values).all() or (values < 0).any():
        item = int(np.flatnonzero(~np.isfinite(values) | (values < 0))[0])
        raise DataError(f"cost of item {item} is {values[item]}; costs must be finite and not negative")
    if equal_size and len(values) % k:
        raise DataError(f"{len(values)} items cannot be cut into {k} parts of equal size")
    candidates = (_largest_differencing(values, k, equal_size), _greedy(values, k, equal_size))
    best = min(candidates, key=lambda parts: _spread(values, parts))
    return sorted((sorted(part) for part in best), key=lambda part: part[0] if part else len(values))


def balance_mini_batches(costs: Sequence[float], num_mini_batches: int, dp: int) -> Partition:
    """Rows of each data-parallel rank, for an update that takes several optimizer steps.

    Mini-batch ``i`` is the rows ``[i*m, (i+1)*m)`` with ``m = rows / num_mini_batches``, whatever ``dp`` is, so that
    the number of ranks changes no result. Each mini-batch is cut into ``dp`` parts of equal size and nearly equal cost.

    Args:
        costs: cost of each row.
        num_mini_batches: optimizer steps over these rows.
        dp: data-parallel ranks.

    Returns:
        For each rank its row numbers, mini-batch by mini-batch: ``m / dp`` rows of each.

    Raises:
        DataError: rows do not divide into the mini-batches, or a mini-batch's rows not over the ranks.
    """
    if num_mini_batches < 1 or dp < 1 or len(costs) % num_mini_batches or len(costs) // num_mini_batches % dp:
        raise DataError(
            f"{len(costs)} rows cannot be cut into {num_mini_batches} mini-batches of equal size for {dp} ranks; "
            f"the number of rows must be a multiple of {num_mini_batches} x {dp}"
        )
    size = len(costs) // num_mini_batches
    ranks: Partition = [[] for _ in range(dp)]
    for start in range(0, len(costs), size or 1):
        for rank, part in enumerate(balanced_partition(costs[start : start + size], dp, equal_size=True)):
            ranks[rank].extend(start + item for item in part)
    return ranks


def _spread(costs: np.ndarray, parts: Partition) -> tuple[float, float]:
    """What to minimise: the most expensive part (others wait for it), then the spread."""
    sums = [float(costs[part].sum()) for part in parts]
    return max(sums), max(sums) - min(sums)


def _descending(costs: np.ndarray) -> list[int]:
    return np.lexsort((np.arange(len(costs)), -costs)).tolist()


def _greedy(costs: np.ndarray, k: int, equal_size: bool) -> Partition:
    parts: Partition = [[] for _ in range(k)]
    capacity = len(costs) // k if equal_size else len(costs)
    heap = [(0.0, part) for part in range(k)]
    for item in _descending(costs):
        total, part = heapq.heappop(heap)
        parts[part].append(item)
        if len(parts[part]) < capacity:
            heapq.heappush(heap, (total + costs[item], part))
    return parts


class _Candidate(NamedTuple):
    """``k`` parts of some of the items, most expensive first."""

    sums: np.ndarray
    parts: Partition


def _largest_differencing(costs: np.ndarray, k: int, equal_size: bool) -> Partition:
    """Start from candidates of one item (or of ``k``, one per part, for equal sizes) and merge the two least even.

    Merging puts the most expensive part of one to the cheapest of the other, so that their unevenness cancels.
    """
    order = _descending(costs)
    step = k if equal_size else 1
    ties = count()
    heap: list[tuple[float, int, _Candidate]] = []
    for start in range(0, len(order), step):
        parts = [[item] for item in order[start : start + step]] + [[] for _ in range(k - step)]
        sums = np.array([costs[part].sum() for part in parts])
        heapq.heappush(heap, (sums[-1] - sums[0], next(ties), _Candidate(sums, parts)))
    if not heap:
        return [[] for _ in range(k)]
    while len(heap) > 1:
        merged = _merge(heapq.heappop(heap)[2], heapq.heappop(heap)[2])
        heapq.heappush(heap, (merged.sums[-1] - merged.sums[0], next(ties), merged))
    return heap[0][2].parts


def _merge(first: _Candidate, second: _Candidate) -> _Candidate:
    sums = first.sums + second.sums[::-1]
    parts = [mine + theirs for mine, theirs in zip(first.parts, reversed(second.parts), strict=True)]
    order = np.argsort(-sums, kind="stable")
    return _Candidate(sums[order], [parts[index] for index in order])
