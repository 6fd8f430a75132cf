"""A first step warns of an engine that computes another model, and not of the rounding of a healthy run."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarl.algorithms.masked import Moments
from megarl.models import read_model_config
from megarl.models.model_config import Experts
from megarl.trainer.records.step_metrics import (
    DIFFERENCE,
    EXCESS,
    explained_by_rounding,
    mismatch_excess,
    mismatch_warnings,
)

ROLLOUT = "actor_rollout_ref.rollout"
BFLOAT16 = {f"{ROLLOUT}.dtype": "bfloat16", "actor_rollout_ref.actor.megatron.dtype": "bfloat16"}


def explained(config, *, experts=False):
    model = read_model_config(Path(config.actor_rollout_ref.model.path))
    routed = Experts(count=4, per_token=2, ffn_hidden_size=8, layers=(True,) * model.num_layers)
    return explained_by_rounding(config, replace(model, experts=routed if experts else None))


def healthy(mean, *, tokens=4096, far=0.0):
    """Differences of rounding with this mean; a share of tokens is up to 5 nats away, as after another expert."""
    noise = torch.randn(tokens, dtype=torch.double).abs() * mean * math.sqrt(math.pi / 2)
    outliers = torch.rand(tokens) < far
    return Moments.of(torch.where(outliers, 5 * torch.rand(tokens), noise))


@pytest.mark.parametrize(
    ("changes", "experts", "differences"),
    [
        ({}, False, healthy(1e-5)),
        (BFLOAT16, False, healthy(0.011)),  # Qwen3-4B on H100, vime issue 64
        (BFLOAT16, False, healthy(0.011, tokens=12, far=0.1)),
        (BFLOAT16, True, healthy(0.03, far=0.01)),
        ({**BFLOAT16, f"{ROLLOUT}.temperature": 0.25}, False, healthy(0.044)),
        ({**BFLOAT16, f"{ROLLOUT}.quantization": "fp8", f"{ROLLOUT}.name": "sglang"}, False, healthy(0.067)),
        ({**BFLOAT16, f"{ROLLOUT}.repetition_penalty": 1.2}, False, healthy(0.5)),
    ],
)
def test_rounding_is_within_the_bound(train_config, changes, experts, differences):
    assert mismatch_excess(differences, explained(train_config(changes), experts=experts)) < 1


@pytest.mark.parametrize(("changes", "mean"), [({}, 0.07), (BFLOAT16, 0.07), (BFLOAT16, 2.0)])
def test_another_model_is_beyond_the_bound(train_config, changes, mean):
    """The means are those of YaRN's factor on dimensions that do not rotate."""
    assert mismatch_excess(healthy(mean), explained(train_config(changes))) > 1


def test_log_probs_that_are_not_finite_are_beyond_every_bound(train_config):
    for value in (math.inf, math.nan):
        differences = Moments.of(torch.tensor([0.0, value, 0.0]))
        assert mismatch_excess(differences, explained(train_config(BFLOAT16))) == math.inf


def test_the_warning_has_difference_and_excess():
    (sentence,) = mismatch_warnings({EXCESS: 1.42, DIFFERENCE: 0.0712})
    assert "0.0712 nats" in sentence and "1.4 times" in sentence
    assert mismatch_warnings({EXCESS: 1.0, DIFFERENCE: 0.05}) == mismatch_warnings({DIFFERENCE: 9.0}) == []
