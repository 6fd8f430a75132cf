"""Preference losses against their equations, computed with Python's own floats."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms import PREFERENCE_LOSSES, LabelledInputs, PreferenceInputs, PreferenceLossOptions, kto, kto_kl
from megarl.base.algorithm_names import PREFERENCE_LOSS_TYPES

BETA, SMOOTHING, GAMMA = 0.3, 0.1, 0.7
OPTIONS = PreferenceLossOptions(BETA, SMOOTHING, GAMMA)
LOG_PROB = st.floats(-60, 0)
PAIR = st.tuples(LOG_PROB, LOG_PROB, LOG_PROB, LOG_PROB, st.integers(1, 9), st.integers(1, 9))
Equation = Callable[[float, float, float, float, int, int], tuple[float, float, float]]


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > -700 else x


def smooth(x):
    return -(1 - SMOOTHING) * log_sigmoid(x) - SMOOTHING * log_sigmoid(-x)


def dpo(pc, pr, qc, qr, nc, nr):
    return smooth(BETA * ((pc - qc) - (pr - qr))), BETA * (pc - qc), BETA * (pr - qr)


def hinge(pc, pr, qc, qr, nc, nr):
    return max(0.0, 1 - BETA * ((pc - qc) - (pr - qr))), BETA * (pc - qc), BETA * (pr - qr)


def ipo(pc, pr, qc, qr, nc, nr):
    chosen, rejected = (pc - qc) / nc, (pr - qr) / nr
    return (chosen - rejected - 1 / (2 * BETA)) ** 2, BETA * chosen, BETA * rejected


def simpo(pc, pr, qc, qr, nc, nr):
    chosen, rejected = BETA * pc / nc, BETA * pr / nr
    return smooth(chosen - rejected - GAMMA), chosen, rejected


EQUATIONS: dict[str, Equation] = {"dpo": dpo, "hinge": hinge, "ipo": ipo, "simpo": simpo}


def inputs_of(pairs):
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True)]
    return PreferenceInputs(*columns, options=OPTIONS)


def test_every_listed_loss_has_an_equation():
    assert set(EQUATIONS) == set(PREFERENCE_LOSSES) == set(PREFERENCE_LOSS_TYPES)


@pytest.mark.parametrize("name", EQUATIONS)
@settings(max_examples=40)
@given(pairs=st.lists(PAIR, min_size=1, max_size=5))
def test_loss_equals_its_equation(name, pairs):
    result = PREFERENCE_LOSSES[name](inputs_of(pairs))
    for row, pair in enumerate(pairs):
        loss, chosen, rejected = EQUATIONS[name](*pair)
        assert result.loss[row].item() == pytest.approx(loss, rel=1e-9, abs=1e-9)
        numbers = {key: value[row].item() for key, value in result.diagnostics.items()}
        expected = {"chosen_reward": chosen, "rejected_reward": rejected, "margin": chosen - rejected}
        assert {key: numbers[key] for key in expected} == pytest.approx(expected, abs=1e-9)
        assert numbers["accuracy"] == float(numbers["chosen_reward"] > numbers["rejected_reward"])


def test_policy_equal_to_its_reference_costs_log_two_and_learns_both_ways():
    chosen, rejected = (torch.full((2,), -5.0, requires_grad=True) for _ in range(2))
    counts = torch.tensor([3, 3])
    reference = torch.full((2,), -5.0)
    options = PreferenceLossOptions(beta=0.1)
    inputs = PreferenceInputs(chosen, rejected, reference, reference, counts, counts, options=options)
    loss = PREFERENCE_LOSSES["dpo"](inputs).loss
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([math.log(2)] * 2)
    assert chosen.grad is not None and rejected.grad is not None
    assert chosen.grad.tolist() == pytest.approx([-0.05] * 2) and rejected.grad.tolist() == pytest.approx([0.05] * 2)


@pytest.mark.parametrize("name", [name for name, needed in PREFERENCE_LOSS_TYPES.items() if needed])
def test_missing_reference_is_an_error(name):
    one = torch.ones(1)
    with pytest.raises(ValueError, match="needs the log-probs of a reference"):
        PREFERENCE_LOSSES[name](PreferenceInputs(one, one, None, None, one, one, options=OPTIONS))


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


RESPONSES = st.lists(st.tuples(st.floats(-60, 60), st.booleans()), min_size=1, max_size=6)


@settings(max_examples=60)
@given(responses=RESPONSES, kl_ratios=st.lists(st.floats(-60, 60), min_size=1, max_size=6))
def test_kto_equals_its_equation(responses, kl_ratios):
    """Ethayarajh et al. 2024: the weight minus the value of a response, which is relative to the estimated KL."""
    weights = {True: 1.5, False: 0.8}
    kl = kto_kl(torch.tensor(kl_ratios, dtype=torch.float64, requires_grad=True))
    assert kl == pytest.approx(max(0.0, sum(kl_ratios) / len(kl_ratios)), abs=1e-9)
    ratios = torch.tensor([ratio for ratio, _ in responses], dtype=torch.float64, requires_grad=True)
    desirable = torch.tensor([label for _, label in responses])
    result = kto(LabelledInputs(ratios, desirable, kl, beta=BETA, desirable_weight=1.5, undesirable_weight=0.8))
    result.loss.sum().backward()
    assert ratios.grad is not None
    for row, (ratio, label) in enumerate(responses):
        sign = 1 if label else -1
        value = sigmoid(sign * BETA * (ratio - kl))
        assert result.loss[row].item() == pytest.approx(weights[label] * (1 - value), abs=1e-9)
        slope = -sign * weights[label] * BETA * value * (1 - value)
        assert ratios.grad[row].item() == pytest.approx(slope, abs=1e-9)
        assert result.diagnostics["reward"][row].item() == pytest.approx(BETA * ratio, abs=1e-9)
        assert result.diagnostics["accuracy"][row].item() == float(result.loss[row].item() < weights[label] / 2)
