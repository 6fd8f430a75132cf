"""Row functions on parts of a batch give the results of the whole batch, and the driver reads no token column."""

import math

import numpy as np
import pytest
import torch
from support.expected_errors import raises
from support.worker_parts import map_over, on_workers, reading, values_of

from megarl.algorithms import ADVANTAGES, AdvantageInputs
from megarl.base.algorithm_names import ADV_ESTIMATORS
from megarl.config.schema.algorithm import (
    AlgorithmConfig,
    GiGPOConfig,
    KLControlConfig,
    RefQualityConfig,
    RolloutCorrectionConfig,
)
from megarl.data import DataProto, sequence_lengths
from megarl.data.column_store import ragged_columns
from megarl.trainer.phases.advantage_phase import AdvantagePhase, RewardShaping
from megarl.trainer.phases.correction_phase import PreferencePhase, RolloutCorrectionPhase, TruncatedResponsesPhase
from megarl.trainer.records.step_metrics import batch_metrics
from megarl.workers.row_math import counted_rows, row_sums

LENGTHS = [3, 1, 6, 2, 4, 4, 7, 1, 5, 2, 3, 6]
PARTS = [[7, 0, 4], [1], [2, 11, 5, 3, 10], [9, 8, 6]]

map_in_parts = map_over(PARTS)


def batch_of():
    random = np.random.default_rng(5)

    def floats(scale=1.0):
        return [(scale * random.normal(size=length)).astype(np.float32) for length in LENGTHS]

    masks = [np.ones(length, np.int8) for length in LENGTHS]
    masks[2][1:3] = 0  # a tool result
    generated = [mask.copy() for mask in masks]
    generated[6][2:4] = 0  # a tool result that is trained on
    masks[3][:] = 0  # a failed reward
    rows = {
        "prompts": [random.integers(1, 9, 2) for _ in LENGTHS],
        "responses": [random.integers(5, 9, length) for length in LENGTHS],
        "response_mask": masks,
        "generated_mask": generated,
        "token_level_scores": [
            np.append(np.zeros(length - 1), random.normal()).astype(np.float32) for length in LENGTHS
        ],
        "old_log_probs": [-np.abs(row) for row in floats()],
        "ref_log_prob": [-np.abs(row) for row in floats()],
        "rollout_log_probs": [-np.abs(row) for row in floats()],
        "values": floats(),
        "entropys": [np.abs(row) for row in floats()],
        "sum_pi_squared": [np.abs(row) for row in floats()],
        "weight_versions": [random.integers(0, 4, length).astype(np.int32) for length in LENGTHS],
    }
    uids = np.array([f"p{row // 3}" for row in range(len(LENGTHS))], dtype=object)
    batch = DataProto(ragged_columns(rows, {}), {"uid": uids})
    reasons = [("stop", "length", "turns", "stop")[row % 4] for row in range(len(batch))]
    return batch.with_columns({"reward_baselines": torch.linspace(-1, 1, len(batch))}, {"finish_reason": reasons})


PENALTIES = {
    "none": {},
    "kl": {"use_kl_in_reward": True, "kl_penalty": "k2", "kl_ctrl": KLControlConfig(type="adaptive", horizon=100)},
    "eos": {"missing_eos_penalty": 0.5},
    "whitened": {"whiten_rewards": True, "missing_eos_penalty": 0.25},
}
ESTIMATORS = [name for name in ADV_ESTIMATORS if not name.endswith("vectorized")]


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_parts_give_the_results_of_the_whole_batch(estimator, penalty):
    config = AlgorithmConfig(adv_estimator=estimator, gamma=0.9, lam=0.8, **PENALTIES[penalty])
    compare_advantages(config)


@pytest.mark.parametrize("correction", [{}, {"rollout_is_batch_normalize": True}])
def test_optimal_token_baseline_in_parts_with_importance_weights(correction):
    correction = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold="1.5", **correction)
    compare_advantages(AlgorithmConfig(adv_estimator="optimal_token_baseline", rollout_correction=correction))


