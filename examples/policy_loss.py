"""A custom policy loss: Simple Policy Optimization, with a gradient outside of PPO's clip range.

megarl train --config-name quickstart_grpo \
  actor_rollout_ref.actor.policy_loss.loss_mode=examples/policy_loss.py:simple_policy_optimization
"""

from __future__ import annotations

from megarl.algorithms import PolicyLossInputs, TokenLoss


def simple_policy_optimization(inputs: PolicyLossInputs) -> TokenLoss:
    """Compute the loss ``-(r A - |A| (r - 1)^2 / (2 eps))`` per token, with ``eps = clip_ratio_high``.

    Source: Xie et al. 2024, arXiv:2401.16025. The optimum of each token is at ``r = 1 + eps sign(A)``. Beyond it the
    gradient points back, while PPO's is zero.

    Args:
        inputs: log-probs, advantages and mask per token, of equal shape.

    Returns:
        The loss per token, and ``beyond``: 1 for tokens beyond their optimum, reported as ``actor/beyond``.
    """
    ratio, advantages, eps = inputs.log_ratio.exp(), inputs.advantages, inputs.options.clip_ratio_high
    loss = advantages.abs() * (ratio - 1) ** 2 / (2 * eps) - ratio * advantages
    return TokenLoss(loss, {"beyond": ((ratio.detach() - 1) * advantages.sign() > eps).float()})
