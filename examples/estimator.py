"""An advantage estimator of one's own: how much better an answer is than the median of the answers to its prompt.

python -m megarl.train --config-name quickstart_grpo algorithm.adv_estimator=examples/estimator.py:median_baseline
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms import AdvantageInputs


def median_baseline(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """``A_i = s_i - median_j s_j`` over the answers to one prompt, the same at each of an answer's tokens.

    An outlier moves a median less than a mean. The score of an answer is the sum of its tokens' rewards. An answer
    without a trained token, as one whose reward failed, counts for nobody.

    Args:
        inputs: rewards and mask ``[b, R]`` and the prompts' names ``[b]``.

    Returns:
        Advantages and returns, both ``[b, R]``, zero where nothing is trained.
    """
    assert inputs.group_ids is not None, "training always tells which answers belong to one prompt"
    scores, counted = inputs.token_level_rewards.sum(-1), inputs.response_mask.any(-1)
    advantages = torch.zeros_like(scores)
    for name in np.unique(inputs.group_ids):
        members = torch.from_numpy(inputs.group_ids == name) & counted
        if members.any():
            advantages[members] = scores[members] - scores[members].quantile(0.5)
    spread = advantages[:, None] * inputs.response_mask
    return spread, spread
