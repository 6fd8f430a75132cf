"""DPPO, M2PO and TOPR against loops over tokens and published numbers; decoupled PPO from its parts."""

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
    importance_weights,
    log_ratios,
)

OPTIONS = loss_options(clip_ratio_low=0.12, clip_ratio_high=0.07, clip_ratio_c=1.4, m2_threshold=0.05)


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
        log_prob, torch.tensor(batch[1]), torch.tensor(batch[2]), mask, chosen=chosen, options=OPTIONS
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
def mini_batches(draw):
    size = draw(st.integers(1, 30))
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    old = generator.normal(-1, 1, size)
    steps = generator.normal(0, draw(st.sampled_from([0.1, 0.4, 1.0])), size)
    new = old + (np.round(steps, 1) if draw(st.booleans()) else steps)  # rounded ones tie
    mask = generator.random(size) < draw(st.sampled_from([0.6, 1.0]))
    return new, old, generator.normal(0, 1, size), mask, generator.permutation(size)


def whole(batch):
    return WholeMiniBatch(*(torch.tensor(column) for column in batch))


@settings(max_examples=100)
@given(mini_batches())
def test_m2po_removes_the_largest_until_the_mean_is_below_the_threshold(batch):
    new, old, advantages, mask, keys = batch
    delta = new - old
    rest = [t for t in range(len(new)) if mask[t] and delta[t] * advantages[t] > 0]
    rest.sort(key=lambda t: (delta[t] ** 2, keys[t]))
    removed = set()
    while rest and np.mean([delta[t] ** 2 for t in rest]) > 0.05:
        removed.add(rest.pop())
    assert set(POLICY_LOSSES["m2po"].choose(whole(batch), OPTIONS).nonzero()[:, 0].tolist()) == removed


@settings(max_examples=40)
@given(mini_batches(), st.randoms())
def test_m2po_does_not_depend_on_token_order(batch, order):
    places = list(range(len(batch[0])))
    order.shuffle(places)
    moved = tuple(column[places] for column in batch)
    here, there = (POLICY_LOSSES["m2po"].choose(whole(one), OPTIONS) for one in (batch, moved))
    assert torch.equal(here[places], there)


def test_m2po_by_hand():
    """Squares 0.01, 0.09 and 0.25 of tokens that could be stopped: 0.05 is the mean of the first two."""
    new = np.array([[0.1, 0.3, -0.5, -2.0, 2.0]])
    batch = new, np.zeros((1, 5)), np.array([[1.0, 2.0, -1.0, 1.0, -1.0]]), np.ones((1, 5), bool)
    chosen = POLICY_LOSSES["m2po"].choose(whole([*(column[0] for column in batch), np.arange(5)]), OPTIONS)
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
