"""Covariance losses (Clip-Cov, KL-Cov): policy losses that restrain the few tokens that reduce the entropy.

The effect of a token on the entropy follows ``cov = (A - mean A) (log p - mean log p)``, with means over all trained
tokens of the mini-batch (Cui et al. 2025, arXiv:2505.22617). Tokens are chosen on the whole mini-batch, so the choice
does not depend on the micro-batch split. Random choices use a key per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.masked import masked_mean
from megarl.algorithms.policy_loss import (
    LOG_RATIO_LIMIT,
    PolicyLossInputs,
    PolicyLossOptions,
    TokenLoss,
    WholeMiniBatch,
    register_policy_loss,
)


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
    log_ratio, options = inputs.log_ratio, inputs.options
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - options.clip_ratio_low, 1 + options.clip_ratio_high)
    pessimistic = torch.maximum(-inputs.advantages * ratio, -inputs.advantages * clipped_ratio)
    chosen = inputs.chosen.bool()
    return TokenLoss(
        loss=torch.where(chosen, torch.zeros_like(pessimistic), pessimistic),
        diagnostics={"ppo_kl": -log_ratio.detach(), "pg_clipfrac": chosen.to(ratio.dtype)},
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
