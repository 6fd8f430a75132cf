"""Group-relative estimators against loops over responses from the papers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms import ADVANTAGES, AdvantageInputs, Turns, anchor_groups, observations, turn_numbers

MANY = np.array(["a"] * 4, object)


def grpo(scores, lengths, i, std):
    """arXiv:2402.03300, section 4.1.2; without the standard deviation arXiv:2503.20783."""
    return (scores[i] - np.mean(scores)) / (np.std(scores, ddof=1) + 1e-6 if std else 1.0)


def grpo_passk(scores, lengths, i, std):
    """arXiv:2503.19595: best score minus second-best score for the best response; 0 for the others."""
    without = max(scores[:i] + scores[i + 1 :])
    lead = max(scores[i] - without, 0.0)
    return lead / (np.std(scores, ddof=1) + 1e-6 if std else 1.0)


def rloo(scores, lengths, i, std):
    """arXiv:2402.14740: leave one out."""
    return scores[i] - sum(s for j, s in enumerate(scores) if j != i) / (len(scores) - 1)


def opo(scores, lengths, i, std):
    """arXiv:2505.23585: the baseline weighs by length."""
    return scores[i] - sum(n * s for n, s in zip(lengths, scores, strict=True)) / sum(lengths)


def centred(scores, lengths, i, std):
    return scores[i] - np.mean(scores)


FORMULAS = {"grpo": grpo, "grpo_passk": grpo_passk, "rloo": rloo, "opo": opo}


def by_rows(formula, rewards, mask, groups, std=True, alone=lambda score, std: score):
    """``formula`` over the counted responses of each group; ``alone`` for a group of one."""
    advantages = np.zeros(len(rewards))
    counted = [row for row in range(len(rewards)) if mask[row].any()]
    for row in counted:
        peers = [other for other in counted if groups[other] == groups[row]]
        scores, lengths = [rewards[p].sum() for p in peers], [mask[p].sum() for p in peers]
        single = len(peers) == 1
        advantages[row] = alone(scores[0], std) if single else formula(scores, lengths, peers.index(row), std)
    return advantages


def alone_in_grpo(score, std):
    return score / (1 + 1e-6) if std else score


ALONE = {"grpo": alone_in_grpo, "grpo_passk": lambda score, std: 0.0}


@st.composite
def cases(draw):
    """Rewards (with ties, and some outside the mask), masks with holes and empty rows, groups of any size."""
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    mask = generator.random((rows, columns)) < draw(st.sampled_from([0.3, 0.8, 1.0]))
    rewards = np.round(generator.normal(size=(rows, columns)), 1) * (generator.random((rows, columns)) < 0.4)
    groups = np.array([f"prompt-{g}" for g in generator.integers(0, draw(st.integers(1, 4)), rows)], object)
    return rewards, mask, groups


def estimate(name, case, **options):
    rewards, mask, groups = case
    advantages, returns = ADVANTAGES[name](
        AdvantageInputs(torch.tensor(rewards), torch.tensor(mask), group_ids=groups, **options)
    )
    assert torch.equal(advantages, returns)
    return advantages


@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=60)
@given(case=cases(), std=st.booleans())
def test_estimators_equal_the_papers_formulas(name, case, std):
    _rewards, mask, _groups = case
    per_row = by_rows(FORMULAS[name], *case, std, ALONE.get(name, lambda score, std: score))
    expected = np.where(mask, per_row[:, None], 0.0)
    np.testing.assert_allclose(estimate(name, case, norm_by_std=std), expected, rtol=1e-6, atol=1e-7)


@settings(max_examples=60)
@given(cases())
def test_reinforce_plus_plus_baseline_equals_the_papers_formula(case):
    """arXiv:2501.03262: scores minus their group's mean, whitened over all tokens of the batch."""
    _, mask, _ = case
    tokens = np.where(mask, by_rows(centred, *case)[:, None], 0.0)
    selected = tokens[mask]
    spread = np.sqrt((np.var(selected, ddof=1) if len(selected) > 1 else 0.0) + 1e-8)
    expected = np.where(mask, (tokens - (selected.mean() if len(selected) else 0.0)) / spread, 0.0)
    np.testing.assert_allclose(estimate("reinforce_plus_plus_baseline", case), expected, rtol=1e-6, atol=1e-6)


