"""mean@N, best@k, worst@k and maj@k against definitions that enumerate every case."""

import math
from collections import Counter
from itertools import combinations, permutations
from statistics import fmean, pstdev

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.trainer.phases.validation import (
    MAX_SUBSETS,
    expected_extreme,
    expected_majority,
    subset_sizes,
    subsets,
    validation_metrics,
)

numbers = st.floats(-4, 4, allow_nan=False, width=16)


def over_subsets(values, k, reduce):
    results = [reduce(subset) for subset in combinations(values, k)]
    return fmean(results), pstdev(results)


def verls_majority(drawn):
    """Of answers in the order in which they were drawn: the first value of the vote that most gave, the first seen of
    equals."""
    winner = Counter(vote for _, vote in drawn).most_common(1)[0][0]
    return next(value for value, vote in drawn if vote == winner)


@settings(max_examples=50)
@given(st.lists(numbers, min_size=1, max_size=7), st.data())
def test_best_and_worst_are_means_over_all_subsets(values, data):
    k = data.draw(st.integers(1, len(values)))
    for largest, reduce in ((True, max), (False, min)):
        found = expected_extreme(np.array(values), k, largest=largest)
        assert found == pytest.approx(over_subsets(values, k, reduce), abs=1e-6)


@given(st.integers(1, 60), st.data())
def test_best_of_right_and_wrong_is_pass_at_k(n, data):
    right, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    values = np.array([1.0] * right + [0.0] * (n - right))
    pass_at_k = 1 - math.comb(n - right, k) / math.comb(n, k)
    assert expected_extreme(values, k, largest=True)[0] == pytest.approx(pass_at_k, abs=1e-9)


@settings(max_examples=40)
@given(st.lists(st.tuples(numbers, st.integers(0, 2)), min_size=1, max_size=5), st.data())
def test_majority_is_the_mean_of_the_verl_rule_over_all_draws(answers, data):
    k = data.draw(st.integers(1, len(answers)))
    values, votes = (np.array(column) for column in zip(*answers, strict=True))
    every = fmean(verls_majority(drawn) for drawn in permutations(answers, k))
    assert expected_majority(values, votes, k)[0] == pytest.approx(every, abs=1e-6)


def test_many_subsets_are_sampled_with_a_fixed_seed():
    generator = np.random.default_rng(7)
    values, votes = generator.integers(0, 2, 16).astype(float), generator.integers(0, 4, 16)
    every = [
        fmean([values[list(s)][votes[list(s)] == vote].mean() for vote in tied])
        for s in combinations(range(16), 4)
        for counts in [Counter(votes[list(s)].tolist())]
        for tied in [[vote for vote, count in counts.items() if count == max(counts.values())]]
    ]
    assert len(every) > MAX_SUBSETS
    mean, std = expected_majority(values, votes, 4)
    assert mean == pytest.approx(fmean(every), abs=5 * pstdev(every) / math.sqrt(MAX_SUBSETS))
    assert std == pytest.approx(pstdev(every), rel=0.1)
    before = subsets(16, 4)
    subsets.cache_clear()
    assert np.array_equal(subsets(16, 4), before)
    assert before.sum(1).tolist() == [4.0] * MAX_SUBSETS


@pytest.mark.parametrize(
    ("n", "ks"), [(1, []), (2, [2]), (3, [2, 3]), (4, [2, 4]), (5, [2, 4, 5]), (16, [2, 4, 8, 16])]
)
def test_subset_sizes_equal_those_of_verl(n, ks):
    assert subset_sizes(n) == ks


def column(*values):
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made


def test_metric_names_equal_those_of_verl():
    metrics = validation_metrics(
        column(*["sums"] * 4, *["words"] * 4),
        column(*"aaaabbbb"),
        4,
        {
            "reward": np.array([2.0, -2, -2, -2, 1, 0, 0, 0]),
            "acc": np.array([1.0, 0, 0, 0] + [math.nan] * 4),
        },
        column("7", "8", "8", None, *[None] * 4),
    )
    core = {name: value for name, value in metrics.items() if name.startswith("val-core/")}
    assert core == {
        "val-core/sums/acc/mean@4": 0.25,
        "val-core/sums/acc/best@4/mean": 1.0,
        "val-core/sums/acc/maj@4/mean": 0.0,
        "val-core/words/reward/mean@4": 0.25,
        "val-core/words/reward/best@4/mean": 1.0,
    }
    auxiliary = {name.removeprefix("val-aux/") for name in metrics.keys() - core.keys()}
    of_two = {f"{kind}@2/{what}" for kind in ("best", "worst") for what in ("mean", "std")}
    both = {"std@4", "worst@4/mean", *of_two}
    majority = {"maj@2/mean", "maj@2/std"}
    whole = {"mean@4", "best@4/mean", "maj@4/mean"}
    assert auxiliary == {
        *(f"sums/acc/{name}" for name in both | majority),
        *(f"sums/reward/{name}" for name in both | majority | whole),
        *(f"words/reward/{name}" for name in both),
    }
    assert metrics["val-aux/sums/acc/best@2/mean"] == pytest.approx(0.5)
    assert metrics["val-aux/sums/reward/std@4"] == pytest.approx(pstdev([2, -2, -2, -2]))


def test_prompts_are_averaged_not_answers():
    """A prompt with a failed answer counts as much as one without, and none where all failed."""
    metrics = validation_metrics(
        column(*["sums"] * 4, *["words"] * 4, *["lost"] * 2),
        column(*"aabb", *"aacc", *"dd"),
        2,
        {"reward": np.array([1.0, 0.0, 1.0, math.nan, 0.0, 0.5, math.nan, math.nan, math.nan, math.nan])},
    )
    assert {name: value for name, value in metrics.items() if name.startswith("val-core/")} == {
        "val-core/sums/reward/mean@2": 0.75,
        "val-core/sums/reward/best@2/mean": 1.0,
        "val-core/words/reward/mean@2": 0.25,
        "val-core/words/reward/best@2/mean": 0.5,
    }


def test_a_single_sample_has_only_the_mean():
    metrics = validation_metrics(column("s"), column("a"), 1, {"reward": np.array([1.0])}, column("7"))
    assert metrics == {"val-core/s/reward/mean@1": 1.0}
