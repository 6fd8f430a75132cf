"""Selection of responses against loops over groups."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.selection import best_of_groups, policy_filtration_rows, varied_groups

ROWS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 1.0, -1.0]), st.sampled_from("abc"), st.booleans()), min_size=1, max_size=30
)


@given(ROWS)
def test_varied_groups_have_two_different_scores(rows):
    scores, groups, counted = (np.array(column) for column in zip(*rows, strict=True))
    expected = [len({score for score, other, counts in rows if other == group and counts}) > 1 for _, group, _ in rows]
    assert varied_groups(scores, groups.astype(object), counted).tolist() == expected


@given(ROWS, st.integers(1, 3))
def test_best_of_groups_keeps_the_batch_order(rows, keep):
    scores, groups, counted = (np.array(column) for column in zip(*rows, strict=True))
    expected = []
    for group in set(groups.tolist()):
        own = [row for row in range(len(rows)) if rows[row][1] == group]
        expected += sorted(own, key=lambda row: (not rows[row][2], -rows[row][0] if rows[row][2] else 0.0, row))[:keep]
    assert best_of_groups(scores, groups.astype(object), counted, keep).tolist() == sorted(expected)


def test_covariance_losses_choose_nothing_without_trained_tokens():
    empty = np.array([])
    assert best_of_groups(empty, empty.astype(object), empty.astype(bool), 1).tolist() == []
    assert varied_groups(empty, empty.astype(object), empty.astype(bool)).tolist() == []


SCORES = np.array([2.0, -1.0, 0.0, 1.0, 2.0, 9.0])
COUNTED = np.array([True] * 5 + [False])
CHANCES = {
    "pow": [0.4, 0.1, 0.0, 0.1, 0.4, 0.0],  # 4, 1, 0, 1, 4 of 10
    "max_min": [1 / 3, 1 / 3, 0.0, 0.0, 1 / 3, 0.0],
    "max_random": [4 / 11, 1 / 11, 1 / 11, 1 / 11, 4 / 11, 0.0],
}


@pytest.mark.parametrize("method", CHANCES)
def test_policy_filtration_draws_rows_by_weight(method):
    drawn = np.concatenate([policy_filtration_rows(SCORES, COUNTED, method, 2.0, [1, step]) for step in range(2000)])
    shares = np.bincount(drawn, minlength=6) / len(drawn)
    np.testing.assert_allclose(shares, CHANCES[method], atol=0.02)  # four standard deviations of 0.0045


def test_policy_filtration_is_reproducible_and_handles_zero_weights():
    again = [policy_filtration_rows(SCORES, COUNTED, "pow", 2.0, [3, 4]).tolist() for _ in range(2)]
    assert again[0] == again[1] != policy_filtration_rows(SCORES, COUNTED, "pow", 2.0, [3, 5]).tolist()
    nothing = np.zeros(6)
    rows = [
        set(policy_filtration_rows(nothing, counted, "pow", 2.0, [s]).tolist())
        for counted in (COUNTED, ~COUNTED & False)
        for s in range(40)
    ]
    assert set().union(*rows[:40]) == {0, 1, 2, 3, 4} and set().union(*rows[40:]) == set(range(6))
