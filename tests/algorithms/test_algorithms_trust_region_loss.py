"""Policy losses with another trust region than PPO's clip."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_options import loss_options

from megarl.algorithms import (
    POLICY_LOSSES,
    PolicyLossInputs,
    Truncation,
    WholeMiniBatch,
    covariances,
    importance_weights,
    log_ratios,
    token_keys,
)

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


STALE_OPTIONS = loss_options(clip_ratio_low=0.12, clip_ratio_high=0.07, clip_ratio_c=1.4, m2_threshold=0.05)


@st.composite
def batches(draw):
    """Rectangles of log-probs, old ones, advantages with zeros, and a mask with holes."""
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    mask = generator.random(shape) < draw(st.sampled_from([0.5, 1.0]))
    old = -3 * generator.random(shape) - 0.01
    new = np.minimum(old + generator.normal(0, 0.4, shape), -0.001)
    advantages = generator.normal(0, 1, shape) * (generator.random(shape) < 0.9)
    return new, old, advantages, mask


def run(name, batch, chosen=None):
    """Losses of a rectangle, the gradient of their sum over the mask, and the diagnostics."""
    log_prob, mask = torch.tensor(batch[0], requires_grad=True), torch.tensor(batch[3])
    inputs = PolicyLossInputs(
        log_prob, torch.tensor(batch[1]), torch.tensor(batch[2]), mask, chosen=chosen, options=STALE_OPTIONS
    )
    result = POLICY_LOSSES[name](inputs)
    result.loss[mask].sum().backward()
    return result.loss.detach().numpy(), log_prob.grad.numpy(), result.diagnostics


def binary_kl(p, q):
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


DIVERGENCES = {"dppo_tv": lambda p, q: abs(p - q), "dppo_kl": binary_kl}


@pytest.mark.parametrize("name", DIVERGENCES)
@settings(max_examples=60)
@given(batch=batches())
def test_dppo_stops_tokens_that_left_the_trust_region(name, batch):
    losses, slopes, diagnostics = run(name, batch)
    for place in np.argwhere(batch[3]):
        new, old, advantage, _ = (column[tuple(place)] for column in batch)
        distance = DIVERGENCES[name](math.exp(old), math.exp(new))
        outside = distance > 0.07 and new > old if advantage > 0 else distance > 0.12 and new < old
        ratio = math.exp(new - old)
        slope = 0.0 if outside else -advantage * min(ratio, 1.4)
        assert slopes[tuple(place)] == pytest.approx(slope, rel=1e-9)
        assert losses[tuple(place)] == pytest.approx(slope * new, rel=1e-9)
        assert diagnostics["pg_clipfrac"][tuple(place)] == outside
        assert diagnostics["pg_clipfrac_lower"][tuple(place)] == (ratio > 1.4 and not outside)


@pytest.mark.parametrize(
    ("name", "losses"),
    [
        ("dppo_tv", [1.7821519461380424, 0.0, 0.0, 0.0, -0.5198603854199589, 0.0]),
        ("dppo_kl", [1.7821519461380424, 0.0, -0.27741384528568075, -1.2247924785817907, -0.5198603854199589, 0.0]),
    ],
)
def test_dppo_numbers_of_verl(name, losses):
    """Losses of verl's functions (August 2026) for these probabilities, with the bounds 0.15, 0.1 and 1.5."""
    old = torch.tensor([0.2, 0.5, 0.9, 0.6, 0.3, 0.05], dtype=torch.double).log()
    new = torch.tensor([0.28, 0.8, 0.7, 0.35, 0.5, 0.3], dtype=torch.double).log()
    advantages = torch.tensor([1.0, 2.0, -1.0, -2.0, -0.5, 1.5], dtype=torch.double)
    options = loss_options(clip_ratio_low=0.15, clip_ratio_high=0.1, clip_ratio_c=1.5)
    result = POLICY_LOSSES[name](PolicyLossInputs(new, old, advantages, torch.ones(6), options=options))
    assert result.loss.tolist() == pytest.approx(losses, rel=1e-7, abs=1e-12)


