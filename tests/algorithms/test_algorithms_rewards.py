import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms import missing_eos, on_trained_tokens, whiten_rewards


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
def test_whitening_scales_about_the_mean(case):
    """TRL's masked_whiten with shift_mean=False: sample variance over the mask, the mean put back."""
    rewards, mask = case
    white = whiten_rewards(torch.tensor(rewards), torch.tensor(mask)).numpy()
    moved = moved_by_hand(rewards, mask)
    own = moved[mask]
    if len(own) > 1:
        expected = (own - own.mean()) / np.sqrt(own.var(ddof=1) + 1e-8) + own.mean()
        np.testing.assert_allclose(white[mask], expected, atol=1e-9)
    assert not white[~mask].any()


def test_answers_that_do_not_end():
    responses = torch.tensor([[5, 7, 0, 0], [5, 6, 7, 8], [9, 0, 0, 0], [7, 5, 0, 0]])
    last = torch.tensor([1, 3, 0, 1])
    assert missing_eos(responses, last, {7, 9}).tolist() == [False, True, False, True]