@settings(max_examples=60)
@given(cases())
def test_gpg_equals_the_papers_formula(case):
    """arXiv:2504.02546: relative scores, scaled by B / (B - M) for the M responses of zero-variance groups."""
    rewards, mask, groups = case
    relative = by_rows(centred, *case)
    counted = [row for row in range(len(rewards)) if mask[row].any()]
    informative = 0
    for row in counted:
        scores = {round(rewards[p].sum(), 9) for p in counted if groups[p] == groups[row]}  # without rounding errors
        single = sum(groups[p] == groups[row] for p in counted) == 1
        informative += any(scores) if single else len(scores) > 1
    alpha = len(counted) / max(informative, 1)
    expected = np.where(mask, alpha * relative[:, None], 0.0)
    np.testing.assert_allclose(estimate("gpg", case), expected, rtol=1e-6, atol=1e-9)


def test_gpg_takes_scores_that_differ_by_rounding_for_equal():
    rewards = np.array([[0.7, -0.2, 0.0], [1.3, -0.8, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.1, 0.2, -0.3]])
    assert rewards[0].sum() != rewards[1].sum() and rewards[4].sum() != 0
    case = rewards, np.ones((5, 3), bool), np.array(["a", "a", "b", "b", "c"], object)
    np.testing.assert_allclose(estimate("gpg", case)[:, 0], [0.0, 0.0, 1.25, -1.25, 0.0], atol=1e-9)  # alpha = 5 / 2


# Computed by hand from the equations named above, for one prompt whose four answers have these scores and lengths.
SCORES, LENGTHS = [1.0, 0.0, 0.5, 0.0], [1, 2, 3, 4]
BY_HAND = {
    "grpo": [1.3055824, -0.7833495, 0.2611165, -0.7833495],  # mean 3/8, variance 11/48
    "grpo_passk": [1.0444660, 0.0, 0.0, 0.0],  # (1 - 1/2) / sqrt(11/48)
    "rloo": [5 / 6, -0.5, 1 / 6, -0.5],
    "opo": [0.75, -0.25, 0.25, -0.25],  # baseline (1 + 1.5) / 10
    "gpg": [0.625, -0.375, 0.125, -0.375],
}


@pytest.mark.parametrize("name", BY_HAND)
def test_reference_values(name):
    mask = np.array([[t < length for t in range(4)] for length in LENGTHS])
    rewards = np.zeros((4, 4))
    rewards[range(4), [length - 1 for length in LENGTHS]] = SCORES
    advantages = estimate(name, (rewards, mask, MANY))
    assert advantages[:, 0].tolist() == pytest.approx(BY_HAND[name], rel=1e-5)


def test_zero_variance_groups_and_dropped_rows_give_zero_advantages():
    rewards = np.array([[1.0], [1.0], [1.0], [0.0], [5.0]])
    mask = np.array([[1], [1], [1], [1], [0]])
    groups = np.array(["a", "a", "b", "b", "b"], object)
    expected = {"grpo": 0.5**0.5, "rloo": 1.0, "opo": 0.5, "gpg": 1.0}
    for name, high in expected.items():
        advantages = estimate(name, (rewards, mask, groups))[:, 0]
        assert advantages.tolist() == pytest.approx([0.0, 0.0, high, -high, 0.0], rel=1e-5), name


def test_group_of_one_keeps_its_score():
    """A group of one has no baseline; its pass@k advantage is 0."""
    case = np.array([[0.0, 2.0]]), np.array([[1, 1]]), np.array(["a"], object)
    for name in ("grpo", "rloo", "opo", "gpg"):
        assert estimate(name, case).tolist() == [pytest.approx([2.0, 2.0], rel=1e-5)], name
    assert estimate("grpo_passk", case).tolist() == [[0.0, 0.0]]


