"""Length rewards against the papers' formulas."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards.shaping import OverlongPenalty, length_rewards


def dapo(length, longest, cache):
    """Equation 13 of arXiv:2503.14476."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


@given(st.integers(1, 200), st.integers(1, 100), st.integers(0, 300), st.floats(0, 3))
def test_overlong_penalty_is_dapos_equation(extra, cache, length, factor):
    longest = extra + cache
    overlong = OverlongPenalty(longest, cache, factor)
    assert overlong.reward(length) == pytest.approx(factor * dapo(length, longest, cache), abs=1e-12)


def kimi(lengths, right):
    """Section 2.3.3 of arXiv:2501.12599 for one prompt."""
    lengths = np.array(lengths, dtype=float)
    if lengths.max() == lengths.min():
        return np.zeros(len(lengths))
    share = 0.5 - (lengths - lengths.min()) / (lengths.max() - lengths.min())
    return np.where(right, share, np.minimum(0, share))


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 50), st.booleans()), min_size=1, max_size=12))
def test_length_rewards_are_kimis_per_group(rows):
    groups, lengths, right = zip(*rows, strict=True)
    rewards = length_rewards(lengths, right, groups)
    for group in set(groups):
        members = [at for at, name in enumerate(groups) if name == group]
        expected = kimi([lengths[at] for at in members], [right[at] for at in members])
        assert [rewards[at] for at in members] == pytest.approx(expected.tolist())