@settings(max_examples=60)
@given(batch=batches())
def test_topr_tapers_negative_samples_by_the_ratio_of_the_sequence(batch):
    losses, slopes, diagnostics = run("topr", batch)
    for row, place in np.argwhere(batch[3]):
        new, old, advantages, mask = (column[row] for column in batch)
        whole = math.prod(math.exp(new[t] - old[t]) for t in np.flatnonzero(mask))
        taper = min(whole, 1.0) if advantages[place] < 0 else 1.0
        assert slopes[row, place] == pytest.approx(-advantages[place] * taper, rel=1e-9)
        assert losses[row, place] == pytest.approx(-advantages[place] * taper * new[place], rel=1e-9)
        assert diagnostics["pg_clipfrac"][row, place] == (advantages[place] < 0 and whole > 1)


@st.composite
def tied_mini_batches(draw):
    size = draw(st.integers(1, 30))
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    old = generator.normal(-1, 1, size)
    steps = generator.normal(0, draw(st.sampled_from([0.1, 0.4, 1.0])), size)
    new = old + (np.round(steps, 1) if draw(st.booleans()) else steps)  # rounded ones tie
    mask = generator.random(size) < draw(st.sampled_from([0.6, 1.0]))
    return new, old, generator.normal(0, 1, size), mask, generator.permutation(size)


@settings(max_examples=100)
@given(tied_mini_batches())
def test_m2po_removes_the_largest_until_the_mean_is_below_the_threshold(batch):
    new, old, advantages, mask, keys = batch
    delta = new - old
    rest = [t for t in range(len(new)) if mask[t] and delta[t] * advantages[t] > 0]
    rest.sort(key=lambda t: (delta[t] ** 2, keys[t]))
    removed = set()
    while rest and np.mean([delta[t] ** 2 for t in rest]) > 0.05:
        removed.add(rest.pop())
    assert set(POLICY_LOSSES["m2po"].choose(whole(batch), STALE_OPTIONS).nonzero()[:, 0].tolist()) == removed


@settings(max_examples=40)
@given(tied_mini_batches(), st.randoms())
def test_m2po_does_not_depend_on_token_order(batch, order):
    places = list(range(len(batch[0])))
    order.shuffle(places)
    moved = tuple(column[places] for column in batch)
    here, there = (POLICY_LOSSES["m2po"].choose(whole(one), STALE_OPTIONS) for one in (batch, moved))
    assert torch.equal(here[places], there)


def test_m2po_by_hand():
    """Squares 0.01, 0.09 and 0.25 of tokens that could be stopped: 0.05 is the mean of the first two."""
    new = np.array([[0.1, 0.3, -0.5, -2.0, 2.0]])
    batch = new, np.zeros((1, 5)), np.array([[1.0, 2.0, -1.0, 1.0, -1.0]]), np.ones((1, 5), bool)
    chosen = POLICY_LOSSES["m2po"].choose(whole([*(column[0] for column in batch), np.arange(5)]), STALE_OPTIONS)
    assert chosen.tolist() == [False, False, True, False, False]
    losses, slopes, diagnostics = run("m2po", batch, chosen[None])
    expected = [-math.exp(0.1), -2 * math.exp(0.3), 0.0, -math.exp(-2.0), math.exp(2.0)]
    assert losses[0].tolist() == pytest.approx(expected) and slopes[0].tolist() == pytest.approx(expected)
    assert diagnostics["pg_clipfrac"].tolist() == [[0.0, 0.0, 1.0, 0.0, 0.0]]


@settings(max_examples=40)
@given(batch=batches(), seed=st.integers(0, 2**31))
def test_decoupled_ppo_is_the_clipped_loss_with_token_weights(batch, seed):
    """arXiv:2505.24298, eq. 5: ``p_prox / p_behaviour`` times PPO's loss about the proximal policy."""
    new, proximal, advantages, mask = batch
    behaviour = proximal + np.random.default_rng(seed).normal(0, 0.5, proximal.shape)
    ratios = log_ratios(torch.tensor(proximal), torch.tensor(behaviour), torch.tensor(mask))
    trained = torch.tensor(mask)
    weights, _ = importance_weights(ratios, trained, trained, level="token", truncation=Truncation(5.0))
    options = loss_options(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1e9)
    inputs = PolicyLossInputs(*(torch.tensor(column) for column in batch), options=options)
    loss = weights * POLICY_LOSSES["vanilla"](inputs).loss
    for place in map(tuple, np.argwhere(mask)):
        weight = min(math.exp(proximal[place] - behaviour[place]), 5.0)
        ratio = math.exp(new[place] - proximal[place])
        gain = min(ratio * advantages[place], min(max(ratio, 0.8), 1.28) * advantages[place])
        assert loss[place].item() == pytest.approx(-weight * gain, rel=1e-6, abs=1e-9)
