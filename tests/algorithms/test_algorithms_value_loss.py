"""The loss on pairs against its equation, worked out with Python's own floats."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms import bradley_terry_loss, clipped_value_loss


@settings(max_examples=60)
@given(st.integers(1, 12), st.integers(0, 2**31), st.sampled_from([0.1, 0.5, 2.0]))
def test_loss_gradient_and_clip_fraction_equal_the_loop(size, seed, cliprange):
    generator = np.random.default_rng(seed)
    new, old, returns = (generator.normal(size=size) for _ in range(3))
    vpreds = torch.tensor(new, requires_grad=True)
    result = clipped_value_loss(vpreds, torch.tensor(old), torch.tensor(returns), cliprange)
    result.loss.sum().backward()
    for i in range(size):
        near = min(max(new[i], old[i] - cliprange), old[i] + cliprange)
        free, held = (new[i] - returns[i]) ** 2, (near - returns[i]) ** 2
        np.testing.assert_allclose(result.loss[i].item(), 0.5 * max(free, held))
        np.testing.assert_allclose(vpreds.grad[i], 0.0 if held > free else new[i] - returns[i], atol=1e-12)
        assert result.diagnostics["vf_clipfrac"][i].item() == float(held > free)
    assert torch.equal(result.diagnostics["vpred_mean"], vpreds.detach())


def test_rectangle_and_packed_tokens_give_the_same_numbers():
    generator = torch.Generator().manual_seed(1)
    columns = [torch.randn(2, 4, generator=generator) for _ in range(3)]
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1]]).bool()
    rectangle = clipped_value_loss(*columns, 0.2)
    packed = clipped_value_loss(*(column[mask] for column in columns), 0.2)
    assert torch.equal(rectangle.loss[mask], packed.loss)


CHOSEN, REJECTED, MARGINS = [2.0, -1.0, 0.5], [1.0, 3.0, 0.5], [0.0, 1.0, 0.25]


def test_bradley_terry_loss_equals_the_equation():
    result = bradley_terry_loss(
        torch.tensor(CHOSEN), torch.tensor(REJECTED), torch.tensor(MARGINS), center_coefficient=0.01
    )
    expected = [
        -math.log(1 / (1 + math.exp(-(c - r - m)))) + 0.01 * (c + r) ** 2
        for c, r, m in zip(CHOSEN, REJECTED, MARGINS, strict=True)
    ]
    assert result.loss.tolist() == pytest.approx(expected)
    assert result.diagnostics["accuracy"].tolist() == [1, 0, 0]  # equal rewards are no order
    assert result.diagnostics["margin"].tolist() == [1, -4, 0]


def test_without_margins_a_pair_of_equal_rewards_costs_log_two_and_pulls_them_apart():
    chosen, rejected = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    loss = bradley_terry_loss(chosen, rejected).loss
    assert loss.tolist() == pytest.approx([math.log(2)] * 2)
    loss.sum().backward()
    assert chosen.grad.tolist() == [-0.5, -0.5] and rejected.grad.tolist() == [0.5, 0.5]


def test_badly_ordered_pair_has_a_finite_loss():
    chosen = torch.tensor([-1000.0], requires_grad=True)
    loss = bradley_terry_loss(chosen, torch.tensor([1000.0])).loss
    loss.sum().backward()
    assert loss.item() == pytest.approx(2000.0) and chosen.grad.item() == -1
