"""Assignment of rows to ranks and mini-batches with nearly equal cost, and to micro-batches under a token budget.

Costs are an argument: tokens, operations, or any other additive measure. A partition starts from a greedy rule and is
improved by local search. All plans are deterministic: equal costs give equal plans on every machine.

A micro-batch is computed packed, so its memory depends on its number of tokens, not on its longest row. The plan never
changes a result: losses are normalised by counts over the whole mini-batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megarl.base.errors import DataError

Partition = list[list[int]]
Parts = list[np.ndarray]

TOLERANCE = 1e-4
"""Relative distance to the lower bound at which the local search ends."""
_LENGTH_CLASSES = 16
_ITEMS_PER_PART = 256
# Pairs compared at once: few, since most steps succeed with one of the cheapest parts.
_PAIRS_AT_ONCE = 1 << 14
# Ends searches over thousands of parts after about a second; it counts work, not time, so that plans are reproducible.
_WORK = 1 << 25
_WORK_PER_PART = 256


class Capacity(NamedTuple):
    """Token capacity per micro-batch: a second knapsack constraint beside the costs."""

    weights: np.ndarray
    limit: float


def balanced_partition(costs: Sequence[float], k: int, equal_size: bool = False) -> Partition:
    """Partition items into ``k`` parts of nearly equal cost.

    The start is the greedy rule (most expensive item first, to the cheapest part; Graham, 1969); for equal sizes also
    rounds of ``k`` items and a snake order. The best start is improved by :func:`local_search`. The most expensive part
    is therefore never above any start, and for free sizes at most 4/3 - 1/(3k) times the optimum (greedy bound).

    Args:
        equal_size: give each part the same number of items; otherwise sizes may differ, and parts are empty only with
            fewer items than parts.

    Returns:
        Item numbers of each part, ascending; parts in the order of their first item, empty ones last.

    Raises:
        DataError: ``k`` is below 1, a cost is negative or not finite, or the items do not divide (``equal_size``).
    """
    values = np.asarray(costs, dtype=np.float64)
    if k < 1:
        raise DataError(f"k must be at least 1 part, got {k}", code="batch.too-few-parts")
    if not np.isfinite(values).all() or (values < 0).any():
        item = int(np.flatnonzero(~np.isfinite(values) | (values < 0))[0])
        raise DataError(f"cost {item} is {values[item]}; costs must be finite and not negative", code="batch.bad-cost")
    if equal_size and len(values) % k:
        raise DataError(f"{len(values)} items cannot be cut into {k} parts of equal size", code="batch.not-divisible")
    starts = (_greedy, _rounds, _snake) if equal_size else (_greedy,)
    candidates = [start(values, k, equal_size) for start in starts]
    best = min(candidates, key=lambda parts: max(float(values[part].sum()) for part in parts))
    balanced = local_search(values, best, fixed_sizes=equal_size)
    return sorted((np.sort(part).tolist() for part in balanced), key=lambda part: part[0] if part else len(values))


def balance_mini_batches(
    costs: Sequence[float], num_mini_batches: int, dp: int, equal_size: bool = True
) -> list[Partition]:
    """Assign the rows of each mini-batch to data-parallel ranks with nearly equal cost.

    Mini-batch ``i`` is the rows ``[i*m, (i+1)*m)`` with ``m = rows / num_mini_batches``, independent of ``dp``: the
    number of ranks changes no result. Ranks wait for each other at the end of every mini-batch, so each mini-batch is
    balanced separately.

    Args:
        equal_size: give every rank the same number of rows of a mini-batch; otherwise at least one.

    Returns:
        For each mini-batch, the row numbers of each rank.

    Raises:
        DataError: rows do not divide into the mini-batches, the rows of a mini-batch do not divide over the ranks
            (``equal_size``), or there are fewer rows than ranks.
    """
    parts = num_mini_batches * dp if equal_size else num_mini_batches
    if num_mini_batches < 1 or dp < 1 or len(costs) % parts or (0 < len(costs) < num_mini_batches * dp):
        raise DataError(
            f"{len(costs)} rows cannot be cut into {num_mini_batches} mini-batches of equal size for {dp} ranks; "
            f"the number of rows must be a multiple of {num_mini_batches} x {dp}",
            code="batch.mini-batch-rows",
        )
    size = len(costs) // num_mini_batches
    return [
        [[start + item for item in part] for part in balanced_partition(costs[start : start + size], dp, equal_size)]
        for start in range(0, len(costs), size or 1)
    ]


def stratified_minibatch_order(lengths: Sequence[int], num_mini_batches: int, group: int = 1) -> list[int]:
    """Order rows so that consecutive mini-batches have similar length distributions (stratified assignment).

    Long rows weigh more in a token-mean loss and cost more. Four mini-batches of 256 rows of a shuffled batch differ by
    Kolmogorov-Smirnov distances of 0.10 on average and 0.15 at worst, and by more if groups have similar lengths, as
    responses to one prompt do. Here groups are sorted by tokens. Each stratum of ``num_mini_batches`` groups gives one
    group to each mini-batch; a group goes to the mini-batch that it balances best in tokens and in row counts by length
    class. The order is a function of the arguments alone, in particular independent of the number of ranks.

    Args:
        group: consecutive rows that stay together, such as the responses to one prompt.

    Returns:
        Row numbers of the first mini-batch, of the second, and so on; ascending in each.

    Raises:
        DataError: the groups do not divide over the mini-batches.
    """
    values = np.asarray(lengths, dtype=np.int64)
    if num_mini_batches < 1 or group < 1 or len(values) % (num_mini_batches * group):
        raise DataError(
            f"{len(values)} rows in groups of {group} do not divide into {num_mini_batches} mini-batches; the number "
            f"of rows must be a multiple of {num_mini_batches} x {group}",
            code="batch.mini-batch-rows",
        )
    if num_mini_batches == 1 or not len(values):
        return list(range(len(values)))
    groups = values.reshape(-1, group)
    tokens = groups.sum(axis=1)
    bounds = np.quantile(values, np.arange(1, _LENGTH_CLASSES) / _LENGTH_CLASSES)
    shorter = (groups[:, :, None] <= bounds).sum(axis=1)  # [groups, classes - 1]
    features = np.column_stack([tokens / max(values.mean(), 1.0), shorter])
    assigned: Partition = [[] for _ in range(num_mini_batches)]
    sums = np.zeros((num_mini_batches, features.shape[1]))
    for stratum in _descending(tokens).reshape(-1, num_mini_batches):
        goal = (sums.sum(axis=0) + features[stratum].sum(axis=0)) / num_mini_batches
        free = list(range(num_mini_batches))
        for index in stratum.tolist():
            error = np.square(sums[free] + features[index] - goal).sum(axis=1)
            mini_batch = free.pop(int(np.argmin(error)))
            sums[mini_batch] += features[index]
            assigned[mini_batch].append(index)
    return [index * group + row for groups_of in assigned for index in sorted(groups_of) for row in range(group)]


_Start = Callable[[np.ndarray, int, bool], Parts]


def _descending(costs: np.ndarray) -> np.ndarray:
    return np.argsort(-costs, kind="stable")


def _greedy(costs: np.ndarray, k: int, equal_size: bool) -> Parts:
    """Assign the most expensive item first, to the cheapest part with capacity; break ties by the fewest items."""
    order = _descending(costs)
    capacity = len(costs) // k if equal_size else len(costs)
    heap = [(0.0, 0, part) for part in range(k)]
    owners = []
    for cost in costs[order].tolist():
        total, size, part = heap[0]
        owners.append(part)
        if size + 1 < capacity:
            heapq.heapreplace(heap, (total + cost, size + 1, part))
        else:
            heapq.heappop(heap)
    return _parts(order, np.array(owners, dtype=np.int64), k)


def _rounds(costs: np.ndarray, k: int, equal_size: bool) -> Parts:
    """Assign in rounds of ``k`` items, most expensive first: the most expensive of a round to the cheapest part."""
    order = _descending(costs)
    sums = np.zeros(k)
    owners = []
    for items in order.reshape(-1, k):
        parts = np.argsort(sums, kind="stable")
        sums[parts] += costs[items]
        owners.append(parts)
    return _parts(order, np.concatenate(owners) if owners else order, k)


def _snake(costs: np.ndarray, k: int, equal_size: bool) -> Parts:
    """Assign in rounds of ``k`` items, most expensive first, to the parts in alternating order."""
    order = _descending(costs)
    turns = np.tile(np.arange(k), (len(costs) // k, 1))
    turns[1::2] = turns[1::2, ::-1]
    return _parts(order, turns.ravel(), k)


def _parts(items: np.ndarray, owners: np.ndarray, k: int) -> Parts:
    by_owner = np.argsort(owners, kind="stable")
    return np.split(items[by_owner], np.cumsum(np.bincount(owners, minlength=k))[:-1])


def local_search(costs: np.ndarray, parts: Parts, *, fixed_sizes: bool, capacity: Capacity | None = None) -> Parts:
    """Rebalance parts by local search: exchange items between the most expensive part and another part.

    Deterministic. The most expensive part never becomes more expensive, and no part becomes empty. The search ends if
    the most expensive part is within :data:`TOLERANCE` of :func:`makespan_lower_bound`, if no exchange helps, or after
    a fixed amount of work. Parts with more than 256 items are searched on an evenly spaced sample: such parts are
    nearly balanced from the start.

    Args:
        fixed_sizes: exchange one item for one; otherwise an item may also move without exchange.
        capacity: limit that no part may exceed; the given parts must satisfy it.

    Returns:
        The parts in the given order, their items in arbitrary order.
    """
    if len(parts) < 2:
        return list(parts)
    search = _Search(costs, parts, fixed_sizes, capacity or Capacity(np.zeros(len(costs)), 0.0))
    goal = makespan_lower_bound(costs, len(parts), fixed_sizes=fixed_sizes) * (1 + TOLERANCE)
    while search.sums.max() > goal and search.improve():
        pass
    return search.parts


def makespan_lower_bound(costs: np.ndarray, k: int, *, fixed_sizes: bool) -> float:
    """Bound the makespan, the cost of the most expensive of ``k`` parts, from below; not always attainable.

    The bound is the mean of the parts or the most expensive item. With ``fixed_sizes`` all parts have ``c`` items. Then
    two of the ``j`` most expensive items share a part, or they are in ``j`` parts that also contain at least the
    ``j * (c - 1)`` cheapest items. For pairs, one of these parts contains at least the ``j``-th cheapest item.
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
    """State of the local search: parts, their costs, and their used capacity."""

    def __init__(self, costs: np.ndarray, parts: Parts, fixed_sizes: bool, capacity: Capacity) -> None:
        self.costs = costs
        self.fixed_sizes = fixed_sizes
        self.capacity = capacity
        self.parts = list(parts)
        self.sums = np.array([costs[part].sum() for part in parts])
        self.used = np.array([capacity.weights[part].sum() for part in parts])
        self.work = 0

    def improve(self) -> bool:
        """Make the best exchange of the most expensive part with the cheapest parts; return False if none helps.

        The best exchange leaves the more expensive of both parts cheapest.
        """
        heavy = int(np.argmax(self.sums))
        given = _sample(self.parts[heavy])
        for partners, taken in self._offers(heavy, _PAIRS_AT_ONCE // len(given)):
            moved = self.costs[given][:, None] - _values_of(self.costs, taken)
            weight = self.capacity.weights[given][:, None] - _values_of(self.capacity.weights, taken)
            after = np.maximum(self.sums[heavy] - moved, self.sums[partners] + moved)
            limit = self.capacity.limit
            fits = (self.used[heavy] - weight <= limit) & (self.used[partners] + weight <= limit)
            after = np.where(fits, after, np.inf)
            self.work += after.size
            best = int(np.argmin(after))
            # without the margin, rounding could make two parts exchange the same items forever
            if after.flat[best] < self.sums[heavy] * (1 - 1e-12):
                row, column = divmod(best, len(taken))
                self._exchange(heavy, int(given[row]), int(partners[column]), int(taken[column]))
                return True
        return False

    def _offers(self, heavy: int, at_once: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield arrays of parts and their items, cheapest part first, with about ``at_once`` entries each.

        For free sizes every part also offers no item, as item -1. Offers end when the work limit is reached.
        """
        partners: list[int] = []
        items: list[np.ndarray] = []
        size = 0
        for part in np.argsort(self.sums, kind="stable").tolist():
            if part == heavy or self.work > _WORK:
                continue
            offered = _sample(self.parts[part])
            if not self.fixed_sizes:
                offered = np.append(offered, -1)
            items.append(offered)
            partners.append(part)
            size += len(offered)
            self.work += _WORK_PER_PART
            if size >= at_once:
                yield np.repeat(partners, list(map(len, items))), np.concatenate(items)
                partners, items, size = [], [], 0
        if items:
            yield np.repeat(partners, list(map(len, items))), np.concatenate(items)

    def _exchange(self, heavy: int, given: int, light: int, taken: int) -> None:
        for part, old, new in ((heavy, given, taken), (light, taken, given)):
            kept = self.parts[part][self.parts[part] != old]
            self.parts[part] = kept if new < 0 else np.append(kept, new)
            self.sums[part] = self.costs[self.parts[part]].sum()
            self.used[part] = self.capacity.weights[self.parts[part]].sum()


def _sample(part: np.ndarray) -> np.ndarray:
    return part[:: -(-len(part) // _ITEMS_PER_PART) or 1]


def _values_of(values: np.ndarray, items: np.ndarray) -> np.ndarray:
    """``values`` of items, 0 for item -1."""
    return np.where(items >= 0, values[items], 0)


def fewest_micro_batches(lengths: Sequence[int], *, max_tokens: int | None = None, size: int | None = None) -> int:
    """Count the micro-batches of :func:`plan_micro_batches` without a given count; same arguments and errors."""
    return len(_fewest(lengths, max_tokens, size))


def common_micro_batch_count(counts: Sequence[int], multiple: int) -> int:
    """Find the smallest number of micro-batches that all data-parallel ranks can use, from each rank's minimum.

    Ranks must agree if the forward pass of a micro-batch contains a collective of all ranks (expert parallelism). The
    interleaved pipeline schedule needs a ``multiple`` of the number of stages.
    """
    return -(-max(counts) // multiple) * multiple


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    max_tokens: int | None = None,
    size: int | None = None,
    count: int | None = None,
    costs: Sequence[float] | None = None,
) -> list[list[int]]:
    """Cut rows into non-empty micro-batches; each row is in exactly one.

    With ``max_tokens``, first-fit decreasing bin packing (longest row first, into the first micro-batch with capacity)
    determines their number: at most 11/9 of the minimum, plus 6/9 (Dosa 2007). The rows are then distributed over that
    number, or over ``count``, with similar costs, because pipeline stages, and data-parallel ranks that synchronise in
    every micro-batch, wait for the most expensive one. With ``size``, micro-batches are consecutive rows. The plan is a
    function of the arguments alone.

    Args:
        lengths: tokens of each row, prompt and response.
        max_tokens: token budget of a micro-batch.
        size: row limit of a micro-batch.
        count: number of micro-batches, at least the required number; None = the required number.
        costs: work per row, with ``max_tokens``; its tokens if None.

    Returns:
        Row numbers of each micro-batch, ascending; with ``max_tokens`` the micro-batch with the most tokens, which
        needs the most memory, comes first.

    Raises:
        DataError: not exactly one of the two limits is set, a limit is below 1, a row exceeds ``max_tokens``, or
            ``count`` is below the required number or above the number of rows.
    """
    groups = _fewest(lengths, max_tokens, size)
    count = len(groups) if count is None else count
    if not len(groups) <= count <= len(lengths):
        raise DataError(
            f"{len(lengths)} rows that need {len(groups)} micro-batches cannot be cut into {count}; give each "
            "data-parallel rank more rows, or a larger budget per micro-batch",
            code="batch.micro-batch-count",
        )
    if max_tokens is None:
        return (
            groups if count == len(groups) else [part.tolist() for part in np.array_split(range(len(lengths)), count)]
        )
    tokens = np.asarray(lengths, dtype=np.int64)
    work = tokens.astype(np.float64) if costs is None else np.asarray(costs, dtype=np.float64)
    start = _greedy_with_capacity(work, tokens, count, max_tokens) or _split_groups(groups, work, count)
    balanced = local_search(work, start, fixed_sizes=False, capacity=Capacity(tokens, max_tokens))
    by_tokens = sorted(balanced, key=lambda group: (-int(tokens[group].sum()), int(group.min())))
    return [sorted(group.tolist()) for group in by_tokens]


def check_longest(lengths: Sequence[int], max_tokens: int, name: Callable[[int], str] = "row {}".format) -> None:
    """Check that every row fits into a micro-batch; ``name`` formats a row number for the message.

    Raises:
        DataError: a row has more tokens.
    """
    for row, length in enumerate(lengths):
        if not 0 <= length <= max_tokens:
            raise DataError(
                f"{name(row)} has {length} tokens, a micro-batch may hold {max_tokens}; raise the token budget per "
                "device (*max_token_len_per_gpu) to at least the longest prompt plus response",
                code="batch.micro-batch-tokens",
            )


def _fewest(lengths: Sequence[int], max_tokens: int | None, size: int | None) -> list[list[int]]:
    if (max_tokens is None) == (size is None):
        raise DataError(f"set one of max_tokens={max_tokens} and size={size}", code="batch.size-and-tokens")
    if size is not None:
        if size < 1:
            raise DataError(f"size must be at least 1 row, got {size}", code="batch.micro-batch-size")
        return [list(range(start, min(start + size, len(lengths)))) for start in range(0, len(lengths), size)]
    assert max_tokens is not None  # one of the two is given
    if max_tokens < 1:
        raise DataError(f"max_tokens must be at least 1, got {max_tokens}", code="batch.micro-batch-size")
    check_longest(lengths, max_tokens)
    return _first_fit_decreasing(lengths, max_tokens)


def _first_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    groups: list[list[int]] = []
    free = np.full(len(lengths), max_tokens, dtype=np.int64)  # free tokens of every possible micro-batch
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        group = int(np.argmax(free >= lengths[row]))
        if group == len(groups):
            groups.append([])
        groups[group].append(row)
        free[group] -= lengths[row]
    return [sorted(group) for group in groups]


def _greedy_with_capacity(work: np.ndarray, tokens: np.ndarray, count: int, max_tokens: int) -> Parts | None:
    """Assign the longest row first, to the cheapest micro-batch with capacity; None if a row does not fit.

    Ties go to the micro-batch with the fewest rows, so that none stays empty.
    """
    groups: list[list[int]] = [[] for _ in range(count)]
    spent, tokens_used, rows = np.zeros(count), np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for row in np.lexsort((-work, -tokens)).tolist():
        fits = np.flatnonzero(tokens_used + tokens[row] <= max_tokens)
        if not len(fits):
            return None
        group = int(fits[np.lexsort((rows[fits], spent[fits]))[0]])
        groups[group].append(row)
        spent[group] += work[row]
        tokens_used[group] += tokens[row]
        rows[group] += 1
    return [np.array(group, dtype=np.int64) for group in groups]


def _split_groups(groups: Sequence[Sequence[int]], work: np.ndarray, count: int) -> Parts:
    """Split the most expensive group with at least two rows until there are ``count`` groups."""
    parts = [np.array(group, dtype=np.int64) for group in groups]
    while len(parts) < count:
        heavy = max((index for index, part in enumerate(parts) if len(part) > 1), key=lambda i: work[parts[i]].sum())
        rows = parts[heavy][np.argsort(-work[parts[heavy]], kind="stable")]
        parts[heavy] = rows[::2]
        parts.append(rows[1::2])
    return parts