def test_gigpo_in_parts_with_similar_states():
    gigpo = GiGPOConfig(enable_similarity=True, similarity_thresh=0.5)
    compare_advantages(AlgorithmConfig(adv_estimator="gigpo", gamma=0.9, gigpo=gigpo))


def compare_advantages(config):
    results = []
    for rows in (None, map_in_parts):
        phase, metrics = AdvantagePhase(config), {}
        phase.rows = phase.rows if rows is None else rows
        batch = phase.compute(batch_of() if rows is None else on_workers(batch_of(), PARTS), metrics)
        options = {} if rows is None else {"rows": rows}
        metrics |= batch_metrics(batch, 2, 7, **options, compare_log_probs=True)
        value = None if phase.kl_controller is None else phase.kl_controller.value
        results.append((batch, metrics, value))
    (whole, expected, coefficient), (parts, metrics, other) = results
    assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-12) and len(metrics) > 30
    assert other == (None if coefficient is None else pytest.approx(coefficient, rel=1e-12))
    for name in ("token_level_rewards", "advantages", "returns"):
        np.testing.assert_allclose(values_of(parts, name), whole.packed(name), rtol=1e-6, atol=1e-7)


def compare_updates(phase_of):
    """The batch to train on, by row functions in this process and over parts."""
    results = []
    for options, batch in (({}, batch_of()), ({"rows": map_in_parts}, on_workers(batch_of(), PARTS))):
        metrics = {}
        results.append((phase_of(**options).run(batch, 3, metrics), metrics))
    (whole, expected), (parts, metrics) = results
    assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-12) and metrics
    assert parts.tensors.keys() == whole.tensors.keys()
    for name in ("rollout_is_weights", "response_mask", "responses"):
        if name in whole.tensors:
            np.testing.assert_array_equal(values_of(parts, name), whole.packed(name))


CORRECTIONS = {
    "token": {"rollout_is": "token", "rollout_is_threshold": "1.5"},
    "sequence": {"rollout_is": "sequence", "rollout_is_threshold": "0.2_3.0"},
    "rejection": {"rollout_rs": "token_k1, seq_mean_k2, seq_max_k3", "rollout_rs_threshold": "0.4_2.5, 0.8, 1.5"},
    "both": {"rollout_is": "token", "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.2_5.0"},
}


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_rollout_correction_in_parts(correction, normalize):
    config = RolloutCorrectionConfig(**CORRECTIONS[correction], rollout_is_batch_normalize=normalize)
    compare_updates(lambda **options: RolloutCorrectionPhase(config, **options))


def test_truncated_responses_and_redrawn_rows_in_parts():
    compare_updates(lambda **options: TruncatedResponsesPhase(**options))
    compare_updates(lambda **options: PreferencePhase(AlgorithmConfig().pf_ppo, 1, **options))


def test_log_probs_of_the_engine_in_parts():
    config = RolloutCorrectionConfig(bypass_mode=True)
    whole, parts = (
        RolloutCorrectionPhase(config, loglinear=True, version=lambda: 4, **options).rollout_log_probs(batch)
        for options, batch in (({}, batch_of()), ({"rows": map_in_parts}, on_workers(batch_of(), PARTS)))
    )
    for name, batch in (("old_log_probs", batch_of()), ("proximal_fractions", batch_of())):
        values = values_of(batch_of().with_columns(parts.tensors), name)
        np.testing.assert_array_equal(values, batch.with_columns(whole.tensors).packed(name))


def test_a_log_prob_that_is_not_finite_is_named_by_its_row_in_the_batch():
    batch = batch_of()
    log_probs = batch.packed("old_log_probs").clone()
    log_probs[sum(LENGTHS[:8]) + 4] = math.nan
    batch = on_workers(batch.with_packed({"old_log_probs": log_probs}), PARTS)
    phase = RolloutCorrectionPhase(RolloutCorrectionConfig(rollout_is="token"), rows=map_in_parts)
    with reading(), raises("algorithm.log-probs-not-finite", "old_log_probs=nan of row 8, token 4"):
        phase.run(batch, 1, {})


