"""The proximal policy without a forward pass: log-linear interpolation between behaviour and current policy.

Stale tokens have three policies: the behaviour policy sampled them, the proximal policy is that of the last weight
sync, and the current policy is trained (Fu et al. 2025, arXiv:2505.24298, section 5.2). Decoupled PPO clips the ratio
about the proximal policy and weighs it by ``p_proximal / p_behaviour``. AReaL's ``prox_logp_method=loglinear``
estimates the proximal log-probs from the other two and the versions of the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.policy_loss import LOG_RATIO_LIMIT
from megarl.algorithms.rollout_correction import Truncation, truncated


def proximal_fractions(versions: Tensor, proximal_version: int) -> Tensor:
    """Place the proximal policy between behaviour (0) and current policy (1), by versions, for each token.

    ``(v_proximal - v_behaviour) / (v_current - v_behaviour)`` with ``v_current = v_proximal + 1``: the update in
    progress creates the next version.

    Args:
        versions: version of the weights that sampled each token, any shape; negative = none, such as tool results.
        proximal_version: version of the last weight sync.

    Returns:
        float32, in the shape of ``versions``; 0 for tokens of the last version or of none.
    """
    behind = (proximal_version - versions).clamp(min=0).float()
    return torch.where(versions >= 0, behind / (behind + 1), 0.0)


def loglinear_log_probs(log_prob: Tensor, behaviour: Tensor, fractions: Tensor) -> Tensor:
    """Estimate the proximal log-probs, ``behaviour + fraction (log_prob - behaviour)``, without gradients.

    Args:
        log_prob: log-probs under the current policy, any shape.
        behaviour: log-probs under the policy that sampled the tokens, same shape.
        fractions: see :func:`proximal_fractions`.
    """
    return behaviour + fractions * (log_prob.detach() - behaviour)


def proximal_weights(proximal: Tensor, behaviour: Tensor, bounds: Truncation) -> Tensor:
    """Compute the importance weight ``p_proximal / p_behaviour`` of each token, within bounds; any shape."""
    return truncated((proximal - behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), bounds)
