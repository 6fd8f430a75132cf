"""Functions on packed tokens equal those on padded rectangles, for any lengths, holes and groups."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms import (
    ADVANTAGES,
    AdvantageEstimator,
    AdvantageInputs,
    RatioMoments,
    Rejection,
    Truncation,
    TurnCounts,
    Turns,
    anchor_groups,
    apply_kl_penalty,
    importance_weights,
    log_ratios,
    observations,
    on_trained_tokens,
    rejected_tokens,
    turn_numbers,
)
from megarl.algorithms.masked import have_tokens, sequence_counts, sequence_maxima, sequence_means, sequence_sums
from megarl.algorithms.reward_shaping import add_at_last, blend_quality, sequence_quality


@st.composite
def responses(draw):
    """Lengths ``[b]``, at least 1; mask of real tokens and of trained tokens ``[b, R]``."""
    lengths = torch.tensor(draw(st.lists(st.integers(1, 6), min_size=1, max_size=6)))
    real = torch.arange(int(lengths.max())) < lengths[:, None]
    flags = draw(st.lists(st.booleans(), min_size=real.numel(), max_size=real.numel()))
    return lengths, real, real & torch.tensor(flags).view_as(real)


def numbers(real, seed):
    """Random numbers at the real tokens, 0 elsewhere."""
    return torch.randn(real.shape, generator=torch.Generator().manual_seed(seed)) * real


def inputs_of(real, mask, *, sparse=False):
    groups = np.array([f"group {row % 2}" for row in range(len(real))], dtype=object)
    rewards = numbers(real, 1) * ((numbers(real, 2) > 0) if sparse else 1)
    ids = torch.arange(real.numel()).view_as(real) % 3
    turns = turn_numbers(mask)
    anchors = anchor_groups(observations(ids, mask, turns), groups.tolist(), None)
    inputs = AdvantageInputs(
        token_level_rewards=rewards,
        response_mask=mask.long(),
        values=numbers(real, 3),
        group_ids=groups,
        reward_baselines=torch.linspace(0, 1, len(real)),
        old_log_probs=-numbers(real, 4).abs(),
        sum_pi_squared=numbers(real, 5).abs().clamp(max=1),
        rollout_is_weights=numbers(real, 6).abs(),
        turns=Turns(turns, anchors),
        gamma=0.9,
        lam=0.8,
    )
    return inputs, groups


def packed(inputs, real):
    """Drop the padding."""
    tokens = {
        name: getattr(inputs, name)[real]
        for name in ("token_level_rewards", "response_mask", "values", "old_log_probs", "sum_pi_squared")
    }
    assert inputs.rollout_is_weights is not None and inputs.turns is not None
    turns = Turns(inputs.turns.numbers[real], inputs.turns.anchors)
    weights = inputs.rollout_is_weights[real]
    return replace(inputs, **tokens, rollout_is_weights=weights, turns=turns, lengths=real.sum(-1))


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@given(case=responses())
def test_estimators_read_packed_tokens_like_rectangles(name, case):
    _, real, mask = case
    inputs, _ = inputs_of(real, mask)
    for padded, tokens in zip(ADVANTAGES[name](inputs), ADVANTAGES[name](packed(inputs, real)), strict=True):
        assert padded.shape == real.shape and not padded[~real].any()
        torch.testing.assert_close(tokens, padded[real], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_estimators_read_numbers_of_mixed_precision(name):
    """bfloat16, which numpy lacks, and doubles beside it."""
    real = torch.arange(5) < torch.tensor([5, 2, 1, 4])[:, None]
    inputs, _ = inputs_of(real, real)
    rewards = inputs.token_level_rewards.bfloat16()
    others = {field: getattr(inputs, field).bfloat16() for field in ("values", "old_log_probs", "reward_baselines")}
    exact = replace(inputs, token_level_rewards=rewards.float(), **{n: x.float() for n, x in others.items()})
    for half in (replace(inputs, token_level_rewards=rewards, **others), replace(exact, token_level_rewards=rewards)):
        for mixed, same in ((half, exact), (packed(half, real), packed(exact, real))):
            for result, right in zip(ADVANTAGES[name](mixed), ADVANTAGES[name](same), strict=True):
                assert torch.equal(result, right)
    doubles = replace(exact, token_level_rewards=rewards.double())
    for result, right in zip(ADVANTAGES[name](doubles), ADVANTAGES[name](exact), strict=True):
        torch.testing.assert_close(result.float(), right, rtol=1e-4, atol=1e-5)


@given(case=responses())
def test_custom_estimators_get_padded_tensors(case):
    _, real, mask = case
    inputs, _ = inputs_of(real, mask)
    received: list[AdvantageInputs] = []

    def custom(given):
        received.append(given)
        return given.token_level_rewards * given.response_mask, given.values

    advantages, returns = AdvantageEstimator("custom", custom)(packed(inputs, real))
    assert torch.equal(advantages, (inputs.token_level_rewards * mask)[real])
    assert torch.equal(returns, inputs.values[real])
    for name in ("token_level_rewards", "response_mask", "values", "old_log_probs"):
        assert torch.equal(getattr(received[0], name), getattr(inputs, name) * real), name
    assert received[0].response_mask.dtype == torch.int64 and received[0].lengths is None


@given(case=responses())
def test_reductions(case):
    lengths, real, mask = case
    values = numbers(real, 1)
    for reduce in (sequence_sums, sequence_means):
        torch.testing.assert_close(reduce(values[real], mask[real], lengths), reduce(values, mask, None))
        half = values.bfloat16()
        torch.testing.assert_close(reduce(half[real], mask[real], lengths), reduce(half, mask, None))
    assert torch.equal(
        sequence_maxima(values[real], mask[real], lengths, 0.5), sequence_maxima(values, mask, None, 0.5)
    )
    assert sequence_counts(mask[real], lengths).tolist() == mask.sum(-1).tolist()
    assert have_tokens(mask[real], lengths).tolist() == mask.any(-1).tolist()


@given(case=responses())
def test_reward_shaping_and_kl(case):
    lengths, real, mask = case
    scores, last = numbers(real, 1), lengths - 1
    rows, amounts = have_tokens(mask, None), torch.linspace(-1, 1, len(real))
    cases = (
        (add_at_last(scores, amounts, rows, last), add_at_last(scores[real], amounts, rows, last, lengths)),
        (
            blend_quality(scores, amounts, rows, last, 0.3),
            blend_quality(scores[real], amounts, rows, last, 0.3, lengths),
        ),
        (on_trained_tokens(scores, mask), on_trained_tokens(scores[real], mask[real], lengths)),
    )
    for padded, tokens in cases:
        torch.testing.assert_close(tokens, padded[real])
    torch.testing.assert_close(sequence_quality(scores[real], mask[real], lengths), sequence_quality(scores, mask))
    kl = numbers(real, 3)
    rewards, means = apply_kl_penalty(scores, kl, mask, 0.5)
    packed_rewards, packed_means = apply_kl_penalty(scores[real], kl[real], mask[real], 0.5, lengths)
    torch.testing.assert_close(packed_rewards, rewards[real])
    torch.testing.assert_close(packed_means, means)


@given(case=responses())
def test_turns(case):
    lengths, real, mask = case
    ids = torch.arange(real.numel()).view_as(real) % 3
    padded, tokens = turn_numbers(mask), turn_numbers(mask[real], lengths)
    assert torch.equal(tokens, padded[real])
    groups = ["a"] * len(real)
    # Padding after the last turn would belong to its observation, which no later turn has.
    states = observations(ids[real], mask[real], tokens, lengths)
    assert states == observations(ids, mask, padded)
    anchors = anchor_groups(states, groups, None)
    counts = TurnCounts.of(Turns(tokens, anchors), mask[real], lengths)
    assert counts == TurnCounts.of(Turns(padded, anchors), mask)


@pytest.mark.parametrize("level", ["token", "sequence"])
@given(case=responses())
def test_rollout_correction(level, case):
    lengths, real, mask = case
    old, rollout, trained = numbers(real, 1), numbers(real, 2), mask
    compared = mask & (numbers(real, 3) > -0.5)
    ratios, packed_ratios = log_ratios(old, rollout, compared), log_ratios(old[real], rollout[real], compared[real])
    options = {"level": level, "truncation": Truncation(1.5), "mean": 0.7}
    weights, moments = importance_weights(ratios, compared, trained, **options)
    tokens, packed_moments = importance_weights(
        packed_ratios, compared[real], trained[real], **options, lengths=lengths
    )
    torch.testing.assert_close(tokens, weights[real])
    assert packed_moments.statistics() == pytest.approx(moments.statistics())
    rules = [Rejection(f"{scope}_k2", 0.2) for scope in ("token", "seq_sum", "seq_mean", "seq_max")]
    rejected, counts = rejected_tokens(ratios, compared, trained, rules)
    packed_rejected, packed_counts = rejected_tokens(packed_ratios, compared[real], trained[real], rules, lengths)
    assert torch.equal(packed_rejected, rejected[real]) and packed_counts == counts
    packed_moments = RatioMoments.of(old[real], rollout[real], compared[real], lengths)
    moments = RatioMoments.of(old, rollout, compared)
    assert packed_moments.off_policy_statistics() == pytest.approx(moments.off_policy_statistics())
