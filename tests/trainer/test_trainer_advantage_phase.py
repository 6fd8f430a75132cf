"""Advantages from scores, with the KL and EOS penalties."""

from __future__ import annotations

import math

import pytest
import torch
from support.documented_metrics import undocumented
from support.expected_errors import raises

from megarl.agents.trajectories import trajectories_to_batch
from megarl.agents.types import Trajectory
from megarl.base.algorithm_names import ADV_ESTIMATORS
from megarl.config.schema.algorithm import AlgorithmConfig, GiGPOConfig, KLControlConfig, RolloutCorrectionConfig
from megarl.data import DataProto
from megarl.trainer.phases.advantage_phase import AdvantagePhase
from megarl.trainer.phases.correction_phase import RolloutCorrectionPhase

MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]])


def batch(*, critic=True):
    """Two prompts with two samples each; the reward of the last sample failed."""
    generator = torch.Generator().manual_seed(3)
    numbers = {name: torch.randn(4, 3, generator=generator) * MASK for name in ("old_log_probs", "ref_log_prob")}
    scores = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.25, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    if critic:
        numbers["values"] = torch.randn(4, 3, generator=generator) * MASK
    return DataProto.from_dict(
        {
            **numbers,
            "prompts": torch.ones(4, 1).long(),
            "attention_mask": torch.ones(4, 4).long(),
            "response_mask": MASK,
            "token_level_scores": scores,
            "entropys": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 99.0], [6.0, 99.0, 99.0], [99.0, 99.0, 99.0]]),
        },
        {"uid": ["a", "a", "b", "b"]},
    )


def test_groups_without_a_critic():
    metrics: dict[str, float] = {}
    phase = AdvantagePhase(AlgorithmConfig(adv_estimator="grpo"))
    result = phase.compute(batch(critic=False), metrics).tensors
    # Scores 1 and 0.25; the second group has a single valid sample.
    high = 0.375 / (math.sqrt(2 * 0.375**2) + 1e-6)
    expected = torch.tensor([[high] * 3, [-high, -high, 0.0], [2.0, 0.0, 0.0], [0.0] * 3])
    torch.testing.assert_close(result["advantages"], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(result["token_level_rewards"], batch().tensors["token_level_scores"])
    assert metrics == {"actor/entropy": pytest.approx((1 + 2 + 3 + 4 + 5 + 6) / 6)}
    assert phase.kl_controller is None


def test_gae_with_kl_in_the_reward():
    config = AlgorithmConfig(
        gamma=0.9,
        lam=0.8,
        use_kl_in_reward=True,
        kl_penalty="k1",
        kl_ctrl=KLControlConfig(type="adaptive", kl_coef=0.5, target_kl=0.01, horizon=10),
    )
    phase, metrics = AdvantagePhase(config), {}
    given = batch()
    result = phase.compute(given, metrics).tensors
    columns = {name: tensor.tolist() for name, tensor in given.tensors.items()}

    per_row, returns, raw = [], [], {}
    for row in range(4):
        length = int(MASK[row].sum())
        kl = [columns["old_log_probs"][row][t] - columns["ref_log_prob"][row][t] for t in range(length)]
        if length:
            per_row.append(sum(kl) / length)
        rewards = [columns["token_level_scores"][row][t] - 0.5 * kl[t] for t in range(length)]
        values, late = columns["values"][row], 0.0
        for t in reversed(range(length)):
            following = values[t + 1] if t + 1 < length else 0.0
            late = rewards[t] + 0.9 * following - values[t] + 0.9 * 0.8 * late
            raw[row, t] = late
            returns.append((row, t, late + values[t]))
    mean = sum(raw.values()) / len(raw)
    deviation = math.sqrt(sum((a - mean) ** 2 for a in raw.values()) / (len(raw) - 1))

    for (row, t), advantage in raw.items():
        assert result["advantages"][row, t].item() == pytest.approx((advantage - mean) / deviation, rel=1e-4, abs=1e-5)
    for row, t, expected in returns:
        assert result["returns"][row, t].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert not result["advantages"][MASK == 0].any()
    kl_mean = sum(per_row) / 3
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(kl_mean, rel=1e-5)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5, "the coefficient that was used, not the next one"
    assert phase.kl_controller.value == pytest.approx(0.5 * (1 + math.copysign(0.2, kl_mean / 0.01 - 1) * 4 / 10))
    errors = [g - columns["values"][row][t] for row, t, g in returns]
    unexplained = torch.tensor(errors).var().item() / torch.tensor([g for _, _, g in returns]).var().item()
    assert metrics["critic/vf_explained_var"] == pytest.approx(1 - unexplained, rel=1e-3)


@pytest.mark.parametrize("estimator", [name for name in ADV_ESTIMATORS if not name.endswith("vectorized")])
def test_tool_tokens_do_not_change_advantages(estimator):
    """Any values in the holes of the mask give the same advantages."""
    holes = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 0]])
    more = {"reward_baselines": torch.tensor([0.5, 0.5, 1.0, 9.0]), "sum_pi_squared": torch.full((4, 3), 0.5)}
    more |= {"responses": torch.arange(12).view(4, 3), "generated_mask": holes}
    given = batch().with_columns({"response_mask": holes, **more}, {})
    changed = given.with_columns(
        {
            name: torch.where(holes.bool(), given.tensors[name], torch.full_like(given.tensors[name], wild))
            for name, wild in (
                ("old_log_probs", 1e9),
                ("ref_log_prob", -7.0),
                ("values", 1e9),
                ("entropys", math.nan),
                ("sum_pi_squared", math.nan),
            )
        },
        {},
    )
    results = []
    for variant in (given, changed):
        metrics: dict[str, float] = {}
        config = AlgorithmConfig(adv_estimator=estimator, lam=0.8, use_kl_in_reward=True)
        tensors = AdvantagePhase(config).compute(variant, metrics).tensors
        results.append((tensors["advantages"], tensors["returns"], metrics))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2] and math.isfinite(results[0][2]["actor/entropy"])
    assert not results[0][0][holes == 0].any() and results[0][0][holes == 1].any()