def otb(rewards, mask, groups, log_probs, squares, weights):
    """Advantages and returns by loops over responses and trained tokens (optimal token baseline)."""
    steps = [[t for t in range(mask.shape[1]) if mask[row, t]] for row in range(len(mask))]
    returns, energies = np.zeros(mask.shape), np.zeros(mask.shape)
    for row, tokens in enumerate(steps):
        energy = 0.0
        for t in tokens:
            returns[row, t] = rewards[row, t:].sum()
            energy += (1 - 2 * np.exp(log_probs[row, t]) + squares[row, t]) * weights[row, t] ** 2
            energies[row, t] = energy
    advantages = np.zeros(mask.shape)
    for row, tokens in enumerate(steps):
        for k, t in enumerate(tokens):
            peers = [(p, steps[p][k]) for p in range(len(mask)) if groups[p] == groups[row] and len(steps[p]) > k]
            baseline = sum(energies[at] * returns[at] for at in peers) / (sum(energies[at] for at in peers) + 1e-8)
            advantages[row, t] = returns[row, t] - (baseline if len(peers) > 1 else 0.0)
    return advantages, returns


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
@settings(max_examples=60)
@given(case=cases(), weighted=st.booleans(), seed=st.integers(0, 99))
def test_optimal_token_baseline_equals_a_loop(name, case, weighted, seed):
    rewards, mask, groups = case
    generator = np.random.default_rng(seed)
    distributions = generator.dirichlet(np.full(5, 0.3), mask.shape)
    log_probs, squares = np.log(distributions[..., 0] + 1e-300), (distributions**2).sum(-1)
    weights = generator.uniform(0, 2, mask.shape) if weighted else np.ones(mask.shape)
    given_ = AdvantageInputs(
        torch.tensor(rewards),
        torch.tensor(mask),
        group_ids=groups,
        old_log_probs=torch.tensor(log_probs),
        sum_pi_squared=torch.tensor(squares),
        rollout_is_weights=torch.tensor(weights) if weighted else None,
    )
    advantages, returns = ADVANTAGES[name](given_)
    first, second = otb(rewards, mask, groups, log_probs, squares, weights)
    np.testing.assert_allclose(advantages, first, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(returns, second, rtol=1e-6, atol=1e-9)


def test_optimal_token_baseline_minimizes_the_variance_proxy():
    """No other baseline of a time step gives a smaller sum of W (G - B)^2."""
    generator = np.random.default_rng(1)
    scores, distributions = generator.normal(size=4), generator.dirichlet(np.ones(5), (4, 3))
    rewards = np.zeros((4, 3))
    rewards[:, -1] = scores
    log_probs, squares = np.log(distributions[..., 0]), (distributions**2).sum(-1)
    energy = (1 - 2 * np.exp(log_probs) + squares).cumsum(-1)
    given_ = AdvantageInputs(
        torch.tensor(rewards),
        torch.ones(4, 3),
        group_ids=MANY,
        old_log_probs=torch.tensor(log_probs),
        sum_pi_squared=torch.tensor(squares),
    )
    advantages = ADVANTAGES["optimal_token_baseline"](given_)[0].numpy()
    least = (energy * advantages**2).sum(0)
    for shift in (-0.01, 0.01):
        assert ((energy * (advantages + shift) ** 2).sum(0) > least).all()


def test_optimal_token_baseline_of_deterministic_tokens_is_zero():
    """A token of probability 1 has no energy, also if rounding makes it negative."""
    ones = torch.ones(2, 2)
    given_ = AdvantageInputs(
        torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
        ones,
        group_ids=MANY[:2],
        old_log_probs=torch.zeros(2, 2),
        sum_pi_squared=ones - 1e-7,
    )
    advantages, returns = ADVANTAGES["optimal_token_baseline"](given_)
    assert torch.equal(advantages, returns) and returns.tolist() == [[1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("missing", ["old_log_probs", "sum_pi_squared"])
def test_optimal_token_baseline_names_a_missing_input(missing):
    tensors = {"old_log_probs": torch.zeros(1, 1), "sum_pi_squared": torch.ones(1, 1)}
    del tensors[missing]
    with pytest.raises(ValueError, match=f"needs `{missing}`: the actor's"):
        ADVANTAGES["optimal_token_baseline"](
            AdvantageInputs(torch.ones(1, 1), torch.ones(1, 1), group_ids=MANY[:1], **tensors)
        )


@st.composite
def episodes(draw):
    """Token rows of multi-turn responses: masks, rewards, groups, and the state before each turn."""
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    rows, width = draw(st.integers(1, 8)), draw(st.integers(2, 12))
    mask = generator.random((rows, width)) < draw(st.sampled_from([0.4, 0.7, 1.0]))
    if draw(st.booleans()):
        mask[generator.integers(rows)] = False  # a failed row
    rewards = np.round(generator.normal(size=mask.shape), 1) * (generator.random(mask.shape) < 0.5)
    groups = np.array([f"prompt-{g}" for g in generator.integers(0, 2, rows)], object)
    return rewards, mask, groups, [[int(s) for s in generator.integers(0, 3, width)] for _ in range(rows)]


def steps_of(rewards, mask, states, gamma):
    """The rows of a step-wise implementation: (row, tokens, state, discounted return), one per turn."""
    steps = []
    for row in range(len(mask)):
        tokens, rewarded = [], []
        for t in range(mask.shape[1]):
            if mask[row, t] and (t == 0 or not mask[row, t - 1]):
                tokens.append([])
                rewarded.append(0.0)
            if tokens:
                rewarded[-1] += rewards[row, t]
                tokens[-1] += [t] if mask[row, t] else []
        for turn in range(len(tokens)):
            value = sum(gamma ** (later - turn) * rewarded[later] for later in range(turn, len(tokens)))
            steps.append((row, tokens[turn], states[row][turn], value))
    return steps


@pytest.mark.parametrize("std", [True, False])
@settings(max_examples=60)
@given(case=episodes(), gamma=st.sampled_from([1.0, 0.9]), weight=st.sampled_from([0.0, 0.5, 1.0]))
def test_gigpo_equals_a_step_wise_implementation(std, case, gamma, weight):
    """arXiv:2505.10978, with one row per turn as in the authors' code."""
    rewards, mask, groups, states = case
    numbers = turn_numbers(torch.tensor(mask))
    turns = [states[row][: int(numbers[row, -1]) + 1] for row in range(len(mask))]
    anchors = anchor_groups([[str(state) for state in row] for row in turns], groups.tolist(), None)
    inputs = AdvantageInputs(
        torch.tensor(rewards),
        torch.tensor(mask),
        group_ids=groups,
        turns=Turns(numbers, anchors),
        step_advantage_w=weight,
        gamma=gamma,
        norm_by_std=std,
    )
    advantages, returns = ADVANTAGES["gigpo"](inputs)
    assert torch.equal(advantages, returns)

    episode = by_rows(grpo, rewards, mask, groups, std, alone_in_grpo)
    steps, expected = steps_of(rewards, mask, states, gamma), np.zeros(mask.shape)
    for row, tokens, state, value in steps:
        peers = [other[3] for other in steps if groups[other[0]] == groups[row] and other[2] == state]
        step = value - np.mean(peers)
        if std:
            step /= (np.std(peers, ddof=1) if len(peers) > 1 else 1.0) + 1e-6
        expected[row, tokens] = episode[row] + weight * step
    np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-6)


def test_turns_and_the_observations_before_them():
    generated = torch.tensor([[1, 1, 0, 0, 1, 0], [0, 1, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    responses = torch.arange(18).view(3, 6)
    numbers = turn_numbers(generated)
    assert numbers.tolist() == [[0, 0, 0, 0, 1, 1], [-1, 0, 0, 1, 1, 1], [-1] * 6]
    assert observations(responses, generated, numbers) == [[(), (2, 3)], [(), (8,)], []]


def test_anchor_groups_by_equal_and_by_similar_states():
    text = "you are in the kitchen and see a red apple"
    states = [["start", text], ["start", text.replace("red", "bed")], ["start", (1, 2)]]
    equal = anchor_groups(states, ["a", "a", "b"], None)
    assert equal.tolist() == [[0, 1], [0, 2], [3, 4]]
    similar = anchor_groups(states, ["a", "a", "b"], 0.95)
    assert similar.tolist() == [[0, 1], [0, 1], [2, 3]]
    tokens = [[tuple(range(40))], [(*range(39), 99)], [tuple(range(100, 140))]]
    assert anchor_groups(tokens, ["a", "a", "a"], 0.95).tolist() == [[0], [0], [1]]
    assert anchor_groups([[], ["x"]], ["a", "a"], None).tolist() == [[-1], [0]]
