import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.expected_errors import raises

from megarl.algorithms import (
    ADVANTAGES,
    AdvantageEstimator,
    AdvantageInputs,
    gae,
    generalized_advantages,
    reinforce_plus_plus,
    remax,
)


def gae_by_definition(rewards, values, gamma, lam):
    """Eq. 16 of the paper as a double sum, for one sequence without masked tokens."""
    length = len(rewards)
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * following[t] - values[t] for t in range(length)]
    return [sum((gamma * lam) ** k * deltas[t + k] for k in range(length - t)) for t in range(length)]


def reference_gae(rewards, values, mask, gamma, lam):
    """The definition on each row without its masked tokens."""
    advantages, returns = np.zeros_like(rewards), np.zeros_like(rewards)
    for row in range(len(rewards)):
        kept = [t for t in range(rewards.shape[1]) if mask[row, t]]
        own_rewards = []
        for position, t in enumerate(kept):
            end = kept[position + 1] if position + 1 < len(kept) else rewards.shape[1]
            own_rewards.append(sum(rewards[row, t:end]))
        for t, advantage in zip(
            kept, gae_by_definition(own_rewards, [values[row, t] for t in kept], gamma, lam), strict=True
        ):
            advantages[row, t], returns[row, t] = advantage, advantage + values[row, t]
    return advantages, returns


@st.composite
def batches(draw):
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    mask = generator.random((rows, columns)) < draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    gamma, lam = draw(st.sampled_from([1.0, 0.9, 0.5])), draw(st.sampled_from([0.0, 0.7, 1.0]))
    return generator.normal(size=(rows, columns)), generator.normal(size=(rows, columns)), mask, gamma, lam


@settings(max_examples=80)
@given(batches())
def test_gae_equals_the_definition(case):
    rewards, values, mask, gamma, lam = case
    expected_advantages, expected_returns = reference_gae(rewards, values, mask, gamma, lam)
    tensors = [torch.tensor(array) for array in (rewards, values, mask)]
    advantages, returns = generalized_advantages(*tensors, gamma, lam)
    np.testing.assert_allclose(advantages, expected_advantages, atol=1e-12)
    np.testing.assert_allclose(returns, expected_returns, atol=1e-12)

    white, same_returns = gae(AdvantageInputs(tensors[0], tensors[2].long(), values=tensors[1], gamma=gamma, lam=lam))
    selected = expected_advantages[mask]
    spread = np.sqrt((np.var(selected, ddof=1) if len(selected) > 1 else 0.0) + 1e-8)
    expected_white = np.where(mask, (expected_advantages - (selected.mean() if len(selected) else 0.0)) / spread, 0.0)
    np.testing.assert_allclose(white, expected_white, atol=1e-7)
    np.testing.assert_allclose(same_returns, expected_returns, atol=1e-12)


def test_gae_by_hand():
    rewards, values = torch.tensor([[0.0, 0.0, 1.0, 9.0]]), torch.tensor([[0.5, 0.25, 0.5, 9.0]])
    advantages, returns = generalized_advantages(
        rewards * torch.tensor([1, 1, 1, 0]), values, torch.tensor([[1, 1, 1, 0]]), 0.5, 0.5
    )
    # deltas: 0.5*0.25-0.5 = -0.375, 0.5*0.5-0.25 = 0, 1-0.5 = 0.5; A2 = .5, A1 = 0+.25*.5 = .125, A0 = -.375+.25*.125
    assert advantages.tolist() == [[-0.34375, 0.125, 0.5, 0.0]]
    assert returns.tolist() == [[0.15625, 0.375, 1.0, 0.0]]


def test_gae_skips_tool_results():
    """Masked tokens in the middle do not change other tokens, at any position of the reward."""
    generator = torch.Generator().manual_seed(3)
    rewards, values = torch.randn(2, 4, generator=generator), torch.randn(2, 4, generator=generator)
    plain = generalized_advantages(rewards, values, torch.ones(2, 4), 0.9, 0.8)
    wide_rewards, wide_values = torch.zeros(2, 7), torch.full((2, 7), torch.nan)
    own = [0, 1, 4, 5]
    mask = torch.zeros(2, 7)
    mask[:, own] = 1
    wide_rewards[:, own], wide_values[:, own] = rewards, values
    wide_rewards[:, 6], wide_rewards[:, 5] = rewards[:, 3], 0.0  # the score on the last, masked token
    for wide, narrow in zip(generalized_advantages(wide_rewards, wide_values, mask, 0.9, 0.8), plain, strict=True):
        torch.testing.assert_close(wide[:, own], narrow)
        assert not wide[:, [2, 3, 6]].any()