QUERY, OTHER, FOUND, NOTHING = [5, 6], [5, 7], [8, 9, 8], [3]


def conversation(*parts, states=None, error=None):
    """Turns of the policy and observations, in turns."""
    ids = [token for part in parts for token in part]
    mask = [1 - number % 2 for number, part in enumerate(parts) for _ in part]
    fields = {} if states is None else {"anchor_states": states}
    made = Trajectory([1, 2], ids, mask, [0.0] * len(ids), "stop", len(parts) + 1, fields=fields)
    return made if error is None else made.failed(error)


def searches(states=(None,) * 4, *, state_masking=True):
    """Four conversations about one prompt: two find the same documents; the last one failed."""
    made = [
        conversation(QUERY, FOUND, [4], states=states[0]),
        conversation(OTHER, FOUND, [4, 4], states=states[1]),
        conversation(QUERY, NOTHING, QUERY, FOUND, [4], states=states[2]),
        conversation(QUERY, FOUND, [4], error="lost"),
    ]
    given = trajectories_to_batch(made, 0, state_masking=state_masking)
    scores = torch.zeros(given.tensors["responses"].shape)
    for row, (length, score) in enumerate(zip((6, 7, 9), (1.0, 0.0, 0.5), strict=True)):
        scores[row, length - 1] = score
    return given.with_columns({"token_level_scores": scores}, {"uid": ["a"] * 4})


@pytest.mark.parametrize("state_masking", [True, False])
def test_gigpo_compares_turns_after_the_same_observation(state_masking):
    config = AlgorithmConfig(
        adv_estimator="gigpo", gamma=0.5, gigpo=GiGPOConfig(mode="mean_norm", step_advantage_w=2.0)
    )
    metrics: dict[str, float] = {}
    advantages = AdvantagePhase(config).compute(searches(state_masking=state_masking), metrics).tensors["advantages"]
    # First turns: returns 1/2, 0 and 1/8. Turns after FOUND: 1, 0 and 1/2. The turn after NOTHING is alone.
    first, found = (0.5 + 0 + 0.125) / 3, 0.5
    expected = [
        [(0, 0.5 - first), (5, 1 - found)],
        [(0, 0 - first), (6, 0 - found)],
        [(0, 0.125 - first), (4, 0.0), (8, 0.5 - found)],
    ]
    for row, (score, turns) in enumerate(zip((1.0, 0.0, 0.5), expected, strict=True)):
        for token, step in turns:
            assert advantages[row, token].item() == pytest.approx(score - 0.5 + 2 * step, abs=1e-6), (row, token)
    assert bool(advantages[0, 3]) is not state_masking  # an observation belongs to the turn before it
    assert not advantages[3].any()
    assert metrics["gigpo/step_group_size/mean"] == pytest.approx(7 / 3)
    assert metrics["gigpo/compared_turn_fraction"] == pytest.approx(6 / 7)
    assert not undocumented(name for name in metrics if name.startswith("gigpo/"))


