import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms import Moments, PairMoments, explained_variance

numbers = st.floats(-1e3, 1e3, width=32)
parts = st.lists(st.lists(numbers, max_size=7), min_size=1, max_size=5)


@settings(max_examples=80)
@given(parts)
def test_merged_moments_equal_numpy_on_all_numbers(lists):
    moments = Moments.merged([Moments.of(torch.tensor(part, dtype=torch.float32)) for part in lists])
    values = np.array([value for part in lists for value in part])
    assert moments.count == len(values)
    if not len(values):
        assert moments == Moments() and moments.sample_variance == moments.deviation == 0
        return
    assert moments.mean == pytest.approx(values.mean(), rel=1e-12, abs=1e-10)
    assert (moments.least, moments.most) == (values.min(), values.max())
    variance = values.var(ddof=1) if len(values) > 1 else 0.0
    assert moments.sample_variance == pytest.approx(variance, rel=1e-10, abs=1e-9)
    assert moments.deviation == pytest.approx(values.std(), rel=1e-10, abs=1e-8)
    white = (values - values.mean()) / np.sqrt(variance + 1e-8)
    np.testing.assert_allclose(moments.whiten(torch.tensor(values)), white, rtol=1e-9, atol=1e-6)


@settings(max_examples=80)
@given(st.lists(st.lists(st.tuples(numbers, numbers), max_size=6), min_size=1, max_size=4))
def test_merged_correlation_equals_numpy(lists):
    merged = PairMoments.merged(
        [PairMoments.of(*torch.tensor(part, dtype=torch.float64).reshape(-1, 2).T) for part in lists]
    )
    pairs = np.array([pair for part in lists for pair in part]).reshape(-1, 2)
    if len(pairs) > 1 and (pairs.std(axis=0) > 1e-3).all():
        assert merged.correlation == pytest.approx(np.corrcoef(pairs.T)[0, 1], abs=1e-9)
    if len({*pairs[:, 0]}) < 2:
        assert merged.correlation is None


def test_explained_variance_of_known_critics():
    returns = torch.randn(300, generator=torch.Generator().manual_seed(0)) * 4

    def of_critic(values):
        cut = 117  # two processes
        errors = [Moments.of(part) for part in (returns - values).double().split([cut, len(returns) - cut])]
        return explained_variance(Moments.merged(errors), Moments.of(returns))

    assert of_critic(returns) == pytest.approx(1.0)
    assert of_critic(returns + 7.0) == pytest.approx(1.0)
    assert of_critic(torch.zeros_like(returns)) == pytest.approx(0.0, abs=1e-5)
    assert of_critic(-returns) == pytest.approx(-3.0, rel=1e-5)
