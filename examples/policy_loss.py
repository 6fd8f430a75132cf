"""A policy loss of one's own: Simple Policy Optimization, which pulls the ratio back where PPO stops looking at it.

python -m megarl.train --config-name quickstart_grpo \
  actor_rollout_ref.actor.policy_loss.loss_mode=examples/policy_loss.py:simple_policy_optimization
"""

from __future__ import annotations

from megarl.algorithms import PolicyLossInputs, TokenLoss


def simple_policy_optimization(inputs: PolicyLossInputs) -> TokenLoss:
    """``-(r A - |A| (r - 1)^2 / (2 eps))`` (Xie et al. 2024, arXiv:2401.16025), with ``eps = clip_ratio_high``.

    Its optimum for each token is at ``r = 1 + eps sign(A)``; beyond it the gradient leads back, where PPO's is zero.

    Args:
        inputs: log-probs, advantages and mask of tokens, all of one shape.

    Returns:
        The loss of each token; ``beyond`` tells which are past their optimum, and becomes ``actor/beyond``.
    """
    ratio, advantages, eps = inputs.log_ratio.exp(), inputs.advantages, inputs.options.clip_ratio_high
    loss = advantages.abs() * (ratio - 1) ** 2 / (2 * eps) - ratio * advantages
    return TokenLoss(loss, {"beyond": ((ratio.detach() - 1) * advantages.sign() > eps).float()})
