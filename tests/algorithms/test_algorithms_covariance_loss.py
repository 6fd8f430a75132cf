"""Clip-Cov and KL-Cov: chosen tokens of a mini-batch, and their losses."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_options import loss_options

from megarl.algorithms import POLICY_LOSSES, PolicyLossInputs, WholeMiniBatch, covariances, token_keys

OPTIONS = loss_options(
    clip_ratio_low=0.2,
    clip_ratio_high=0.3,
    clip_cov_ratio=0.2,
    clip_cov_lb=0.1,
    clip_cov_ub=1.0,
    kl_cov_ratio=0.3,
    ppo_kl_coef=0.7,
)


@st.composite
def mini_batches(draw):
    size = draw(st.integers(1, 30))
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    old = generator.normal(-1, 1, size)
    advantages = generator.normal(0, 1, size) * (1 - draw(st.sampled_from([0.0, 1.0])))
    keys = generator.permutation(size)
    mask = generator.random(size) < draw(st.sampled_from([0.6, 1.0]))
    return old + generator.normal(0, 0.3, size), old, advantages, mask, keys


def whole(batch):
    return WholeMiniBatch(*(torch.tensor(column) for column in batch))


def covariances_of(batch):
    """arXiv:2505.22617, by trained token."""
    new, _, advantages, mask, _ = batch
    own = np.flatnonzero(mask)
    return {t: (new[t] - np.mean(new[own])) * (advantages[t] - np.mean(advantages[own])) for t in own}


@settings(max_examples=80)
@given(mini_batches())
def test_clip_cov_chooses_random_tokens_within_bounds(batch):
    """A share of the tokens with a covariance within bounds, here with the smallest keys."""
    new, old, advantages, mask, keys = batch
    inside = []
    for t, cov in covariances_of(batch).items():
        ratio = np.exp(new[t] - old[t])
        clipped = (advantages[t] > 0 and ratio > 1.3) or (advantages[t] < 0 and ratio < 0.8)
        if 0.1 < cov < 1.0 and not clipped:
            inside.append(t)
    count = max(int(0.2 * mask.sum()), 1)
    expected = set(sorted(inside, key=lambda t: keys[t])[:count])
    assert set(POLICY_LOSSES["clip_cov"].choose(whole(batch), OPTIONS).nonzero()[:, 0].tolist()) == expected


@settings(max_examples=80)
@given(mini_batches())
def test_kl_cov_chooses_the_largest_covariances(batch):
    """The share with the largest covariances; keys break ties."""
    known = covariances_of(batch)
    count = max(int(0.3 * batch[3].sum()), 1)
    expected = set(sorted(known, key=lambda t: (-known[t], batch[4][t]))[:count])
    assert set(POLICY_LOSSES["kl_cov"].choose(whole(batch), OPTIONS).nonzero()[:, 0].tolist()) == expected


@settings(max_examples=40)
@given(mini_batches(), st.randoms())
def test_chosen_tokens_do_not_depend_on_token_order(batch, order):
    """Ranks may hold any of the rows."""
    places = list(range(len(batch[0])))
    order.shuffle(places)
    moved = tuple(column[places] for column in batch)
    for name in ("clip_cov", "kl_cov"):
        here, there = (POLICY_LOSSES[name].choose(whole(one), OPTIONS) for one in (batch, moved))
        assert torch.equal(here[places], there), name


def test_covariances_by_hand():
    batch = WholeMiniBatch(
        log_prob=torch.tensor([-1.0, -2.0, -3.0, 9.0]),
        old_log_prob=torch.zeros(4),
        advantages=torch.tensor([2.0, 0.0, 1.0, 9.0]),
        response_mask=torch.tensor([1, 1, 1, 0]),
        keys=torch.arange(4),
    )
    assert covariances(batch)[:3].tolist() == [1.0, 0.0, 0.0]  # means -2 and 1


@pytest.mark.parametrize(
    ("name", "losses", "slopes"),
    [
        # ratios 1.5 and 0.5 with advantages 2 and -1: chosen tokens have no gradient
        ("clip_cov", [0.0, 0.8], [0.0, 0.0]),
        # 0.7 |log 1.5| more at the chosen one
        ("kl_cov", [-3.0 + 0.7 * 0.4054651081, 0.5], [-3.0 + 0.7, 0.5]),
    ],
)
def test_reference_values(name, losses, slopes):
    log_prob = torch.log(torch.tensor([1.5, 0.5], dtype=torch.double)).requires_grad_()
    result = POLICY_LOSSES[name](
        PolicyLossInputs(
            log_prob,
            torch.zeros(2, dtype=torch.double),
            torch.tensor([2.0, -1.0], dtype=torch.double),
            torch.ones(2),
            torch.tensor([2]),
            torch.tensor([1, 0]),
            options=OPTIONS,
        )
    )
    result.loss.sum().backward()
    assert result.loss.tolist() == pytest.approx(losses) and log_prob.grad.tolist() == pytest.approx(slopes)
    share = result.diagnostics["pg_clipfrac" if name == "clip_cov" else "kl_cov_frac"]
    assert share.tolist() == [1.0, 0.0]


def test_missing_chosen_tokens_are_an_error():
    with pytest.raises(ValueError, match="chosen"):
        POLICY_LOSSES["kl_cov"](PolicyLossInputs(*(torch.zeros(1, 1) for _ in range(4)), options=OPTIONS))


SAMPLES = [(torch.tensor([1, 2]), torch.tensor([3, 4, 5])), (torch.tensor([1]), torch.tensor([2, 3, 4, 5]))]


def test_token_keys_are_a_function_of_the_sample():
    together, moved = token_keys(SAMPLES, 1, 7), token_keys(SAMPLES[::-1], 1, 7)
    assert torch.equal(together, torch.cat([moved[4:], moved[:4]]))
    assert torch.equal(together[:3], token_keys(SAMPLES[:1], 1, 7))
    assert len(set(together.tolist())) == 7 and int(together.min()) >= 0 and int(together.max()) < 2**52
    assert token_keys([], 1, 7).tolist() == []


def test_token_keys_depend_on_seed_and_step():
    keys = {tuple(token_keys(SAMPLES, seed, step).tolist()) for seed in (1, 2) for step in (0, 1)}
    assert len(keys) == 4


def test_token_keys_are_uniform():
    keys = token_keys([(torch.tensor([1]), torch.arange(20000))], 0, 0).double() / 2**52
    counts = torch.histc(keys, bins=10, min=0, max=1)
    assert counts.min() > 1800 and counts.max() < 2200  # five standard deviations of 42