@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if name != "gigpo"])
def test_rows_and_sums_give_the_estimate_over_all_tokens(estimator):
    """The phase works on rows and sums of rewards; the estimator itself on the tokens of the whole batch."""
    config = AlgorithmConfig(adv_estimator=estimator, gamma=0.9, lam=0.8)
    phase, batch = AdvantagePhase(config), batch_of()
    phase.rows = map_in_parts
    result = phase.compute(on_workers(batch_of(), PARTS), {})
    inputs = AdvantageInputs(
        token_level_rewards=batch.packed("token_level_scores"),
        response_mask=batch.packed("response_mask", torch.bool),
        values=batch.packed("values"),
        group_ids=batch.non_tensor_batch["uid"],
        reward_baselines=batch.tensors["reward_baselines"],
        old_log_probs=batch.packed("old_log_probs"),
        sum_pi_squared=batch.packed("sum_pi_squared"),
        gamma=0.9,
        lam=0.8,
        lengths=sequence_lengths(batch)[1],
    )
    for name, expected in zip(("advantages", "returns"), ADVANTAGES.find(estimator)(inputs), strict=True):
        np.testing.assert_allclose(values_of(result, name), expected, rtol=1e-5, atol=1e-6)
        assert np.abs(values_of(result, name)).sum() > 0


def test_shaping_in_parts():
    config = AlgorithmConfig(ref_quality_score=RefQualityConfig(enable=True, max_weight=0.5, warmup_ratio=0.0))
    results = []
    for rows in ({}, {"rows": map_in_parts}):
        metrics = {}
        shaped = RewardShaping(config, 10, **rows).shape(batch_of(), 3, metrics)
        results.append((values_of(shaped, "token_level_rewards"), metrics))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert results[0][1] == pytest.approx(results[1][1]) and "ref_quality/quality/mean" in results[0][1]


def test_whitened_gae_equals_a_loop_over_all_rows():
    config = AlgorithmConfig(adv_estimator="gae", gamma=0.9, lam=0.8)
    phase, batch = AdvantagePhase(config), batch_of()
    phase.rows = map_in_parts
    result = phase.compute(batch, {})
    expected = []
    with reading():
        columns = [batch.unpadded(name) for name in ("token_level_scores", "values", "response_mask")]
    for scores, values, mask in zip(*columns, strict=True):
        kept = [t for t in range(len(mask)) if mask[t]]
        following, advantage, row = 0.0, 0.0, [0.0] * len(mask)
        for t in reversed(kept):
            advantage = float(scores[t]) + 0.9 * following - float(values[t]) + 0.72 * advantage
            following = float(values[t])
            row[t] = advantage
        expected.append((row, kept))
    trained = [row[t] for row, kept in expected for t in kept]
    mean, deviation = np.mean(trained), math.sqrt(np.var(trained, ddof=1) + 1e-8)
    result = np.split(values_of(result, "advantages"), np.cumsum(LENGTHS)[:-1])
    for row, (advantages, kept) in zip(result, expected, strict=True):
        white = [(value - mean) / deviation if t in kept else 0.0 for t, value in enumerate(advantages)]
        np.testing.assert_allclose(row, white, atol=2e-6)


def test_rows_without_a_trained_token_do_not_count():
    batch = batch_of()
    assert counted_rows(batch).tolist() == [row != 3 for row in range(len(LENGTHS))]
    sums = [float(np.sum(row.numpy(), dtype=np.float64)) for row in batch.unpadded("token_level_scores")]
    np.testing.assert_allclose(row_sums(batch, "token_level_scores"), sums, rtol=1e-12)
