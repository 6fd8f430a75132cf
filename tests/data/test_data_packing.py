import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.expected_errors import raises

from megarl.data import common_micro_batch_count, fewest_micro_batches, plan_micro_batches

QUICK = settings(max_examples=50)


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
