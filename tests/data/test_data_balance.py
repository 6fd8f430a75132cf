import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data import balance_mini_batches, balanced_partition
from megarl.errors import DataError

QUICK = settings(max_examples=50, deadline=None)


def heaviest(costs, parts) -> float:
    return max(sum(costs[item] for item in part) for part in parts)


def greedy(costs, k, capacity) -> float:
    """The plain rule: most expensive first, to the cheapest part with room."""
    sums, sizes = [0] * k, [0] * k
    for cost in sorted(costs, reverse=True):
        part = min((p for p in range(k) if sizes[p] < capacity), key=lambda p: sums[p])
        sums[part] += cost
        sizes[part] += 1
    return max(sums)


def optimum(costs, k) -> float:
    return min(heaviest(costs, parts) for parts in _all_partitions(costs, k))


def _all_partitions(costs, k):
    for owners in itertools.product(range(k), repeat=len(costs)):
        yield [[item for item, owner in enumerate(owners) if owner == part] for part in range(k)]


@QUICK
@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 6))
def test_each_item_once_and_never_worse_than_greedy(costs, k):
    parts = balanced_partition(costs, k)
    assert len(parts) == k
    assert sorted(item for part in parts for item in part) == list(range(len(costs)))
    assert heaviest(costs, parts) <= greedy(costs, k, len(costs))
    assert parts == balanced_partition(costs, k)


@QUICK
@given(st.integers(1, 6), st.integers(0, 8), st.randoms(use_true_random=False))
def test_equal_sizes(k, each, random):
    costs = [random.randrange(1000) for _ in range(k * each)]
    parts = balanced_partition(costs, k, equal_size=True)
    assert [len(part) for part in parts] == [each] * k
    assert sorted(item for part in parts for item in part) == list(range(k * each))
    if each:
        assert heaviest(costs, parts) <= greedy(costs, k, each)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(2, 3))
def test_within_the_greedy_bound_of_the_optimum(costs, k):
    assert heaviest(costs, balanced_partition(costs, k)) <= (4 / 3 - 1 / (3 * k)) * optimum(costs, k) + 1e-9


def test_differencing_finds_what_greedy_misses():
    costs = [8, 7, 6, 5, 4]  # greedy: 17, differencing: 16, optimum: 15
    assert greedy(costs, 2, 5) == 17
    assert heaviest(costs, balanced_partition(costs, 2)) == 16


def test_a_large_batch_is_even_and_fast():
    costs = np.minimum(np.random.default_rng(0).lognormal(6, 1, 1024), 4096).astype(int).tolist()
    start = time.perf_counter()
    parts = balanced_partition(costs, 64, equal_size=True)
    assert time.perf_counter() - start < 2
    assert heaviest(costs, parts) < 1.01 * sum(costs) / 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2, 3], 0), "k must be at least 1"),
        (([1, -2, 3], 2), "cost of item 1 is -2.0"),
        (([1, float("nan")], 2), "cost of item 1 is nan"),
        (([1, 2, 3], 2, True), "3 items cannot be cut into 2 parts of equal size"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(DataError, match=message):
        balanced_partition(*arguments)


@QUICK
@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 2, 3, 4, 6]), st.randoms(use_true_random=False))
def test_mini_batches_hold_the_same_rows_whatever_dp(num_mini_batches, twelves, dp, random):
    size = 12 * twelves
    costs = [random.randrange(1, 500) for _ in range(num_mini_batches * size)]
    ranks = balance_mini_batches(costs, num_mini_batches, dp)
    share = size // dp
    assert [len(rows) for rows in ranks] == [num_mini_batches * share] * dp
    for mini_batch in range(num_mini_batches):
        rows = sorted(row for rank in ranks for row in rank[mini_batch * share : (mini_batch + 1) * share])
        assert rows == list(range(mini_batch * size, (mini_batch + 1) * size))


@pytest.mark.parametrize(("rows", "num_mini_batches", "dp"), [(10, 3, 1), (12, 2, 4), (4, 0, 1), (4, 1, 0)])
def test_mini_batches_that_do_not_divide(rows, num_mini_batches, dp):
    with pytest.raises(DataError, match=f"{rows} rows cannot be cut into {num_mini_batches} mini-batches"):
        balance_mini_batches([1] * rows, num_mini_batches, dp)
