"""Masked statistics, moments and reductions per sequence."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms import Moments, PairMoments, explained_variance, masked_mean, masked_whiten
from megarl.algorithms.masked import expand_to_tokens, sequence_sums


@st.composite
def masked_rows(draw):
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    seed = draw(st.integers(0, 2**31))
    generator = np.random.default_rng(seed)
    mask = generator.random((rows, columns)) < draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    values = generator.normal(3.0, 2.0, (rows, columns))
    values[~mask] = np.nan  # nothing may read what is outside the mask
    return values, mask


@settings(max_examples=60)
@given(masked_rows())
def test_statistics_equal_numpy_on_the_selected_entries(case):
    values, mask = case
    tensor, selected = torch.tensor(values), values[mask]
    mask_tensor = torch.tensor(mask.astype(np.int64))
    assert masked_mean(tensor, mask_tensor).item() == pytest.approx(np.mean(selected) if len(selected) else 0.0)
    variance = np.var(selected, ddof=1) if len(selected) > 1 else 0.0

    white = masked_whiten(tensor, mask_tensor).numpy()
    expected = np.zeros_like(values)
    if len(selected):
        expected[mask] = (selected - selected.mean()) / np.sqrt(variance + 1e-8)
    np.testing.assert_allclose(white, expected, atol=1e-9)


def test_whitening_keeps_the_type_and_survives_a_single_entry():
    white = masked_whiten(torch.tensor([[5.0, 7.0]]), torch.tensor([[1, 0]]))
    assert white.dtype == torch.float32 and white.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("lengths", [[2, 0, 3], [5]])
def test_expansion_to_tokens_knows_its_size(lengths, monkeypatch):
    """Without it a GPU would report the number of tokens to the host, which waits for that."""
    sizes, plain = [], torch.repeat_interleave

    def repeat(values, repeats, *, output_size=None):
        sizes.append(output_size)
        return plain(values, repeats, output_size=output_size)

    monkeypatch.setattr(torch, "repeat_interleave", repeat)
    values, counts = torch.arange(5.0, requires_grad=True), torch.tensor(lengths)
    sums = sequence_sums(values, torch.ones(5), counts)
    assert sums.tolist() == [part.sum().item() for part in values.split(lengths)]
    tokens = expand_to_tokens(sums, values, counts)
    assert tokens.tolist() == [part.sum().item() for part in values.split(lengths) for _ in part]
    assert sizes == [5, 5]


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
