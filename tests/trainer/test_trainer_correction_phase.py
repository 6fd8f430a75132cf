"""Rollout correction of an off-policy engine, and the reweighting of PF-PPO."""

from __future__ import annotations

import math

import pytest
import torch
from support.expected_errors import raises

from megarl.config.schema.algorithm import REJECTION_OPTIONS, AlgorithmConfig, RolloutCorrectionConfig
from megarl.data import DataProto
from megarl.trainer.phases.correction_phase import PreferencePhase, RolloutCorrectionPhase, TruncatedResponsesPhase

MASK = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 0]])
RATIOS = torch.tensor([[1.0, 4.0, 0.5], [1.0, 9.0, 1.25], [0.1, 1.0, 1.0]])


def batch(**more):
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


def scored_batch():
    """Four samples with scores 1, 1/4, 2 and a failed reward."""
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]])
    scores = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.25, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    values = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))
    tensors = {"response_mask": mask, "token_level_scores": scores, "values": values}
    tensors |= {"prompts": torch.ones(4, 1).long(), "attention_mask": torch.ones(4, 4).long()}
    return DataProto.from_dict(tensors, {"uid": ["a", "a", "b", "b"]})


def test_correction_is_inactive_by_default():
    phase = RolloutCorrectionPhase(RolloutCorrectionConfig())
    assert not phase.is_active(batch(), 1) and not phase.reads_rollout


def test_weights_and_rejections_change_only_the_update():
    metrics: dict[str, float] = {}
    config = RolloutCorrectionConfig(
        rollout_is="token",
        rollout_is_threshold="2.0",
        rollout_rs="token, seq_max_k2",
        rollout_rs_threshold="0.4_3.0, 2",
    )
    given = batch()
    trained = RolloutCorrectionPhase(config).run(given, 1, metrics)
    weights = torch.tensor([[1.0, 2.0, 0.5], [1.0, 0.0, 1.25], [0.1, 1.0, 0.0]])
    torch.testing.assert_close(trained.tensors["rollout_is_weights"], weights)
    assert trained.tensors["response_mask"].tolist() == [[1, 0, 1], [1, 0, 1], [0, 0, 0]]
    assert torch.equal(given.tensors["response_mask"], MASK) and "rollout_is_weights" not in given.tensors
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(3 / 7)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(2 / 3)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx((1 + 2 + 0.5 + 1 + 1.25 + 0.1 + 1) / 7)


def test_sequence_and_geometric_rejection():
    whole, geometric = [2.0, 1.25, 0.1], [2 ** (1 / 3), math.sqrt(1.25), math.sqrt(0.1)]
    for option, ratios in (("sequence", whole), ("geometric", geometric)):
        for bound in (1.2, 1.5, 11.0):
            config = RolloutCorrectionConfig(rollout_rs=option, rollout_rs_threshold=str(bound))
            trained = RolloutCorrectionPhase(config).run(batch(), 1, {})
            kept = trained.tensors["response_mask"].any(-1).tolist()
            assert kept == [1 / bound <= ratio <= bound for ratio in ratios], (option, bound)


def test_tool_tokens_have_weight_one_and_no_ratio():
    """Without ``state_masking`` they are trained on; the engine's 0.0 is not a log-prob."""
    written = torch.tensor([[1, 0, 1], [1, 1, 1], [1, 1, 1]])
    config = RolloutCorrectionConfig(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="3.0")
    trained = RolloutCorrectionPhase(config).run(batch(generated_mask=written), 1, {})
    assert trained.tensors["rollout_is_weights"][0, 1] == 1 and trained.tensors["response_mask"][0, 1] == 1


def test_bypass_uses_the_log_probs_of_the_engine():
    phase = RolloutCorrectionPhase(RolloutCorrectionConfig(bypass_mode=True))
    result = phase.rollout_log_probs(batch())
    assert phase.reads_rollout and torch.equal(result.tensors["old_log_probs"], batch().tensors["rollout_log_probs"])
    assert "entropys" not in result.tensors


