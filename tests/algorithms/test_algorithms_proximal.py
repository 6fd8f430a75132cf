"""The log-linear proximal policy: AReaL's numbers, the ends of the interpolation, and the weights."""

import math

import pytest
import torch

from megarl.algorithms import Truncation, loglinear_log_probs, proximal_fractions, proximal_weights


@pytest.mark.parametrize(
    ("version", "proximal", "behaviour", "current", "expected"),
    [(0, 1, -1.0, -1.5, -1.25), (0, 1, -3.0, -3.5, -3.25), (0, 3, -1.0, -1.5, -1.375), (2, 3, -2.0, -2.2, -2.1)],
)
def test_numbers_of_areal(version, proximal, behaviour, current, expected):
    """The cases of AReaL's ``tests/test_prox_approx.py``, whose current version is the proximal one plus 1."""
    fractions = proximal_fractions(torch.tensor([version]), proximal)
    log_prob = torch.tensor([current], requires_grad=True)
    estimate = loglinear_log_probs(log_prob, torch.tensor([behaviour]), fractions)
    assert estimate.tolist() == pytest.approx([expected]) and not estimate.requires_grad


def test_tokens_of_the_last_version_or_of_none_keep_the_behaviour_policy():
    """Version 5 is that of the last sync; -1 marks tool results; 6 came in while the update ran."""
    versions = torch.tensor([[5, 4, 3, -1, 6]], dtype=torch.int32)
    assert proximal_fractions(versions, 5).tolist() == [pytest.approx([0.0, 1 / 2, 2 / 3, 0.0, 0.0])]


@pytest.mark.parametrize(("bounds", "weights"), [((1.5, None), [0.5, 1.0, 1.5]), ((1.5, 0.6), [0.0, 1.0, 0.0])])
def test_weights_are_the_ratio_of_proximal_and_behaviour_policy(bounds, weights):
    proximal, behaviour = torch.tensor([math.log(0.5), 0.0, 500.0]), torch.zeros(3)
    result = proximal_weights(proximal, behaviour, Truncation(*bounds))
    assert result.tolist() == pytest.approx(weights)
