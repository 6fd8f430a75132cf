import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.expected_errors import raises

from megarl.algorithms import KL_CONTROLLERS, KL_ESTIMATORS, apply_kl_penalty, kl_penalty

# value and derivative in log_prob of each estimator, of d = log_prob - ref_log_prob
FORMULAS = {
    "k1": (lambda d: d, lambda d: 1.0),
    "abs": (abs, lambda d: math.copysign(1.0, d)),
    "k2": (lambda d: d * d / 2, lambda d: d),
    "k3": (lambda d: math.exp(-d) - 1 + d, lambda d: 1 - math.exp(-d)),
}
# with a "+": the value of the one, the derivative of k2
FORMULAS |= {f"{kind}+": (FORMULAS[kind][0], FORMULAS["k2"][1]) for kind in ("k1", "abs", "k2", "k3")}
SAME = {"kl+": "k1+", "mse+": "k2+", "low_var_kl+": "k3+", "kl": "k1", "mse": "k2", "low_var_kl": "k3"}


@pytest.mark.parametrize("kind", [*FORMULAS, *SAME])
@settings(max_examples=25)
@given(st.lists(st.floats(-2.0, 2.0).filter(lambda d: abs(d) > 1e-6), min_size=1, max_size=8))
def test_estimators_and_their_gradients(kind, differences):
    value, slope = FORMULAS[SAME.get(kind, kind)]
    reference = torch.full((len(differences),), -3.0, dtype=torch.double)
    log_prob = (reference + torch.tensor(differences, dtype=torch.double)).requires_grad_()
    kl = kl_penalty(log_prob, reference, kind)
    kl.sum().backward()
    np.testing.assert_allclose(kl.detach(), [value(d) for d in differences], atol=1e-12)
    np.testing.assert_allclose(log_prob.grad, [slope(d) for d in differences], atol=1e-12)


@pytest.mark.parametrize(("kind", "tolerance"), [("k1", 1e-12), ("k3", 1e-12), ("k2", 0.05)])
def test_expectation_is_the_exact_kl(kind, tolerance):
    """Over a whole vocabulary the expectation under the policy is KL(policy || reference), for k2 nearly."""
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(50, generator=generator, dtype=torch.double).log_softmax(-1)
    reference = (policy + 0.3 * torch.randn(50, generator=generator, dtype=torch.double)).log_softmax(-1)
    exact = torch.nn.functional.kl_div(reference, policy, log_target=True, reduction="sum").item()
    estimate = (policy.exp() * kl_penalty(policy, reference, kind)).sum().item()
    assert exact > 0.01 and estimate == pytest.approx(exact, rel=tolerance)


def test_k3_is_cut_where_it_would_explode():
    far = kl_penalty(torch.tensor([-100.0, 100.0]), torch.tensor([0.0, 0.0]), "k3")
    assert far.tolist() == [10.0, 10.0]


def test_unknown_estimator():
    with raises("config.unknown-name", "kl_penalty='k4'", *FORMULAS, *SAME):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")
    assert set(KL_ESTIMATORS) == {*FORMULAS, *SAME}


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**31), st.sampled_from(["k1", "k2", "k3"]))
def test_penalty_in_the_reward_equals_the_loop(rows, columns, seed, kind):
    generator = np.random.default_rng(seed)
    scores, old, reference = (generator.uniform(-1, 1, (rows, columns)) for _ in range(3))
    mask = generator.random((rows, columns)) < 0.6
    old[~mask] = np.nan  # padding may hold anything
    kl = kl_penalty(torch.tensor(old), torch.tensor(reference), kind)
    rewards, means = apply_kl_penalty(torch.tensor(scores), kl, torch.tensor(mask), 0.3)
    expected, row_means = scores.copy(), []
    for row in range(rows):
        kls = [FORMULAS[kind][0](old[row, t] - reference[row, t]) for t in range(columns) if mask[row, t]]
        for t, kl in zip(np.flatnonzero(mask[row]), kls, strict=True):
            expected[row, t] -= 0.3 * kl
        row_means.append(np.mean(kls) if kls else 0.0)
    np.testing.assert_allclose(rewards, expected, atol=1e-12)
    np.testing.assert_allclose(means, row_means, atol=1e-12)


def test_fixed_controller_stays():
    controller = KL_CONTROLLERS["fixed"](0.02, 0.1, 100)
    controller.update(5.0, 64)
    assert controller.value == 0.02
    controller.load_state_dict({"value": 0.5})
    assert controller.value == 0.02, "a fixed coefficient is the config's, also after a resume"


def test_adaptive_controller_follows_the_target_and_resumes_exactly():
    controller = KL_CONTROLLERS["adaptive"](0.2, 0.1, 1000)
    expected = 0.2
    for kl in (0.11, 0.5, 0.05, 0.0, 0.1, -3.0):
        controller.update(kl, 128)
        expected *= 1 + float(np.clip((kl - 0.1) / 0.1, -0.2, 0.2)) * 128 / 1000
        assert controller.value == pytest.approx(expected, rel=1e-12)
    other = KL_CONTROLLERS["adaptive"](9.0, 0.1, 1000)
    other.load_state_dict(controller.state_dict())
    for one in (controller, other):
        one.update(0.3, 32)
    assert other.value == controller.value


def test_unknown_controller():
    with raises("config.unknown-name", "algorithm.kl_ctrl.type='pid'", "adaptive, fixed"):
        KL_CONTROLLERS["pid"](0.1, 0.1, 1)
