"""What the updates are given of a batch whose engine was not quite the policy."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.config.rollout_correction import OPTIONS, RolloutCorrectionConfig
from megarl.data import DataProto
from megarl.errors import DataError
from megarl.trainer.correction import CorrectionPhase

MASK = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 0]])
RATIOS = torch.tensor([[1.0, 4.0, 0.5], [1.0, 9.0, 1.25], [0.1, 1.0, 1.0]])


def batch(**more: torch.Tensor) -> DataProto:
    old = torch.full((3, 3), -1.0)
    tensors = {
        "prompts": torch.ones(3, 1, dtype=torch.int64),
        "responses": torch.ones(3, 3, dtype=torch.int64),
        "attention_mask": torch.ones(3, 4, dtype=torch.int64),
        "response_mask": MASK,
        "old_log_probs": old,
        "rollout_log_probs": old - RATIOS.log(),
    }
    return DataProto.from_dict({**tensors, **more})


class Actor:
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"old_log_probs": torch.full((3, 3), -7.0)})


def test_nothing_is_changed_without_a_correction() -> None:
    metrics: dict[str, float] = {}
    given = batch()
    phase = CorrectionPhase(RolloutCorrectionConfig())
    assert phase.apply(given, metrics) is given and metrics == {}
    assert phase.old_log_probs(given, Actor()).tensors["old_log_probs"][0, 0] == -7


def test_weights_and_rejection_reach_the_update_only() -> None:
    metrics: dict[str, float] = {}
    config = RolloutCorrectionConfig(
        rollout_is="token",
        rollout_is_threshold="2.0",
        rollout_rs="token, seq_max_k2",
        rollout_rs_threshold="0.4_3.0, 2",
    )
    given = batch()
    learned = CorrectionPhase(config).apply(given, metrics)
    weights = torch.tensor([[1.0, 2.0, 0.5], [1.0, 0.0, 1.25], [0.1, 1.0, 0.0]])
    torch.testing.assert_close(learned.tensors["rollout_is_weights"], weights)
    assert learned.tensors["response_mask"].tolist() == [[1, 0, 1], [1, 0, 1], [0, 0, 0]]
    assert torch.equal(given.tensors["response_mask"], MASK) and "rollout_is_weights" not in given.tensors
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(3 / 7)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(2 / 3)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx((1 + 2 + 0.5 + 1 + 1.25 + 0.1 + 1) / 7)


def test_the_sequence_and_its_geometric_mean() -> None:
    whole, geometric = [2.0, 1.25, 0.1], [2 ** (1 / 3), math.sqrt(1.25), math.sqrt(0.1)]
    for option, ratios in (("sequence", whole), ("geometric", geometric)):
        for bound in (1.2, 1.5, 11.0):
            config = RolloutCorrectionConfig(rollout_rs=option, rollout_rs_threshold=str(bound))
            learned = CorrectionPhase(config).apply(batch(), {})
            kept = learned.tensors["response_mask"].any(-1).tolist()
            assert kept == [1 / bound <= ratio <= bound for ratio in ratios], (option, bound)


def test_what_a_tool_wrote_has_weight_one_and_no_ratio() -> None:
    """Without ``state_masking`` it is trained on; the engine's 0.0 there is no log-prob."""
    written = torch.tensor([[1, 0, 1], [1, 1, 1], [1, 1, 1]])
    config = RolloutCorrectionConfig(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="3.0")
    learned = CorrectionPhase(config).apply(batch(generated_mask=written), {})
    assert learned.tensors["rollout_is_weights"][0, 1] == 1 and learned.tensors["response_mask"][0, 1] == 1


def test_bypass_takes_the_engines_log_probs() -> None:
    phase = CorrectionPhase(RolloutCorrectionConfig(bypass_mode=True))
    told = phase.old_log_probs(batch(), Actor())
    assert torch.equal(told.tensors["old_log_probs"], batch().tensors["rollout_log_probs"])
    assert "entropys" not in told.tensors


def test_a_log_prob_that_is_not_finite_is_told_by_its_place() -> None:
    wrong = batch().tensors["rollout_log_probs"].clone()
    wrong[1, 1] = -math.inf  # masked
    config = RolloutCorrectionConfig(rollout_is="token")
    CorrectionPhase(config).apply(batch(rollout_log_probs=wrong), {})
    wrong[2, 1] = -math.inf
    with pytest.raises(DataError, match="rollout_log_probs=-inf of row 2, token 1"):
        CorrectionPhase(config).apply(batch(rollout_log_probs=wrong), {})


def test_the_configuration_knows_the_rules_there_are() -> None:
    from megarl.algorithms import REJECTIONS

    assert set(OPTIONS) == set(REJECTIONS)