@settings(max_examples=60)
@given(batches())
def test_reinforce_plus_plus_equals_the_definition(case):
    """Discounted returns over the tokens of the mask, then mean 0 and variance 1 over all of them."""
    rewards, _, mask, gamma, _ = case
    returns, _ = reference_gae(rewards, np.zeros_like(rewards), mask, gamma, 1.0)
    selected = returns[mask]
    spread = np.sqrt((np.var(selected, ddof=1) if len(selected) > 1 else 0.0) + 1e-8)
    white = np.where(mask, (returns - (selected.mean() if len(selected) else 0.0)) / spread, 0.0)
    given_ = AdvantageInputs(torch.tensor(rewards), torch.tensor(mask), gamma=gamma)
    advantages, same_returns = reinforce_plus_plus(given_)
    np.testing.assert_allclose(advantages, white, atol=1e-7)
    np.testing.assert_allclose(same_returns, returns, atol=1e-12)


@settings(max_examples=60)
@given(batches())
def test_remax_equals_the_definition(case):
    """Undiscounted return minus the greedy response's score, here the first critic value."""
    rewards, values, mask, gamma, _ = case
    baselines = values[:, 0]
    returns, _ = reference_gae(rewards, np.zeros_like(rewards), mask, 1.0, 1.0)
    inputs = AdvantageInputs(
        torch.tensor(rewards), torch.tensor(mask), reward_baselines=torch.tensor(baselines), gamma=gamma
    )
    advantages, same_returns = remax(inputs)
    np.testing.assert_allclose(advantages, np.where(mask, returns - baselines[:, None], 0.0), atol=1e-12)
    np.testing.assert_allclose(same_returns, returns, atol=1e-12)


def test_rft_advantage_is_one():
    rewards, mask = torch.tensor([[0.0, 0.0, 5.0], [0.0, -1.0, 0.0]]), torch.tensor([[1, 0, 1], [0, 0, 0]])
    advantages, returns = ADVANTAGES["rft"](AdvantageInputs(rewards, mask))
    assert advantages.tolist() == [[1, 0, 1], [0, 0, 0]] and returns.tolist() == [[5, 0, 5], [0, 0, 0]]


def test_remax_by_hand():
    """arXiv:2310.10505: a score of 1 against a greedy response's 0.25, and a KL of 0.5 at the first token."""
    inputs = AdvantageInputs(
        torch.tensor([[-0.5, 0.0, 1.0]]), torch.tensor([[1, 1, 1]]), reward_baselines=torch.tensor([0.25]), gamma=0.5
    )
    advantages, returns = remax(inputs)
    assert advantages.tolist() == [[0.25, 0.75, 0.75]] and returns.tolist() == [[0.5, 1.0, 1.0]]


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("gae", "values"),
        ("remax", "reward_baselines"),
        *((name, "group_ids") for name in ("grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")),
    ],
)
def test_missing_inputs_are_named(name, field):
    assert ADVANTAGES[name].needs == (field,)
    with pytest.raises(ValueError, match=f"'{name}' needs `{field}`"):
        ADVANTAGES[name](AdvantageInputs(torch.zeros(1, 1), torch.ones(1, 1)))


def test_vectorized_names_are_aliases():
    assert ADVANTAGES["grpo_vectorized"] is ADVANTAGES["grpo"]
    assert ADVANTAGES["rloo_vectorized"] is ADVANTAGES["rloo"]


@pytest.mark.parametrize("reads_packed", [True, False])
def test_an_estimator_may_overwrite_padded_tensors_only(reads_packed):
    def doubled(inputs):
        return inputs.token_level_rewards.mul_(2), inputs.token_level_rewards

    rewards = torch.tensor([1.0, 2.0, 3.0])
    inputs = AdvantageInputs(rewards, torch.ones(3, dtype=torch.bool), lengths=torch.tensor([1, 2]))
    estimate = AdvantageEstimator("mine", doubled, reads_packed=reads_packed)
    if reads_packed:
        with pytest.raises(ValueError, match=r"'mine' changes \['token_level_rewards'\]"):
            estimate(inputs)
    else:
        assert estimate(inputs)[0].tolist() == [2.0, 4.0, 6.0] and rewards.tolist() == [1.0, 2.0, 3.0]


def test_user_estimator(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def twice(inputs):\n    return 2 * inputs.token_level_rewards, inputs.token_level_rewards\n", encoding="utf-8"
    )
    inputs = AdvantageInputs(torch.ones(1, 2), torch.ones(1, 2))
    assert ADVANTAGES.find(f"{file}:twice")(inputs)[0].tolist() == [[2.0, 2.0]]
    assert ADVANTAGES.find("gae") is ADVANTAGES["gae"]
    with raises("config.user-code-function", "algorithm.adv_estimator", "'thrice'", "['twice']"):
        ADVANTAGES.find(f"{file}:thrice")
    with raises("config.unknown-name", "algorithm.adv_estimator='vtrace'", "gae, gigpo, gpg, grpo"):
        ADVANTAGES.find("vtrace")
