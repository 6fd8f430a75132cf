"""Metrics of a batch, worked out by hand."""

import math
import statistics

import numpy as np
import pytest
import torch
from support.documented_metrics import undocumented

from megarl.base.reductions import combine_metrics
from megarl.data import DataProto, token_counts
from megarl.trainer.loop.ppo_trainer import TrainedBatches
from megarl.trainer.phases.advantage_phase import _quality_metrics
from megarl.trainer.phases.validation import CONVERSATION_METRICS, conversation_metrics
from megarl.trainer.records.step_metrics import batch_metrics, group_spread, phase_tokens, throughput_metrics
from megarl.workers.row_math import GENERATED_TOKENS, summary


def batch(**more):
    """Three rows with prompts of 2, 1, 3 tokens and responses of 3, 1, 2, of which the last is masked."""
    return DataProto.from_dict(
        {
            "prompts": torch.tensor([[0, 1, 2], [0, 0, 3], [4, 5, 6]]),
            "responses": torch.tensor([[1, 2, 3], [4, 0, 0], [5, 6, 0]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]),
            "response_mask": torch.tensor([[1, 0, 1], [1, 0, 0], [0, 0, 0]]),
            "token_level_scores": torch.tensor([[0.0, 0.0, 1.0], [0.5, 0.0, 0.0], [0.0, 9.0, 0.0]]),
            "token_level_rewards": torch.tensor([[-0.25, 0.0, 1.0], [0.5, 0.0, 0.0], [0.0, 9.0, 0.0]]),
            "advantages": torch.tensor([[1.0, 7.0, -3.0], [5.0, 7.0, 7.0], [7.0, 7.0, 7.0]]),
            "returns": torch.tensor([[2.0, 7.0, 4.0], [6.0, 7.0, 7.0], [7.0, 7.0, 7.0]]),
            **more,
        }
    )


def test_batch_metrics():
    """A limit ended one response; another one has the maximum length."""
    scored = batch().with_columns({}, {"finish_reason": ["stop", "turns", "error"]})
    metrics = batch_metrics(scored, max_prompt_length=3, max_response_length=3)
    assert metrics == pytest.approx(
        {
            "critic/score/mean": 0.75,
            "critic/score/max": 1.0,
            "critic/score/min": 0.5,
            "critic/rewards/mean": 0.625,
            "critic/rewards/max": 0.75,
            "critic/rewards/min": 0.5,
            "critic/advantages/mean": 1.0,
            "critic/advantages/max": 5.0,
            "critic/advantages/min": -3.0,
            "critic/returns/mean": 4.0,
            "critic/returns/max": 6.0,
            "critic/returns/min": 2.0,
            "prompt_length/mean": 2.0,
            "prompt_length/max": 3.0,
            "prompt_length/min": 1.0,
            "prompt_length/clip_ratio": 1 / 3,
            "response_length/mean": 2.0,
            "response_length/max": 3.0,
            "response_length/min": 1.0,
            "response_length/clip_ratio": 1 / 3,
            "response/truncated_ratio": 1 / 3,
        }
    )


def test_spread_within_groups():
    """Scores of TRL's ``reward_std``: ``rewards.view(-1, n).std(dim=1).mean()``; b's rows vary, a's and d's do not."""
    scores = {"a": [1.0, 1.0, 1.0], "b": [0.0, 1.0, 0.5], "c": [3.0], "d": [0.1, 0.1]}
    rows = [(name, score) for name, of_name in scores.items() for score in of_name]
    order = [3, 0, 6, 7, 4, 1, 8, 5, 2]
    uids = np.array([rows[at][0] for at in order], dtype=object)
    metrics = group_spread(torch.tensor([rows[at][1] for at in order]), uids)
    assert metrics == pytest.approx(
        {"critic/score/group_std": 0.5 / 3, "critic/score/zero_variance_fraction": 2 / 3}, abs=1e-7
    )
    assert metrics["critic/score/group_std"] == pytest.approx(np.mean([0.0, statistics.stdev(scores["b"]), 0.0]))
    assert group_spread(torch.tensor([1.0, 2.0]), np.array(["a", "b"], dtype=object)) == {}
    assert group_spread(torch.empty(0), np.array([], dtype=object)) == {}


