"""Policy losses for stale data (DPPO, M2PO, TOPR): trust regions that stay useful many weight versions off-policy.

The ratio ``r`` compares with the policy of ``old_log_prob``. In bypass mode that is the policy that sampled the tokens,
and these losses need no further correction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.masked import expand_to_tokens, sequence_sums
from megarl.algorithms.policy_loss import (
    LOG_RATIO_LIMIT,
    PolicyLossInputs,
    PolicyLossOptions,
    TokenLoss,
    WholeMiniBatch,
    register_policy_loss,
)

KL_EPS = 1e-8
"""Keeps the binary KL finite at probabilities of 1."""


def _divergence_loss(inputs: PolicyLossInputs, divergence: Tensor) -> TokenLoss:
    """``-A sg[min(r, c)] log p``; 0 where the policy has moved too far in the direction of the advantage.

    Args:
        divergence: of the current policy from the old one at each token, not negative.
    """
    log_prob, old, options = inputs.log_prob.detach(), inputs.old_log_prob, inputs.options
    ratio = inputs.log_ratio.detach().exp()
    too_high = (inputs.advantages > 0) & (log_prob > old) & (divergence > options.clip_ratio_high)
    too_low = (inputs.advantages <= 0) & (log_prob < old) & (divergence > options.clip_ratio_low)
    outside = too_high | too_low
    loss = -inputs.advantages * ratio.clamp(max=options.clip_ratio_c) * inputs.log_prob
    return TokenLoss(
        loss=torch.where(outside, torch.zeros_like(loss), loss),
        diagnostics={
            "ppo_kl": -inputs.log_ratio.detach(),
            "pg_clipfrac": outside.to(ratio.dtype),
            "pg_clipfrac_lower": (~outside & (ratio > options.clip_ratio_c)).to(ratio.dtype),
        },
    )


@register_policy_loss("dppo_tv")
def dppo_tv(inputs: PolicyLossInputs) -> TokenLoss:
    """DPPO (Qi et al. 2026, arXiv:2602.04879) with the binary total variation ``abs(p - p_old)`` as trust region.

    ``L = -A sg[min(r, c)] log p`` for tokens inside. A token is outside, without gradient, if ``p - p_old`` exceeds
    ``high`` for ``A > 0``, or ``p_old - p`` exceeds ``low`` otherwise. verl's scripts set both to 0.15.

    Returns:
        The loss, with diagnostics ``ppo_kl``, ``pg_clipfrac`` (tokens outside) and ``pg_clipfrac_lower`` (tokens inside
        whose ratio is truncated at ``c``).
    """
    return _divergence_loss(inputs, (inputs.log_prob.detach().exp() - inputs.old_log_prob.exp()).abs())


@register_policy_loss("dppo_kl")
def dppo_kl(inputs: PolicyLossInputs) -> TokenLoss:
    """DPPO (Qi et al. 2026, arXiv:2602.04879) with a binary KL as trust region: the token against all others.

    As :func:`dppo_tv`, with ``KL = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))``. verl's scripts set
    both bounds to 0.05.
    """
    log_prob, old = inputs.log_prob.detach(), inputs.old_log_prob
    prob, old_prob = log_prob.exp(), old.exp()
    others = (1 - old_prob) * ((1 - old_prob + KL_EPS) / (1 - prob + KL_EPS)).log()
    return _divergence_loss(inputs, old_prob * (old - log_prob) + others)


@register_policy_loss("topr")
def topr(inputs: PolicyLossInputs) -> TokenLoss:
    """TOPR (Le Roux et al. 2025, arXiv:2503.14286): REINFORCE whose negative samples taper off as they get unlikely.

    ``L = -A log p`` for ``A >= 0``, and ``L = -A sg[min(prod_t r_t, 1)] log p`` for ``A < 0``, with the product over
    the trained tokens of the sequence. Positive samples have no ratio, so their gradient never vanishes.

    Returns:
        The loss, with diagnostics ``ppo_kl`` and ``pg_clipfrac``: negative tokens whose ratio is truncated at 1.
    """
    log_ratio = inputs.log_ratio.detach()
    whole = expand_to_tokens(
        sequence_sums(log_ratio, inputs.response_mask, inputs.lengths), log_ratio, inputs.lengths
    ).to(log_ratio.dtype)
    negative = inputs.advantages < 0
    taper = torch.where(negative, whole.clamp(max=0).exp(), torch.ones_like(whole))
    return TokenLoss(
        loss=-inputs.advantages * taper * inputs.log_prob,
        diagnostics={"ppo_kl": -log_ratio, "pg_clipfrac": (negative & (whole > 0)).to(log_ratio.dtype)},
    )


def _choose_outliers(whole: WholeMiniBatch, options: PolicyLossOptions) -> Tensor:
    """Choose the fewest tokens without which the mean of ``(log r)^2`` is at most ``m2_threshold``.

    Only tokens that PPO's clip could stop count: ``r > 1`` with ``A > 0``, and ``r < 1`` with ``A < 0``. Keys break
    ties.
    """
    log_ratio = (whole.log_prob.double() - whole.old_log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    stoppable = whole.response_mask.bool() & (log_ratio * whole.advantages > 0)
    positions = stoppable.nonzero()[:, 0]
    for key in (whole.keys, log_ratio**2):
        positions = positions[key[positions].argsort(stable=True)]
    means = (log_ratio[positions] ** 2).cumsum(0) / torch.arange(1, len(positions) + 1, device=positions.device)
    chosen = torch.zeros_like(stoppable)
    chosen[positions[means > options.m2_threshold]] = True  # the means of ascending numbers ascend
    return chosen


@register_policy_loss("m2po", choose=_choose_outliers)
def m2po(inputs: PolicyLossInputs) -> TokenLoss:
    """M2PO (Zheng et al. 2025, arXiv:2510.01161): mask outliers until the second moment of ``log r`` is bounded.

    ``L = -A r``, and no gradient for chosen tokens: the largest ``(log r)^2`` of the mini-batch, as many as it takes
    to bring the mean over the rest to ``m2_threshold``. As in the authors' code, only tokens count that PPO's clip
    could stop (``r > 1`` with ``A > 0``, ``r < 1`` with ``A < 0``).

    Returns:
        The loss, with diagnostics ``ppo_kl`` and ``pg_clipfrac``, the share of chosen tokens.
    """
    assert inputs.chosen is not None
    log_ratio, chosen = inputs.log_ratio, inputs.chosen.bool()
    plain = -inputs.advantages * log_ratio.exp()
    return TokenLoss(
        loss=torch.where(chosen, torch.zeros_like(plain), plain),
        diagnostics={"ppo_kl": -log_ratio.detach(), "pg_clipfrac": chosen.to(plain.dtype)},
    )
