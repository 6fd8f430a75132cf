"""How much better each token was than expected: GAE with a critic, GRPO with groups of answers.

An estimator maps :class:`AdvantageInputs` to ``(advantages, returns)``, both ``[b, R]``, 0 outside the response mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.masked import masked_whiten
from megarl.algorithms.registry import Registry


@dataclass(frozen=True)
class AdvantageInputs:
    """What an advantage estimator may read.

    Attributes:
        token_level_rewards: ``[b, R]``, the reward of each response token.
        response_mask: ``[b, R]``, 1 where a token is trained on. A row without such a token is a sample that was taken
            out (its reward failed, say): it takes part in no statistic.
        values: ``[b, R]``, the critic's values; None without a critic.
        group_ids: ``[b]``, equal for the answers to one prompt; None where prompts do not matter.
        gamma: discount per token.
        lam: lambda of GAE.
        norm_by_std: whether GRPO divides by the standard deviation of a group.
    """

    token_level_rewards: Tensor
    response_mask: Tensor
    values: Tensor | None = None
    group_ids: np.ndarray | None = None
    gamma: float = 1.0
    lam: float = 1.0
    norm_by_std: bool = True


AdvantageFunction = Callable[[AdvantageInputs], tuple[Tensor, Tensor]]
ADVANTAGES: Registry[AdvantageFunction] = Registry("algorithm.adv_estimator")
register_advantage = ADVANTAGES.register


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation, before whitening (Schulman et al. 2015, arXiv:1506.02438, eq. 11 to 16).

    ``delta_t = r_t + gamma * V_{t+1} - V_t`` and ``A_t = delta_t + gamma * lam * A_{t+1}``, where ``t + 1`` is the next
    token of the mask and what follows the last one is 0. A token outside the mask (a tool's answer, say) is no time
    step: value and advantage pass over it, and a reward that sits on it belongs to the token of the mask before it.

    Args:
        rewards: ``[b, R]``.
        values: ``[b, R]``.
        mask: ``[b, R]``, 0 or 1.
        gamma: discount per token.
        lam: 0 = one-step errors, 1 = discounted sum of rewards minus the value.

    Returns:
        Advantages and returns ``A + V``, each ``[b, R]``, 0 outside the mask.
    """
    kept = mask.bool()
    zero = torch.zeros_like(rewards[:, 0])
    next_value, next_advantage, late_reward = zero, zero, zero
    advantages = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        here, value = kept[:, t], values[:, t]
        reward = rewards[:, t] + late_reward
        advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        advantages[:, t] = torch.where(here, advantage, zero)
        next_advantage = torch.where(here, advantage, next_advantage)
        next_value = torch.where(here, value, next_value)
        late_reward = torch.where(here, zero, reward)
    return advantages, torch.where(kept, advantages + values, torch.zeros_like(values))


@register_advantage("gae")
def gae(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """GAE (see :func:`generalized_advantages`), the advantages whitened over all trained tokens of the batch.

    Raises:
        ValueError: there are no values.
    """
    if inputs.values is None:
        raise ValueError("advantage estimator 'gae' needs `values`: it stands on a critic")
    advantages, returns = generalized_advantages(
        inputs.token_level_rewards, inputs.values, inputs.response_mask, inputs.gamma, inputs.lam
    )
    return masked_whiten(advantages, inputs.response_mask), returns


@register_advantage("grpo")
def grpo(inputs: AdvantageInputs, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Scores relative to the other answers to the prompt (Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

    With ``s`` the sum of a response's rewards, each of its tokens gets ``(s - mean) / (std + eps)`` over the group,
    with the sample standard deviation, or ``s - mean`` without ``norm_by_std`` (Liu et al. 2025, arXiv:2503.20783). A
    group of one has nothing to compare with: mean 0 and standard deviation 1 are taken.

    Raises:
        ValueError: there are no group ids.
    """
    if inputs.group_ids is None:
        raise ValueError("advantage estimator 'grpo' needs `group_ids`: which answers belong to one prompt")
    mask = inputs.response_mask.bool()
    counted = mask.any(-1)
    _, groups = np.unique(inputs.group_ids.astype(str), return_inverse=True)
    group = torch.from_numpy(groups.reshape(-1)).to(mask.device)
    scores = torch.where(counted, inputs.token_level_rewards.double().sum(-1), 0.0)

    def per_group(numbers: Tensor) -> Tensor:
        """The sum over each row's group, ``[b]``."""
        total = torch.zeros(int(group.max()) + 1, dtype=numbers.dtype, device=numbers.device)
        return total.index_add(0, group, numbers)[group]

    size = per_group(counted.double())
    mean = torch.where(size > 1, per_group(scores) / size.clamp(min=1), 0.0)
    relative = torch.where(counted, scores - mean, 0.0)
    if inputs.norm_by_std:
        variance = per_group(relative**2) / (size - 1).clamp(min=1)
        relative = relative / (torch.where(size > 1, variance.sqrt(), 1.0) + eps)
    advantages = torch.where(mask, relative[:, None], 0.0).to(inputs.token_level_rewards.dtype)
    return advantages, advantages
