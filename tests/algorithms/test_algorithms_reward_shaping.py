"""Reward shaping against loops over tokens in numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms import (
    add_at_last,
    blend_quality,
    on_trained_tokens,
    row_cosine_similarity,
    sequence_quality,
    whiten_rewards,
)


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 7))
def test_quality_is_the_geometric_mean_of_probabilities(seed, rows, width):
    random = np.random.default_rng(seed)
    probabilities, mask = random.uniform(1e-6, 1, (rows, width)), random.integers(0, 2, (rows, width))
    log_probs = np.where(mask, np.log(probabilities), np.nan)  # what is masked is not read
    quality = sequence_quality(torch.tensor(log_probs), torch.tensor(mask))
    for row in range(rows):
        chosen = [p for p, kept in zip(probabilities[row], mask[row], strict=True) if kept]
        expected = np.prod(chosen) ** (1 / len(chosen)) if chosen else 1
        assert quality[row].item() == pytest.approx(expected, rel=1e-9)
        assert 0 < quality[row] <= 1


def test_length_alone_does_not_change_quality():
    log_probs, mask = torch.full((2, 6), -0.7), torch.tensor([[1] * 6, [1] * 2 + [0] * 4])
    assert sequence_quality(log_probs, mask).tolist() == pytest.approx([np.exp(-0.7)] * 2, rel=1e-6)


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 7), st.floats(0, 1), st.booleans())
def test_blended_quality_is_added_at_the_last_token(seed, rows, width, weight, per_token):
    random = np.random.default_rng(seed)
    last, chosen = random.integers(0, width, rows), random.integers(0, 2, rows).astype(bool)
    scores = np.zeros((rows, width), dtype=np.float32)
    for row in range(rows):
        scores[row, last[row]] = random.normal()
        if per_token:
            scores[row, : last[row]] = random.normal(size=last[row])
    quality = random.uniform(0, 1, rows)
    blended = blend_quality(
        torch.tensor(scores), torch.tensor(quality), torch.tensor(chosen), torch.tensor(last), weight
    )
    assert blended.dtype is torch.float32
    for row in range(rows):
        ours, wide = blended[row].double().numpy(), scores[row].astype(np.float64)
        if not chosen[row]:
            assert (ours == wide).all()
            continue
        assert ours.sum() == pytest.approx((1 - weight) * wide.sum() + weight * quality[row], abs=1e-6)
        assert ours[: last[row]] == pytest.approx((1 - weight) * wide[: last[row]], abs=1e-6)
        assert not ours[last[row] + 1 :].any()


def test_amounts_are_added_at_the_last_token_of_selected_rows():
    rewards = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    result = add_at_last(
        rewards, torch.tensor([0.5, -1.0, 9.0]), torch.tensor([True, True, False]), torch.tensor([2, 0, -1])
    )
    assert result.tolist() == [[1, 2, 3.5], [3, 5, 6], [7, 8, 9]]
    assert rewards[0, 2] == 3, "the scores stay what they were"


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 9))
def test_cosine_similarity_of_rows(seed, rows, width):
    random = np.random.default_rng(seed)
    left, right = random.normal(size=(2, rows, width)).astype(np.float32)
    right[0] = 0
    ours = row_cosine_similarity(torch.tensor(left), torch.tensor(right))
    for row in range(rows):
        product = sum(float(a) * float(b) for a, b in zip(left[row], right[row], strict=True))
        lengths = np.sqrt(sum(float(a) ** 2 for a in left[row]) * sum(float(b) ** 2 for b in right[row]))
        assert ours[row].item() == pytest.approx(product / lengths if lengths else 0, abs=1e-9)


@st.composite
def rows(draw):
    count, width = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    return generator.normal(size=(count, width)), generator.random((count, width)) < draw(st.sampled_from([0.4, 1.0]))


def moved_by_hand(rewards, mask):
    moved = np.zeros_like(rewards)
    for row, kept in enumerate(mask):
        own = np.flatnonzero(kept)
        for t, reward in enumerate(rewards[row]):
            if len(own):
                moved[row, max((place for place in own if place <= t), default=own[0])] += reward
    return moved


@settings(max_examples=60)
@given(rows())
def test_rewards_move_onto_the_mask(case):
    rewards, mask = case
    moved = on_trained_tokens(torch.tensor(rewards), torch.tensor(mask))
    np.testing.assert_allclose(moved, moved_by_hand(rewards, mask), atol=1e-12)


@settings(max_examples=60)
@given(rows())
def test_whitening_keeps_the_mean(case):
    """TRL's masked_whiten with shift_mean=False: sample variance over the mask, the mean put back."""
    rewards, mask = case
    moved = moved_by_hand(rewards, mask)
    white = whiten_rewards(torch.tensor(moved), torch.tensor(mask)).numpy()
    own = moved[mask]
    if len(own) > 1:
        expected = (own - own.mean()) / np.sqrt(own.var(ddof=1) + 1e-8) + own.mean()
        np.testing.assert_allclose(white[mask], expected, atol=1e-9)
    assert not white[~mask].any()