def test_spread_counts_rows_with_a_trained_token():
    """The third row is masked: its score of 9 is in no group."""
    grouped = batch().with_columns({}, {"uid": np.array(["0", "0", "0"], dtype=object)})
    metrics = batch_metrics(grouped, 3, 3)
    assert metrics["critic/score/group_std"] == pytest.approx(statistics.stdev([1.0, 0.5]))
    assert metrics["critic/score/zero_variance_fraction"] == 0.0


def test_values_are_reported_with_a_critic():
    values = torch.tensor([[1.0, 9.0, 2.0], [6.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    metrics = batch_metrics(batch(values=values), 3, 3)
    assert [metrics[f"critic/values/{name}"] for name in ("mean", "max", "min")] == [3.0, 6.0, 1.0]


def test_an_empty_tensor_has_no_metrics():
    assert summary("x", torch.empty(0)) == {}
    nothing = batch().with_columns({"response_mask": torch.zeros(3, 3, dtype=torch.int64)}, {})
    assert not [name for name in batch_metrics(nothing, 3, 3) if name.startswith("critic/")]


def mismatch(given):
    metrics = batch_metrics(given, 3, 3, compare_log_probs=True)
    return {name: value for name, value in metrics.items() if name.startswith(("training/", "rollout_corr/"))}


def test_rollout_mismatch_metrics():
    rollout = torch.tensor([[0.5, 0.9, 0.25], [0.1, 0.9, 0.9], [0.9, 0.9, 0.9]]).log()
    actor = torch.tensor([[0.4, 0.1, 0.25], [0.4, 0.1, 0.1], [0.1, 0.1, 0.1]]).log()
    given = batch(rollout_log_probs=rollout, old_log_probs=actor)
    metrics = mismatch(given)
    assert batch_metrics(given, 3, 3) == batch_metrics(batch(), 3, 3)
    differences = [0.1, 0.0, 0.3]
    ratios = [math.log(0.5 / 0.4), 0.0, math.log(0.1 / 0.4)]
    expected = {
        "training/rollout_probs_diff_mean": 0.4 / 3,
        "training/rollout_probs_diff_max": 0.3,
        "training/rollout_probs_diff_std": float(np.std(differences)),
        "training/rollout_log_probs_diff_mean": float(np.mean(np.abs(ratios))),
        "training/rollout_log_probs_diff_max": math.log(4),
        "training/rollout_actor_probs_pearson_corr": float(np.corrcoef([0.5, 0.25, 0.1], [0.4, 0.25, 0.4])[0, 1]),
        "rollout_corr/kl": float(np.mean(ratios)),
        "rollout_corr/k3_kl": float(np.mean([math.exp(-x) - 1 + x for x in ratios])),
        "rollout_corr/ppl_ratio": ((0.5 / 0.4) ** 0.5 + 0.25) / 2,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert {name.partition("/")[0] for name in metrics} == {"training", "rollout_corr"}
    assert mismatch(batch()) == {}


def test_phase_tokens_and_throughput():
    assert phase_tokens(batch(), ["gen", "update_actor"]) == {"gen": 6, "update_actor": 12}
    seconds = {"step": 4.0, "gen": 2.0, "update_actor": 1.0, "update_critic": 0.5}
    metrics = throughput_metrics(batch(), batch(), seconds, num_devices=2)
    assert metrics == {
        "perf/total_num_tokens": 12.0,
        "perf/time_per_step": 4.0,
        "perf/throughput": 1.5,
        "perf/samples_per_s": 0.75,
        "perf/rollout_tokens_per_s": 3.0,
        "perf/update_tokens_per_s": 8.0,
    }
    without_update = throughput_metrics(batch(), batch(), {"step": 4.0, "gen": 2.0}, num_devices=2)
    assert "perf/update_tokens_per_s" not in without_update


def test_updates_count_the_rows_that_they_train():
    """PF-PPO may draw the longest row (3 + 2 tokens), or any other, several times."""
    trained = batch()[[0, 0, 2]]
    assert phase_tokens(batch(), ["gen", "adv", "update_actor", "update_critic"], trained) == {
        "gen": 6,
        "adv": 12,
        "update_actor": 15,
        "update_critic": 15,
    }
    seconds = {"step": 4.0, "gen": 2.0, "update_actor": 1.0, "update_critic": 0.5}
    metrics = throughput_metrics(batch(), trained, seconds, num_devices=2)
    assert metrics["perf/update_tokens_per_s"] == 10.0 and metrics["perf/total_num_tokens"] == 12.0


def test_tool_tokens_are_neither_generated_nor_compared():
    """Trained on or not (without ``state_masking`` it is): the engine has no log-prob of it."""
    given = batch(
        generated_mask=torch.tensor([[1, 0, 1], [1, 0, 0], [1, 1, 0]]),
        response_mask=torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]),
        rollout_log_probs=torch.tensor([[0.5, 0.0, 0.25], [0.5, 0.0, 0.0], [0.0, 0.0, 0.0]]).clamp(min=1e-9).log(),
        old_log_probs=torch.tensor([[0.25, 0.01, 0.25], [0.5, 0.0, 0.0], [0.9, 0.9, 0.0]]).clamp(min=1e-9).log(),
    )
    assert mismatch(given)["training/rollout_probs_diff_max"] == pytest.approx(0.25)
    assert mismatch(given)["training/rollout_probs_diff_mean"] == pytest.approx(0.25 / 3)
    assert phase_tokens(given, ["gen", "adv"]) == {"gen": 5, "adv": 12}


def test_rows_with_images_are_compared_alone_too():
    rollout = torch.tensor([[0.5, 0.5, 0.25], [0.4, 0.9, 0.9], [0.9, 0.9, 0.9]]).log()
    actor = torch.tensor([[0.5, 0.5, 0.25], [0.1, 0.1, 0.1], [0.1, 0.1, 0.1]]).log()
    given = batch(rollout_log_probs=rollout, old_log_probs=actor, image_counts=torch.tensor([0, 2, 1]))
    metrics = mismatch(given)
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.3 / 3)
    assert metrics["training/rollout_probs_diff_mean/images"] == pytest.approx(0.3)
    assert undocumented(metrics) == []
    excess = batch_metrics(given, 3, 3, compare_log_probs=True, explained=math.log(4) / 2)
    assert excess["training/rollout_mismatch_excess/images"] == pytest.approx(2.0)


def test_conversation_metrics_are_averaged_by_rows():
    batches = [
        {"env/finish_ratio": 1.0, "num_turns/mean": 9.0},
        {"env/finish_ratio": 0.0, "tool_call_counts/mean": 2.0},
    ]
    assert conversation_metrics(batches, [3, 1]) == {
        "val-aux/env/finish_ratio": 0.75,
        "val-aux/tool_call_counts/mean": 2.0,
    }
    assert conversation_metrics([{}], [4]) == {}
    complete = conversation_metrics([dict.fromkeys(CONVERSATION_METRICS, 1.0)], [1])
    assert len(complete) == len(CONVERSATION_METRICS) and undocumented(complete) == []


def test_metrics_declare_their_reduction():
    """Two parts of a step: counts add up, extremes stay extremes, and others are means over the rows."""
    first = summary("x", torch.tensor([1.0, 3.0])) | quality_metrics(num_failed=1)
    second = summary("x", torch.tensor([0.0])) | quality_metrics(num_failed=2)
    combined = combine_metrics([(first, 2), (second, 1)])
    assert {name: combined[name] for name in ("x/mean", "x/max", "x/min")} == {
        "x/mean": pytest.approx(4 / 3),
        "x/max": 3.0,
        "x/min": 0.0,
    }
    assert combined["ref_quality/left_out"] == 3.0 and combined["ref_quality/weight"] == 0.5


def quality_metrics(num_failed):
    """Metrics of the blend with the reference's quality: three rows, some without a score."""
    counted = torch.arange(3) >= num_failed
    facts = {"quality": torch.ones(3), "quality_change": torch.ones(3), "counted": counted}
    return _quality_metrics(facts, 0.5)


def test_a_step_joins_its_scored_rows_and_its_trained_rows():
    """PF-PPO trains other rows of a batch than those that were scored; metrics of the updates count the former."""
    step = TrainedBatches()
    for tokens, rows, loss in ((6, [0, 0, 2], 1.0), (7, [1, 1, 1], 2.0)):
        scored, metrics = batch(), {"actor/pg_loss": loss}
        scored.meta_info[GENERATED_TOKENS] = tokens
        step.add(scored, scored[rows], metrics)
    scored, trained, metrics = step.joined()
    assert token_counts(scored) == [5, 2, 5, 5, 2, 5] and token_counts(trained) == [5, 5, 5, 2, 2, 2]
    assert metrics == {"actor/pg_loss": 1.5} and scored.meta_info[GENERATED_TOKENS] == 13
