"""Policy losses with another trust region than PPO's clip: Clip-Cov, KL-Cov, DPPO, M2PO, TOPR.

Clip-Cov and KL-Cov restrain the few tokens that reduce the entropy. The effect of a token on the entropy follows
``cov = (A - mean A) (log p - mean log p)``, with means over all trained tokens of the mini-batch (Cui et al. 2025,
arXiv:2505.22617). DPPO, M2PO and TOPR stay useful many weight versions off-policy. Their ratio ``r`` compares with the
policy of ``old_log_prob``. In bypass mode that is the policy that sampled the tokens, and these losses need no further
correction.

Losses that choose tokens do so on the whole mini-batch, so the choice does not depend on the micro-batch split. Random
choices use a key per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.masked import expand_to_tokens, masked_mean, sequence_sums
from megarl.algorithms.policy_loss import (
    LOG_RATIO_LIMIT,
    PolicyLossInputs,
    PolicyLossOptions,
    TokenLoss,
    WholeMiniBatch,
    clipped_terms,
    register_policy_loss,
)

KL_EPS = 1e-8
"""Keeps the binary KL finite at probabilities of 1."""


def token_keys(samples: Sequence[tuple[Tensor, Tensor]], seed: int, step: int) -> Tensor:
    """Draw a random integer for each response token, packed; a function of seed, step, sample and position.

    A sample is identified by its tokens. Two equal samples have equal keys; either of them may be chosen.

    Args:
        samples: prompt and response token ids of each sample, 1-D.
        step: optimizer steps taken; other steps choose other tokens.

    Returns:
        int64, ``[response tokens of all samples]``, not negative and below 2^52, exact as a double.
    """
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(_sample_keys(*sample, seed, step) for sample in samples)])


def _sample_keys(prompt: Tensor, response: Tensor, seed: int, step: int) -> Tensor:
    content = np.concatenate([np.array([seed, step, len(prompt)]), prompt.cpu().numpy(), response.cpu().numpy()])
    digest = blake2b(content.astype("<i8").tobytes(), digest_size=8).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    return torch.from_numpy(generator.integers(0, 2**52, len(response), dtype=np.int64))


def covariances(whole: WholeMiniBatch) -> Tensor:
    """Compute the covariance ``cov`` of each token, ``[n]`` in double precision; valid for trained tokens only."""
    mask, advantages, log_prob = whole.response_mask, whole.advantages.double(), whole.log_prob.double()
    return (advantages - masked_mean(advantages, mask)) * (log_prob - masked_mean(log_prob, mask))


def _first(eligible: Tensor, sort_keys: tuple[Tensor, ...], count: int) -> Tensor:
    """Select the first ``count`` eligible tokens sorted by ``sort_keys``, the most significant key last."""
    positions = eligible.nonzero()[:, 0]
    for key in sort_keys:
        positions = positions[key[positions].argsort(stable=True)]
    chosen = torch.zeros_like(eligible)
    chosen[positions[:count]] = True
    return chosen


def _token_budget(whole: WholeMiniBatch, ratio: float) -> int:
    """Number of tokens that make up ``ratio`` of the trained tokens, rounded down, at least 1."""
    return max(int(ratio * int(whole.response_mask.bool().sum())), 1)


def _choose_clipped(whole: WholeMiniBatch, options: PolicyLossOptions) -> Tensor:
    """Choose a random ``clip_cov_ratio`` of the tokens, among unclipped tokens with a covariance within bounds."""
    cov = covariances(whole)
    log_ratio = (whole.log_prob - whole.old_log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - options.clip_ratio_low, 1 + options.clip_ratio_high)
    clipped = -whole.advantages * clipped_ratio > -whole.advantages * ratio
    inside = (cov > options.clip_cov_lb) & (cov < options.clip_cov_ub)
    eligible = whole.response_mask.bool() & ~clipped & inside
    return _first(eligible, (whole.keys,), _token_budget(whole, options.clip_cov_ratio))


def _choose_penalised(whole: WholeMiniBatch, options: PolicyLossOptions) -> Tensor:
    """Choose the ``kl_cov_ratio`` of the tokens with the largest covariances; keys break ties."""
    sort_keys = (whole.keys, -covariances(whole))
    return _first(whole.response_mask.bool(), sort_keys, _token_budget(whole, options.kl_cov_ratio))


@register_policy_loss("clip_cov", choose=_choose_clipped)
def clip_cov(inputs: PolicyLossInputs) -> TokenLoss:
    """Clip-Cov (Cui et al. 2025, arXiv:2505.22617): PPO's clip, and no gradient for chosen tokens.

    Returns:
        The loss, with diagnostics ``ppo_kl`` and ``pg_clipfrac``, the share of chosen tokens.
    """
    assert inputs.chosen is not None
    log_ratio, chosen = inputs.log_ratio, inputs.chosen.bool()
    pessimistic = torch.maximum(*clipped_terms(log_ratio.exp(), inputs))
    return TokenLoss(
        loss=torch.where(chosen, torch.zeros_like(pessimistic), pessimistic),
        diagnostics={"ppo_kl": -log_ratio.detach(), "pg_clipfrac": chosen.to(log_ratio.dtype)},
    )


@register_policy_loss("kl_cov", choose=_choose_penalised)
def kl_cov(inputs: PolicyLossInputs) -> TokenLoss:
    """KL-Cov (Cui et al. 2025, arXiv:2505.22617): an unclipped loss with a KL penalty on chosen tokens.

    ``L = -A r``, plus ``ppo_kl_coef |log r|`` for chosen tokens.

    Returns:
        The loss, with diagnostics ``ppo_kl`` and ``kl_cov_frac``, the share of chosen tokens.
    """
    assert inputs.chosen is not None
    log_ratio = inputs.log_ratio
    plain = -inputs.advantages * log_ratio.exp()
    chosen = inputs.chosen.bool()
    penalised = plain + inputs.options.ppo_kl_coef * log_ratio.abs()
    return TokenLoss(
        loss=torch.where(chosen, penalised, plain),
        diagnostics={"ppo_kl": -log_ratio.detach(), "kl_cov_frac": chosen.to(plain.dtype)},
    )


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
