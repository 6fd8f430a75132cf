import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms import POLICY_LOSSES, PolicyLossInputs, entropy_loss
from megarl.errors import ConfigError

vanilla = POLICY_LOSSES["vanilla"]


def by_cases(log_prob, old, advantage, low, high, dual):
    """The loss of one token by cases, its slope in the ratio, and which clip was active."""
    ratio = math.exp(log_prob - old)
    if advantage >= 0:
        clipped = ratio > 1 + high and advantage > 0
        return (-advantage * min(ratio, 1 + high), 0.0 if clipped else -advantage * ratio, clipped, False)
    if ratio > dual:
        return (-advantage * dual, 0.0, False, True)
    clipped = ratio < 1 - low
    return (-advantage * max(ratio, 1 - low), 0.0 if clipped else -advantage * ratio, clipped, False)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(0, 2**31),
    st.sampled_from([(0.2, 0.2, 3.0), (0.2, 0.28, 10.0), (0.1, 0.5, 1.7)]),
)
def test_loss_gradient_and_diagnostics_equal_the_cases(size, seed, clips):
    generator = np.random.default_rng(seed)
    old, new = generator.normal(-2, 1, size), generator.normal(-2, 1, size)
    advantages = generator.normal(0, 1, size) * (generator.random(size) < 0.9)
    log_prob = torch.tensor(new, requires_grad=True)
    result = vanilla(PolicyLossInputs(log_prob, torch.tensor(old), torch.tensor(advantages), *clips))
    result.loss.sum().backward()
    cases = [by_cases(n, o, a, *clips) for n, o, a in zip(new, old, advantages, strict=True)]
    np.testing.assert_allclose(result.loss.detach(), [case[0] for case in cases], atol=1e-12)
    np.testing.assert_allclose(log_prob.grad, [case[1] for case in cases], atol=1e-12)
    np.testing.assert_array_equal(result.diagnostics["pg_clipfrac"], [case[2] for case in cases])
    np.testing.assert_array_equal(result.diagnostics["pg_clipfrac_lower"], [case[3] for case in cases])
    np.testing.assert_allclose(result.diagnostics["ppo_kl"], old - new)
    assert not any(tensor.requires_grad for tensor in result.diagnostics.values())


def test_rectangle_and_packed_tokens_give_the_same_numbers():
    generator = torch.Generator().manual_seed(0)
    columns = [torch.randn(3, 5, generator=generator) for _ in range(3)]
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]).bool()
    rectangle = vanilla(PolicyLossInputs(*columns))
    packed = vanilla(PolicyLossInputs(*(column[mask] for column in columns)))
    assert torch.equal(rectangle.loss[mask], packed.loss)
    for name, tensor in packed.diagnostics.items():
        assert torch.equal(rectangle.diagnostics[name][mask], tensor)


def test_on_policy_gradient_is_the_policy_gradient():
    log_prob = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([2.0, -3.0])
    vanilla(PolicyLossInputs(log_prob, log_prob.detach(), advantages)).loss.sum().backward()
    torch.testing.assert_close(log_prob.grad, -advantages)


def test_a_huge_ratio_stays_finite():
    log_prob = torch.tensor([0.0, -500.0], requires_grad=True)
    result = vanilla(PolicyLossInputs(log_prob, torch.tensor([-500.0, 0.0]), torch.tensor([-1.0, 1.0]), 0.2, 0.2, 3.0))
    result.loss.sum().backward()
    assert torch.isfinite(result.loss).all() and torch.isfinite(log_prob.grad).all()
    assert result.loss[0].item() == 3.0 and result.diagnostics["ppo_kl"].tolist() == [-20.0, 20.0]


def test_entropy_bonus_lowers_the_loss():
    assert entropy_loss(torch.tensor([2.0, 0.5]), 0.01).tolist() == pytest.approx([-0.02, -0.005])


def test_an_unknown_loss_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"loss_mode='gspo'.*vanilla"):
        POLICY_LOSSES["gspo"]
