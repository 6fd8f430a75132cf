"""Length rewards: DAPO's soft overlong punishment and Kimi k1.5's length reward. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.base.errors import RewardError
from megarl.rewards.outcome import Outcome


@dataclass(frozen=True)
class OverlongPenalty:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, equation 13), scaled.

    Attributes:
        max_resp_len: longest response in tokens, ``L_max``.
        length: tokens of the buffer before it, ``L_cache``, over which the penalty grows.
        penalty_factor: penalty at ``max_resp_len``, as a positive number.
    """

    max_resp_len: int
    length: int
    penalty_factor: float = 1.0
    log: bool = False

    def reward(self, tokens: int) -> float:
        """Return the reward for a response length: from 0 down to ``-penalty_factor``."""
        excess = tokens - (self.max_resp_len - self.length)
        return -min(max(excess / self.length, 0.0), 1.0) * self.penalty_factor if excess > 0 else 0.0


@dataclass(frozen=True)
class LengthShaping:
    """Length rewards added to the score.

    Attributes:
        overlong: DAPO's overlong penalty; None = no penalty.
        length_weight: weight of Kimi k1.5's length reward; 0 = none. A response counts as right if its function
            returned a true ``acc``, or without ``acc`` a score above 0.
    """

    overlong: OverlongPenalty | None = None
    length_weight: float = 0.0

    def apply(
        self, outcomes: Sequence[Outcome], lengths: Sequence[int], groups: Sequence[Hashable] | None
    ) -> list[Outcome]:
        """Add the length rewards to the outcomes with a score.

        Args:
            groups: prompt of each row (column ``uid``); only read if ``length_weight`` is not 0.

        Raises:
            RewardError: the length reward is on, and ``groups`` is None.
        """
        shaped = list(outcomes)
        if self.length_weight:
            if groups is None:
                text = "reward.reward_kwargs.length_reward_weight needs the column 'uid' of the batch"
                raise RewardError(text, code="reward.no-uid")
            rows = [row for row, outcome in enumerate(shaped) if outcome.failure is None]
            right = [bool(shaped[row].extras.get("acc", shaped[row].score > 0)) for row in rows]
            rewards = length_rewards([lengths[row] for row in rows], right, [groups[row] for row in rows])
            for row, reward in zip(rows, rewards, strict=True):
                shaped[row] = _add(shaped[row], self.length_weight * reward, {"length_reward": reward})
        if self.overlong is not None:
            for row, outcome in enumerate(shaped):
                reward = self.overlong.reward(lengths[row])
                fields = {"overlong_reward": reward, "overlong": reward < 0} if self.overlong.log else {}
                shaped[row] = _add(outcome, reward, fields)
        return shaped


def _add(outcome: Outcome, reward: float, fields: Mapping[str, Any]) -> Outcome:
    if outcome.failure is not None:
        return outcome
    return outcome._replace(score=outcome.score + reward, extras={**outcome.extras, **fields})


def length_rewards(lengths: Sequence[int], right: Sequence[bool], groups: Sequence[Hashable]) -> list[float]:
    """Compute Kimi k1.5's length reward (arXiv:2501.12599, section 2.3.3).

    Within a group, ``lambda = 0.5 - (length - shortest) / (longest - shortest)``. A right response gets lambda, a wrong
    one at most 0. If all lengths of a group are equal, the reward is 0.
    """
    members = defaultdict[Hashable, list[int]](list)
    for length, group in zip(lengths, groups, strict=True):
        members[group].append(length)
    rewards = []
    for length, is_right, group in zip(lengths, right, groups, strict=True):
        shortest, longest = min(members[group]), max(members[group])
        share = 0.5 - (length - shortest) / (longest - shortest) if longest > shortest else 0.0
        rewards.append(share if is_right else min(0.0, share))
    return rewards
