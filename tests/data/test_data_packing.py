import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data import plan_micro_batches
from megarl.errors import DataError

QUICK = settings(max_examples=50, deadline=None)


@QUICK
@given(st.lists(st.integers(0, 50), max_size=60), st.integers(50, 200))
def test_token_budget(lengths, max_tokens):
    plan = plan_micro_batches(lengths, max_tokens=max_tokens)
    assert sorted(row for group in plan for row in group) == list(range(len(lengths)))
    sums = [sum(lengths[row] for row in group) for group in plan]
    assert all(total <= max_tokens for total in sums)
    # first fit leaves no two micro-batches that would fit into one
    assert all(a + b > max_tokens for i, a in enumerate(sums) for b in sums[:i])
    assert all(group == sorted(group) for group in plan)
    assert plan == plan_micro_batches(lengths, max_tokens=max_tokens)


def first_fit_decreasing(lengths, max_tokens):
    """The rule by plain loops."""
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
def test_it_is_first_fit_decreasing(lengths):
    assert plan_micro_batches(lengths, max_tokens=64) == first_fit_decreasing(lengths, 64)


@QUICK
@given(st.integers(0, 30), st.integers(1, 10))
def test_fixed_size(rows, size):
    plan = plan_micro_batches([7] * rows, size=size)
    assert [row for group in plan for row in group] == list(range(rows))
    assert all(len(group) == size for group in plan[:-1])
    assert all(0 < len(group) <= size for group in plan)


def test_many_long_rows_are_planned_fast():
    lengths = np.random.default_rng(0).integers(1, 4096, 8192).tolist()
    start = time.perf_counter()
    plan_micro_batches(lengths, max_tokens=4096)
    assert time.perf_counter() - start < 3


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_tokens": 9}, r"row 1 has 10 tokens, a micro-batch may hold 9; raise"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"size": 0}, "size must be at least 1 row, got 0"),
        ({}, "either max_tokens or size"),
        ({"size": 1, "max_tokens": 20}, "either max_tokens or size"),
    ],
)
def test_bad_limits(limits, message):
    with pytest.raises(DataError, match=message):
        plan_micro_batches([3, 10], **limits)
