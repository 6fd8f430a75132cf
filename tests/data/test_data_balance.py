"""Partitions of rows over ranks and mini-batches, and micro-batches under a token budget."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.expected_errors import raises

from megarl.data import (
    balance_mini_batches,
    balanced_partition,
    common_micro_batch_count,
    fewest_micro_batches,
    plan_micro_batches,
    stratified_minibatch_order,
)
from megarl.data.balance import Capacity, local_search, makespan_lower_bound

QUICK = settings(max_examples=50)


def heaviest(costs, parts):
    return max(sum(costs[item] for item in part) for part in parts)


def greedy(costs, k, capacity):
    """The greedy rule: most expensive first, to the cheapest part with capacity."""
    sums, sizes = [0] * k, [0] * k
    for cost in sorted(costs, reverse=True):
        part = min((p for p in range(k) if sizes[p] < capacity), key=lambda p: sums[p])
        sums[part] += cost
        sizes[part] += 1
    return max(sums)


def snake(costs, k):
    """Snake order: most expensive first, to the parts in alternating order."""
    sums = [0] * k
    for place, cost in enumerate(sorted(costs, reverse=True)):
        round_, seat = divmod(place, k)
        sums[k - 1 - seat if round_ % 2 else seat] += cost
    return max(sums)


def optimum(costs, k, equal=False):
    partitions = _all_partitions(costs, k)
    if equal:
        partitions = (parts for parts in partitions if len(set(map(len, parts))) == 1)
    return min(heaviest(costs, parts) for parts in partitions)


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
    assert all(parts) or len(costs) < k
    assert parts == balanced_partition(costs, k)


@QUICK
@given(st.integers(1, 6), st.integers(0, 8), st.randoms(use_true_random=False))
def test_equal_sizes(k, each, random):
    costs = [random.randrange(1000) for _ in range(k * each)]
    parts = balanced_partition(costs, k, equal_size=True)
    assert [len(part) for part in parts] == [each] * k
    assert sorted(item for part in parts for item in part) == list(range(k * each))
    if each:
        assert heaviest(costs, parts) <= min(greedy(costs, k, each), snake(costs, k))
    assert parts == balanced_partition(costs, k, equal_size=True)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(2, 3))
def test_within_the_greedy_bound_of_the_optimum(costs, k):
    assert heaviest(costs, balanced_partition(costs, k)) <= (4 / 3 - 1 / (3 * k)) * optimum(costs, k) + 1e-9


@settings(max_examples=20)
@given(st.sampled_from([(2, 3), (3, 2), (4, 2), (1, 3)]), st.randoms(use_true_random=False))
def test_lower_bound_with_equal_sizes(shape, random):
    each, k = shape
    costs = np.array([random.randrange(1, 60) for _ in range(k * each)], dtype=float)
    bound, best = makespan_lower_bound(costs, k, fixed_sizes=True), optimum(costs.tolist(), k, equal=True)
    assert makespan_lower_bound(costs, k, fixed_sizes=False) <= bound <= best + 1e-9
    if each == 2:  # the most expensive with the cheapest, and so on, cannot be beaten
        assert heaviest(costs, balanced_partition(costs, k, equal_size=True)) == best


def test_local_search_improves_greedy():
    costs = [8, 7, 6, 5, 4]
    assert greedy(costs, 2, 5) == 17
    assert heaviest(costs, balanced_partition(costs, 2)) == 15 == optimum(costs, 2)


@QUICK
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=30), st.integers(1, 5))
def test_local_search_respects_capacity_and_leaves_no_part_empty(items, k):
    costs, weights = (np.array(column, dtype=float) for column in zip(*items, strict=True))
    parts = [np.arange(start, len(items), k) for start in range(min(k, len(items)))]
    limit = max(weights[part].sum() for part in parts)
    after = local_search(costs, parts, fixed_sizes=False, capacity=Capacity(weights, limit))
    assert sorted(item for part in after for item in part) == list(range(len(items)))
    assert all(len(part) for part in after)
    assert max(weights[part].sum() for part in after) <= limit
    assert heaviest(costs, after) <= heaviest(costs, parts)


def lengths_of(rows, seed=0):
    return np.clip(np.random.default_rng(seed).lognormal(np.log(1024), 1, rows), 1, 8192).astype(int)


def work_of(lengths):
    return 24576.0 * lengths + lengths.astype(float) ** 2


@pytest.mark.parametrize(("rows", "k", "equal"), [(1024, 64, True), (1024, 8, False), (256, 16, True)])
def test_large_batch_is_balanced(rows, k, equal):
    costs = work_of(lengths_of(rows))
    assert heaviest(costs, balanced_partition(costs, k, equal)) <= 1.001 * costs.sum() / k


def test_free_sizes_reach_the_bound_of_the_longest_row():
    costs = work_of(lengths_of(128))
    assert heaviest(costs, balanced_partition(costs, 32)) == costs.max() > 1.2 * costs.sum() / 32


@pytest.mark.parametrize(
    ("arguments", "code", "value"),
    [
        (([1, 2, 3], 0), "batch.too-few-parts", 0),
        (([1, -2, 3], 2), "batch.bad-cost", "cost 1 is -2.0"),
        (([1, float("nan")], 2), "batch.bad-cost", "cost 1 is nan"),
        (([1, 2, 3], 2, True), "batch.not-divisible", "3 items"),
    ],
)
def test_bad_arguments(arguments, code, value):
    with raises(code, value):
        balanced_partition(*arguments)


@QUICK
@given(
    st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 2, 3, 4, 6]), st.booleans(),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_mini_batches_are_independent_of_dp(num_mini_batches, twelves, dp, equal, random):
    size = 12 * twelves
    costs = [random.randrange(1, 500) for _ in range(num_mini_batches * size)]
    plan = balance_mini_batches(costs, num_mini_batches, dp, equal)
    assert len(plan) == num_mini_batches
    for mini_batch, parts in enumerate(plan):
        assert len(parts) == dp and all(parts)
        assert not equal or {len(part) for part in parts} == {size // dp}
        assert sorted(itertools.chain(*parts)) == list(range(mini_batch * size, (mini_batch + 1) * size))


@pytest.mark.parametrize(("rows", "num_mini_batches", "dp"), [(10, 3, 1), (12, 2, 4), (4, 0, 1), (4, 1, 0)])
def test_mini_batches_that_do_not_divide_are_rejected(rows, num_mini_batches, dp):
    with raises("batch.mini-batch-rows", rows, num_mini_batches, dp):
        balance_mini_batches([1] * rows, num_mini_batches, dp)


def distance(a, b):
    """Kolmogorov-Smirnov distance by its definition."""
    return max(abs((a <= point).mean() - (b <= point).mean()) for point in {*a, *b})


@pytest.mark.parametrize(("group", "limit"), [(1, 0.01), (8, 0.1)])
def test_stratified_mini_batches_have_similar_lengths(group, limit):
    rng = np.random.default_rng(0)
    of_prompt = np.repeat(rng.normal(size=1024 // group), group)
    own = rng.normal(size=1024) if group > 1 else of_prompt
    lengths = np.clip(1024 * np.exp((of_prompt + own) / 2**0.5), 1, 8192).astype(int)
    order = stratified_minibatch_order(lengths.tolist(), 4, group)
    cuts = np.split(lengths[order], 4)
    assert max(distance(a, b) for a, b in itertools.combinations(cuts, 2)) <= limit
    if group > 1:
        assert max(distance(a, b) for a, b in itertools.combinations(np.split(lengths, 4), 2)) > limit


@QUICK
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.randoms(use_true_random=False))
def test_stratified_order_keeps_groups_together(num_mini_batches, each, group, random):
    lengths = [random.randrange(1, 9) for _ in range(num_mini_batches * each * group)]
    order = stratified_minibatch_order(lengths, num_mini_batches, group)
    assert sorted(order) == list(range(len(lengths)))
    for start in range(0, len(order), group):
        assert order[start] % group == 0
        assert order[start : start + group] == list(range(order[start], order[start] + group))
    for mini_batch in np.split(np.array(order), num_mini_batches):
        assert (np.diff(mini_batch) > 0).all()
    assert order == stratified_minibatch_order(lengths, num_mini_batches, group)


@pytest.mark.parametrize("arguments", [([1] * 12, 5), ([1] * 12, 2, 4), ([1] * 4, 0), ([1] * 4, 1, 0)])
def test_groups_that_do_not_divide_are_rejected(arguments):
    with raises("batch.mini-batch-rows", len(arguments[0]), arguments[1]):
        stratified_minibatch_order(*arguments)


@QUICK
@given(st.lists(st.integers(0, 50), max_size=60), st.integers(50, 200))
def test_token_budget(lengths, max_tokens):
    plan = plan_micro_batches(lengths, max_tokens=max_tokens)
    assert sorted(row for group in plan for row in group) == list(range(len(lengths)))
    sums = [sum(lengths[row] for row in group) for group in plan]
    assert all(total <= max_tokens for total in sums)
    assert sums == sorted(sums, reverse=True)
    assert all(plan) and all(group == sorted(group) for group in plan)
    assert plan == plan_micro_batches(lengths, max_tokens=max_tokens)
    assert len(plan) == fewest_micro_batches(lengths, max_tokens=max_tokens)


def first_fit_decreasing(lengths, max_tokens):
    """First-fit decreasing by plain loops."""
    bins = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        for rows in bins:
            if sum(lengths[r] for r in rows) + lengths[row] <= max_tokens:
                rows.append(row)
                break
        else:
            bins.append([row])
    return [sorted(rows) for rows in bins]


@QUICK
@given(st.lists(st.integers(1, 50), max_size=40))
def test_count_equals_first_fit_decreasing(lengths):
    assert len(plan_micro_batches(lengths, max_tokens=64)) == len(first_fit_decreasing(lengths, 64))


@QUICK
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(0, 40), st.booleans())
def test_given_count_without_empty_micro_batches(lengths, more, by_size):
    limits = {"size": 4} if by_size else {"max_tokens": 64}
    count = min(fewest_micro_batches(lengths, **limits) + more, len(lengths))
    plan = plan_micro_batches(lengths, **limits, count=count)
    assert len(plan) == count and all(plan)
    assert sorted(row for group in plan for row in group) == list(range(len(lengths)))
    assert max(map(len, plan)) <= 4 if by_size else max(sum(lengths[row] for row in group) for group in plan) <= 64


def test_micro_batches_have_similar_costs():
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(1024), 1, 256), 1, 8192).astype(int)
    costs = 24576.0 * lengths + lengths.astype(float) ** 2

    def unevenness(plan):
        work = [costs[group].sum() for group in plan]
        return max(work) / np.mean(work)

    plan = plan_micro_batches(lengths.tolist(), max_tokens=16384, costs=costs.tolist())
    assert unevenness(plan) < 1.1 < 1.2 < unevenness(first_fit_decreasing(lengths, 16384))
    assert unevenness(plan_micro_batches(lengths.tolist(), max_tokens=16384, count=32, costs=costs.tolist())) < 1.001


@pytest.mark.parametrize(
    ("counts", "multiple", "common"), [([1], 1, 1), ([3, 5], 1, 5), ([3, 5], 4, 8), ([4, 2], 4, 4)]
)
def test_common_micro_batch_count(counts, multiple, common):
    assert common_micro_batch_count(counts, multiple) == common


@pytest.mark.parametrize(("limits", "count"), [({"max_tokens": 10}, 1), ({"max_tokens": 10}, 4), ({"size": 1}, 2)])
def test_impossible_counts_are_errors(limits, count):
    with raises("batch.micro-batch-count", "3 rows", count):
        plan_micro_batches([6, 6, 3], **limits, count=count)


@QUICK
@given(st.integers(0, 30), st.integers(1, 10))
def test_fixed_size(rows, size):
    plan = plan_micro_batches([7] * rows, size=size)
    assert [row for group in plan for row in group] == list(range(rows))
    assert all(len(group) == size for group in plan[:-1])
    assert all(0 < len(group) <= size for group in plan)


@pytest.mark.parametrize(
    ("limits", "code", "values"),
    [
        ({"max_tokens": 0}, "batch.micro-batch-size", ("max_tokens", 0)),
        ({"size": 0}, "batch.micro-batch-size", ("size", 0)),
        ({}, "batch.size-and-tokens", ("max_tokens=None", "size=None")),
        ({"size": 1, "max_tokens": 20}, "batch.size-and-tokens", ("max_tokens=20", "size=1")),
    ],
)
def test_bad_limits(limits, code, values):
    with raises(code, *values):
        plan_micro_batches([3, 10], **limits)


def test_message_of_a_row_that_exceeds_a_micro_batch():
    with raises("batch.micro-batch-tokens") as caught:
        plan_micro_batches([3, 10], max_tokens=9)
    assert str(caught.value) == (
        "row 1 has 10 tokens, a micro-batch may hold 9; raise the token budget per device (*max_token_len_per_gpu) to "
        "at least the longest prompt plus response [batch.micro-batch-tokens]"
    )
