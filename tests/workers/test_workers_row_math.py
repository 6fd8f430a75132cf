"""Row functions on parts of a batch give the results of the whole batch."""

import math

import numpy as np
import pytest
import torch

from megarl.algorithms import AdvantageInputs, load_advantage
from megarl.cluster.split import collect
from megarl.config.schema.algorithm import AlgorithmConfig, KLControlConfig, RefQualityConfig
from megarl.data import DataProto, sequence_lengths
from megarl.data.column_store import ragged_columns
from megarl.trainer.phases.advantage_phase import AdvantagePhase, RewardShaping
from megarl.trainer.records.metrics import batch_metrics, rollout_mismatch_metrics
from megarl.workers.row_math import counted_rows, row_sums

LENGTHS = [3, 1, 6, 2, 4, 4, 7, 1, 5, 2, 3, 6]
PARTS = [[7, 0, 4], [1], [2, 11, 5, 3, 10], [9, 8, 6]]


def map_in_parts(function, columns, batch, *args):
    """A row map over parts of the rows, in this process."""
    results = [function(batch.present(columns)[part], *args) for part in PARTS]
    return collect([columns for columns, _ in results], PARTS), [facts for _, facts in results]


def batch_of():
    random = np.random.default_rng(5)

    def floats(scale=1.0):
        return [(scale * random.normal(size=length)).astype(np.float32) for length in LENGTHS]

    masks = [np.ones(length, np.int8) for length in LENGTHS]
    masks[2][1:3] = 0  # a tool result
    masks[3][:] = 0  # a failed reward
    rows = {
        "prompts": [random.integers(1, 9, 2) for _ in LENGTHS],
        "responses": [random.integers(5, 9, length) for length in LENGTHS],
        "response_mask": masks,
        "token_level_scores": [
            np.append(np.zeros(length - 1), random.normal()).astype(np.float32) for length in LENGTHS
        ],
        "old_log_probs": [-np.abs(row) for row in floats()],
        "ref_log_prob": [-np.abs(row) for row in floats()],
        "rollout_log_probs": [-np.abs(row) for row in floats()],
        "values": floats(),
        "entropys": [np.abs(row) for row in floats()],
    }
    uids = np.array([f"p{row // 3}" for row in range(len(LENGTHS))], dtype=object)
    batch = DataProto(ragged_columns(rows, {}), {"uid": uids})
    return batch.with_columns({"reward_baselines": torch.linspace(-1, 1, len(batch))})


PENALTIES = {
    "none": {},
    "kl": {"use_kl_in_reward": True, "kl_penalty": "k2", "kl_ctrl": KLControlConfig(type="adaptive", horizon=100)},
    "eos": {"missing_eos_penalty": 0.5},
    "whitened": {"whiten_rewards": True, "missing_eos_penalty": 0.25},
}
ESTIMATORS = ("gae", "reinforce_plus_plus", "remax", "rft", "grpo", "grpo_passk", "rloo", "gpg", "opo")


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("estimator", (*ESTIMATORS, "reinforce_plus_plus_baseline"))
def test_parts_give_the_results_of_the_whole_batch(estimator, penalty):
    config = AlgorithmConfig(adv_estimator=estimator, gamma=0.9, lam=0.8, **PENALTIES[penalty])
    results = []
    for rows in (None, map_in_parts):
        phase, metrics = AdvantagePhase(config, eos_token_ids=(7,)), {}
        phase.rows = phase.rows if rows is None else rows
        batch = phase.compute(batch_of(), metrics)
        options = {} if rows is None else {"rows": rows}
        metrics |= batch_metrics(batch, 2, 7, **options) | rollout_mismatch_metrics(batch, **options)
        value = None if phase.kl_controller is None else phase.kl_controller.value
        results.append((batch, metrics, value))
    (whole, expected, coefficient), (parts, metrics, other) = results
    assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-12) and len(metrics) > 30
    assert other == (None if coefficient is None else pytest.approx(coefficient, rel=1e-12))
    for name in ("token_level_rewards", "advantages", "returns"):
        torch.testing.assert_close(parts.packed(name), whole.packed(name), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("estimator", (*ESTIMATORS, "reinforce_plus_plus_baseline"))
def test_rows_and_sums_give_the_estimate_over_all_tokens(estimator):
    """The phase works on rows and sums of rewards; the estimator itself on the tokens of the whole batch."""
    config = AlgorithmConfig(adv_estimator=estimator, gamma=0.9, lam=0.8)
    phase, batch = AdvantagePhase(config), batch_of()
    phase.rows = map_in_parts
    result = phase.compute(batch, {})
    inputs = AdvantageInputs(
        token_level_rewards=batch.packed("token_level_scores"),
        response_mask=batch.packed("response_mask", torch.bool),
        values=batch.packed("values"),
        group_ids=batch.non_tensor_batch["uid"],
        reward_baselines=batch.tensors["reward_baselines"],
        old_log_probs=batch.packed("old_log_probs"),
        gamma=0.9,
        lam=0.8,
        lengths=sequence_lengths(batch)[1],
    )
    for name, expected in zip(("advantages", "returns"), load_advantage(estimator)(inputs), strict=True):
        torch.testing.assert_close(result.packed(name), expected, rtol=1e-5, atol=1e-6)
        assert result.packed(name).abs().sum() > 0


def test_shaping_in_parts():
    config = AlgorithmConfig(ref_quality_score=RefQualityConfig(enable=True, max_weight=0.5, warmup_ratio=0.0))
    results = []
    for rows in ({}, {"rows": map_in_parts}):
        metrics = {}
        shaped = RewardShaping(config, 10, **rows).shape(batch_of(), 3, metrics)
        results.append((shaped.packed("token_level_rewards"), metrics))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=0)
    assert results[0][1] == pytest.approx(results[1][1]) and "ref_quality/quality/mean" in results[0][1]


def test_whitened_gae_equals_a_loop_over_all_rows():
    config = AlgorithmConfig(adv_estimator="gae", gamma=0.9, lam=0.8)
    phase, batch = AdvantagePhase(config), batch_of()
    phase.rows = map_in_parts
    result = phase.compute(batch, {})
    expected = []
    for scores, values, mask in zip(
        *map(batch.unpadded, ("token_level_scores", "values", "response_mask")), strict=True
    ):
        kept = [t for t in range(len(mask)) if mask[t]]
        following, advantage, row = 0.0, 0.0, [0.0] * len(mask)
        for t in reversed(kept):
            advantage = float(scores[t]) + 0.9 * following - float(values[t]) + 0.72 * advantage
            following = float(values[t])
            row[t] = advantage
        expected.append((row, kept))
    trained = [row[t] for row, kept in expected for t in kept]
    mean, deviation = np.mean(trained), math.sqrt(np.var(trained, ddof=1) + 1e-8)
    for row, (advantages, kept) in zip(result.unpadded("advantages"), expected, strict=True):
        white = [(value - mean) / deviation if t in kept else 0.0 for t, value in enumerate(advantages)]
        np.testing.assert_allclose(row, white, atol=2e-6)


def test_rows_without_a_trained_token_do_not_count():
    batch = batch_of()
    assert counted_rows(batch).tolist() == [row != 3 for row in range(len(LENGTHS))]
    sums = [float(np.sum(row.numpy(), dtype=np.float64)) for row in batch.unpadded("token_level_scores")]
    np.testing.assert_allclose(row_sums(batch, "token_level_scores"), sums, rtol=1e-12)