def test_loglinear_marks_the_place_of_the_proximal_policy():
    """Versions 0 to 3, the proximal one is 3; weights are the actor's business."""
    config = RolloutCorrectionConfig(rollout_is="token")
    phase = RolloutCorrectionPhase(config, loglinear=True, version=lambda: 3)
    versions = torch.tensor([[0, 1, 2], [3, 3, 3], [2, -1, 0]], dtype=torch.int32)
    columns = phase.rollout_log_probs(batch(weight_versions=versions)).tensors
    expected = torch.tensor([[3 / 4, 2 / 3, 1 / 2], [0, 0, 0], [1 / 2, 0, 0]])  # the last token is masked
    torch.testing.assert_close(columns["proximal_fractions"], expected)
    assert torch.equal(columns["old_log_probs"], batch().tensors["rollout_log_probs"])
    assert not phase.is_active(batch(), 1)


def test_non_finite_log_probs_name_row_and_token():
    log_probs = batch().tensors["rollout_log_probs"].clone()
    log_probs[1, 1] = -math.inf  # masked
    config = RolloutCorrectionConfig(rollout_is="token")
    RolloutCorrectionPhase(config).run(batch(rollout_log_probs=log_probs), 1, {})
    log_probs[2, 1] = -math.inf
    with raises("algorithm.log-probs-not-finite", "rollout_log_probs=-inf", "row 2", "token 1"):
        RolloutCorrectionPhase(config).run(batch(rollout_log_probs=log_probs), 1, {})


def test_the_configuration_lists_all_rejection_rules():
    from megarl.algorithms import REJECTIONS

    assert set(REJECTION_OPTIONS) == set(REJECTIONS)


def test_pf_ppo_draws_whole_rows_by_their_scores():
    """Scores 1, 1/4 and 2; a sample without a score is never drawn."""
    given, metrics = scored_batch(), {}
    phase = PreferencePhase(AlgorithmConfig(use_pf_ppo=True).pf_ppo, seed=1)
    assert phase.is_active(given, 1)
    drawn = [phase.run(given, step, metrics) for step in range(30)]
    counts = [0, 0, 0, 0]
    for sample in drawn:
        for row in range(4):
            (match,) = [k for k in range(4) if torch.equal(sample.tensors["values"][row], given.tensors["values"][k])]
            counts[match] += 1
            assert sample.non_tensor_batch["uid"][row] == given.non_tensor_batch["uid"][match]
    assert counts[2] > counts[0] > counts[1] and counts[3] == 0
    assert 0 < metrics["pf_ppo/rows_fraction"] <= 0.75
    repeated = phase.run(given, 7, {})
    assert torch.equal(repeated.tensors["values"], drawn[7].tensors["values"]), "the draw depends on seed and step"


def test_truncated_responses_are_left_out_of_the_update():
    """Whatever the last token: a stop string ends a response without an EOS token, a limit cuts others after one."""
    eos = 9
    responses = torch.tensor([[5, 5, 5], [5, 5, eos], [5, eos, 0], [eos, 5, 0]])
    lengths = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 0]])
    mask = torch.tensor([[1, 0, 1], [1, 1, 1], [1, 1, 0], [1, 1, 0]])
    tensors = {"prompts": torch.ones(4, 1, dtype=torch.int64), "responses": responses, "attention_mask": lengths}
    given = DataProto.from_dict(
        {**tensors, "response_mask": mask, "advantages": torch.ones(4, 3)},
        {"finish_reason": ["stop", "length", "turns", "stop"]},
    )
    metrics: dict[str, float] = {}
    trained = TruncatedResponsesPhase().run(given, 1, metrics)
    assert trained.tensors["response_mask"].tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 0], [1, 1, 0]]
    assert metrics == {"actor/truncated_masked_fraction": 0.5}
    assert trained.tensors["response_mask"].dtype == mask.dtype
    assert torch.equal(given.tensors["response_mask"], mask)  # reports keep all samples
