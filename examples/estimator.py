"""A custom advantage estimator: score minus the median score of the group.

megarl train --config-name quickstart_grpo algorithm.adv_estimator=examples/estimator.py:median_baseline
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms import AdvantageInputs


def median_baseline(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Compute ``A_i = s_i - median_j s_j`` within each group, equal for all tokens of a response.

    An outlier changes a median less than a mean. The score of a response is the sum of its token rewards. A response
    without a trained token, for example after a failed reward, is excluded from the median.

    Args:
        inputs: rewards and mask ``[b, R]``, and group ids ``[b]``.

    Returns:
        Advantages and returns, both ``[b, R]``, zero outside the response mask.
    """
    assert inputs.group_ids is not None, "training always has group ids"
    scores, counted = inputs.token_level_rewards.sum(-1), inputs.response_mask.any(-1)
    advantages = torch.zeros_like(scores)
    for name in np.unique(inputs.group_ids):
        members = torch.from_numpy(inputs.group_ids == name) & counted
        if members.any():
            advantages[members] = scores[members] - scores[members].quantile(0.5)
    spread = advantages[:, None] * inputs.response_mask
    return spread, spread