def test_gigpo_reads_the_states_of_an_agent_loop():
    """Named states separate turns whose observations are equal, and join others; similar ones join too."""
    rooms = [["start", "room 1 of 20"], ["start", "room 2 of 20"], ["start", "start", "room 1 of 20"], None]
    metrics: dict[str, float] = {}
    AdvantagePhase(AlgorithmConfig(adv_estimator="gigpo")).compute(searches(rooms), metrics)
    assert metrics["gigpo/step_group_size/mean"] == pytest.approx((4 + 2 + 1) / 3)
    similar = GiGPOConfig(enable_similarity=True, similarity_thresh=0.9)
    AdvantagePhase(AlgorithmConfig(adv_estimator="gigpo", gigpo=similar)).compute(searches(rooms), metrics)
    assert metrics["gigpo/step_group_size/mean"] == pytest.approx((4 + 3) / 2)
    with raises("agent.states-per-turn", "row 1", "anchor_states has 3", "2 turns"):
        AdvantagePhase(AlgorithmConfig(adv_estimator="gigpo")).compute(
            searches([None, ["a", "b", "c"], None, None]), {}
        )


def test_optimal_token_baseline_reads_the_weights_of_rollout_correction():
    """The weights are those that the policy loss gets after the advantages."""
    given = batch(critic=False)
    log_probs = -given.tensors["old_log_probs"].abs()
    squares = log_probs.exp() ** 2 + 0.3 * (1 - log_probs.exp()) ** 2
    columns = {"old_log_probs": log_probs, "rollout_log_probs": log_probs + torch.linspace(-0.6, 0.8, 12).view(4, 3)}
    shapes = {name: torch.ones(4, width).long() for name, width in (("prompts", 1), ("responses", 3))}
    given = given.with_columns(
        {**columns, **shapes, "attention_mask": torch.ones(4, 4).long(), "sum_pi_squared": squares}, {}
    )
    correction = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold="1.5")
    config = AlgorithmConfig(adv_estimator="optimal_token_baseline", rollout_correction=correction)
    result = AdvantagePhase(config).compute(given, {}).tensors
    weights = RolloutCorrectionPhase(correction).run(given, 1, {}).tensors["rollout_is_weights"]
    energy = ((1 - 2 * log_probs.exp() + squares) * weights**2).cumsum(-1)
    assert weights.max() == 1.5 and weights[0, 0] == pytest.approx(1.5) and weights[1, 1] < 1.5
    # The first two samples share a prompt; their returns are their scores.
    for t, trained in enumerate((2, 2, 1)):
        of_first, of_second = energy[0, t].item(), energy[1, t].item()
        baseline = (of_first + 0.25 * of_second) / (of_first + of_second) if trained == 2 else 0.0
        assert result["advantages"][0, t].item() == pytest.approx(1 - baseline, abs=1e-5)
    plain = AdvantagePhase(AlgorithmConfig(adv_estimator="optimal_token_baseline")).compute(given, {}).tensors
    assert (plain["advantages"] - result["advantages"]).abs().max() > 1e-3


def penalized(config):
    """Reward changes of four samples of 3, 2, 1 and 1 tokens; a limit ended all but the second."""
    real = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0]])
    tensors = {"prompts": torch.ones(4, 2).long(), "attention_mask": torch.cat([torch.ones(4, 2).long(), real], dim=1)}
    given = batch().with_columns(tensors, {"finish_reason": ["length", "stop", "turns", "length"]})
    metrics: dict[str, float] = {}
    result = AdvantagePhase(config).compute(given, metrics)
    return result.tensors["token_level_rewards"] - given.tensors["token_level_scores"], metrics


@pytest.mark.parametrize("penalty", [0.75, 0.0])
def test_truncated_responses_are_penalized(penalty):
    """The reward of the last sample failed, so it is neither penalized nor counted. A penalty of 0 only counts."""
    change, metrics = penalized(AlgorithmConfig(adv_estimator="grpo", missing_eos_penalty=penalty))
    assert change.tolist() == [[0.0, 0.0, -penalty], [0.0] * 3, [-penalty, 0.0, 0.0], [0.0] * 3]
    assert metrics["reward/missing_eos_fraction"] == pytest.approx(2 / 3)


def test_penalties_come_before_whitening():
    """Rewards of the six trained tokens: 0, 0, 1 - 3/4; 0, 1/4; 2 - 3/4."""
    config = AlgorithmConfig(adv_estimator="grpo", missing_eos_penalty=0.75, whiten_rewards=True)
    change, _ = penalized(config)
    rewards = torch.tensor([0.0, 0.0, 0.25, 0.0, 0.25, 1.25])
    white = (rewards - rewards.mean()) / rewards.std() + rewards.mean()
    result = (change + batch().tensors["token_level_scores"])[MASK == 1]
    torch.testing.assert_close(result, white, rtol=1e-5, atol=1e-6)


def test_remax_without_baselines_is_an_error():
    with pytest.raises(ValueError, match="'remax' needs `reward_baselines`"):
        AdvantagePhase(AlgorithmConfig(adv_estimator="remax")).compute(batch(), {})
