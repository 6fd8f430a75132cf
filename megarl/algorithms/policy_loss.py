"""Losses of the policy, one number per token; :mod:`megarl.algorithms.aggregation` makes one number of them.

All functions work on rectangles ``[b, R]`` and on packed tokens ``[n]`` alike: nothing is summed here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.registry import Registry

LOG_RATIO_LIMIT = 20.0
"""The log of a probability ratio is cut at this size, so that its exponential stays finite."""


@dataclass(frozen=True)
class PolicyLossInputs:
    """What a policy loss may read; the tensors have one shape.

    Attributes:
        log_prob: log-probs of the tokens under the policy that learns; gradients flow into it.
        old_log_prob: the same before this step's updates.
        advantages: advantage of each token.
        clip_ratio_low: how far below 1 the probability ratio counts.
        clip_ratio_high: how far above 1 it counts.
        clip_ratio_c: dual clip, the largest ratio that counts where the advantage is negative.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0


@dataclass(frozen=True)
class TokenLoss:
    """A loss per token, and what is worth knowing about it.

    Attributes:
        loss: loss of each token, with gradients.
        diagnostics: metric name (without its prefix) to a number per token, without gradients; the metric is the mean
            over the trained tokens.
    """

    loss: Tensor
    diagnostics: dict[str, Tensor]


PolicyLossFunction = Callable[[PolicyLossInputs], TokenLoss]
POLICY_LOSSES: Registry[PolicyLossFunction] = Registry("actor_rollout_ref.actor.policy_loss.loss_mode")
register_policy_loss = POLICY_LOSSES.register


@register_policy_loss("vanilla")
def clipped_policy_loss(inputs: PolicyLossInputs) -> TokenLoss:
    """PPO's clipped loss with dual clip.

    With ``r = exp(log_prob - old_log_prob)`` and advantage ``A``: ``L = max(-A r, -A clip(r, 1 - low, 1 + high))``
    (Schulman et al. 2017, arXiv:1707.06347, eq. 7; a ``high`` of its own: Yu et al. 2025, arXiv:2503.14476), and where
    ``A < 0``: ``min(L, -A c)`` (Ye et al. 2020, arXiv:1912.09729).

    Returns:
        The loss, with diagnostics ``ppo_kl`` (``old_log_prob - log_prob``), ``pg_clipfrac`` (1 where the clip took the
        gradient away) and ``pg_clipfrac_lower`` (1 where the dual clip did).
    """
    log_ratio = (inputs.log_prob - inputs.old_log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio, advantages = log_ratio.exp(), inputs.advantages
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - inputs.clip_ratio_low, 1 + inputs.clip_ratio_high)
    pessimistic = torch.maximum(plain, clipped)
    bound = -advantages * inputs.clip_ratio_c
    bad = advantages < 0
    return TokenLoss(
        loss=torch.where(bad, torch.minimum(pessimistic, bound), pessimistic),
        diagnostics={
            "ppo_kl": -log_ratio.detach(),
            "pg_clipfrac": (clipped > plain).to(plain.dtype),
            "pg_clipfrac_lower": (bad & (pessimistic > bound)).to(plain.dtype),
        },
    )


def entropy_loss(entropy: Tensor, entropy_coeff: float) -> Tensor:
    """Entropy bonus as a loss per token: ``-entropy_coeff * H`` (Schulman et al. 2017, eq. 9); any shape."""
    return -entropy_coeff * entropy
