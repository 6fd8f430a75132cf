"""The engine that sampled and the policy that learns are not quite the same: how far apart, and what to do about it.

With ``r = p_old / p_rollout`` of a token, where ``p_old`` is what the actor computes and ``p_rollout`` what the engine
sampled with, a loss is corrected by weights (importance sampling, truncated at a bound) or by leaving tokens or whole
sequences out (rejection); ``docs/rollout_correction.md`` has the formulas and their sources. All functions work on
rectangles ``[b, R]`` on the driver, over the whole batch, in double precision and without gradients.

Masks: ``trained`` are the tokens that are learned from, ``compared`` those among them that the engine sampled. What a
tool wrote may be trained on, yet the engine has no log-prob of it: it takes no part in a ratio, and its own weight in a
token-level correction is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.masked import masked_mean, masked_sum
from megarl.algorithms.policy_loss import LOG_RATIO_LIMIT

Statistics = dict[str, float]


class Truncation(NamedTuple):
    """What becomes of importance weights outside their bounds.

    Attributes:
        upper: a larger weight counts as this one.
        lower: where there is one, weights below it and above ``upper`` count 0 instead.
    """

    upper: float
    lower: float | None = None


class Rejection(NamedTuple):
    """A rule by which tokens or sequences are left out.

    Attributes:
        option: one of :data:`REJECTIONS`.
        upper: bound from above: of the ratio for ``k1``, of the estimate for ``k2`` and ``k3``.
        lower: bound of the ratio from below, for ``k1``.
    """

    option: str
    upper: float
    lower: float = 0.0


def log_ratios(old: Tensor, rollout: Tensor, compared: Tensor) -> Tensor:
    """``log r`` of each compared token, 0 elsewhere; ``[b, R]`` doubles."""
    return torch.where(compared.bool(), old.double() - rollout.double(), 0.0)


def importance_weights(
    log_ratio: Tensor,
    compared: Tensor,
    trained: Tensor,
    *,
    level: str,
    truncation: Truncation,
    normalize: bool = False,
) -> tuple[Tensor, Statistics]:
    """The weight of each token's policy loss, and statistics of the weights.

    Args:
        log_ratio: ``[b, R]``, see :func:`log_ratios`.
        compared: ``[b, R]``, 0 or 1.
        trained: ``[b, R]``, 0 or 1.
        level: ``token``: ``r`` of the token; ``sequence``: the product of all ``r`` of its sequence.
        truncation: bounds of the weights.
        normalize: divide by the mean weight, over tokens or over sequences.

    Returns:
        Weights ``[b, R]`` in float32, 0 outside ``trained``; and ``rollout_is_*`` without a prefix: ``mean``, ``std``
        and ``eff_sample_size`` of the weights as they are used, ``min``, ``max`` and fractions of the ratios before.
    """
    kept = compared.bool()
    by_row = level == "sequence"
    raw = log_ratio.sum(-1) if by_row else log_ratio
    some = kept.any(-1) if by_row else kept
    weights = _truncated(raw.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), truncation)
    if normalize:
        mean = masked_mean(weights, some)
        weights = torch.where(mean > 0, weights / mean, weights)
    spread = weights[:, None].expand_as(log_ratio) if by_row else weights
    statistics = _weight_statistics(spread[kept], raw[some].exp(), truncation)
    if by_row:
        statistics |= _sequence_statistics(weights[some])
    return torch.where(trained.bool(), spread, 0.0).float(), statistics


def _truncated(weights: Tensor, bounds: Truncation) -> Tensor:
    if bounds.lower is None:
        return weights.clamp(max=bounds.upper)
    return torch.where((weights >= bounds.lower) & (weights <= bounds.upper), weights, 0.0)


def _weight_statistics(weights: Tensor, ratios: Tensor, bounds: Truncation) -> Statistics:
    if weights.numel() == 0:
        return {}
    lowest = 1 / bounds.upper if bounds.lower is None else bounds.lower
    squares = (weights**2).mean()
    return {
        "rollout_is_mean": weights.mean().item(),
        "rollout_is_std": weights.std(unbiased=False).item(),
        "rollout_is_min": ratios.min().item(),
        "rollout_is_max": ratios.max().item(),
        "rollout_is_eff_sample_size": (weights.mean() ** 2 / squares).item() if squares > 0 else 0.0,
        "rollout_is_ratio_fraction_high": (ratios > bounds.upper).double().mean().item(),
        "rollout_is_ratio_fraction_low": (ratios < lowest).double().mean().item(),
    }


def _sequence_statistics(weights: Tensor) -> Statistics:
    if weights.numel() == 0:
        return {}
    return {
        "rollout_is_seq_mean": weights.mean().item(),
        "rollout_is_seq_std": weights.std(unbiased=False).item(),
        "rollout_is_seq_min": weights.min().item(),
        "rollout_is_seq_max": weights.max().item(),
        "rollout_is_seq_max_deviation": (weights - 1).abs().max().item(),
    }


_ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio**2,
    "k3": lambda log_ratio: log_ratio.exp() - 1 - log_ratio,
}
"""What is bounded, from ``log r``: of ``k1`` its exponential, the ratio itself."""

_SCOPES: dict[str, Callable[[Tensor, Tensor], Tensor] | None] = {
    "token": None,
    "seq_sum": lambda values, mask: masked_sum(values, mask, -1),
    "seq_mean": lambda values, mask: masked_mean(values, mask, -1),
    "seq_max": lambda values, mask: torch.where(mask, values, 0.0).amax(-1),
}
"""How the estimates of a sequence become one number; None: each token is looked at by itself."""

REJECTIONS = tuple(
    f"{scope}_{estimate}" for scope in _SCOPES for estimate in _ESTIMATES if (scope, estimate) != ("seq_max", "k1")
)
"""Rules by which tokens or sequences are rejected; the largest of signed numbers would bound one side only."""


def rejected_tokens(
    log_ratio: Tensor, compared: Tensor, trained: Tensor, rules: Sequence[Rejection]
) -> tuple[Tensor, Statistics]:
    """Which tokens are left out because one of the rules says so.

    Args:
        log_ratio: ``[b, R]``, see :func:`log_ratios`.
        compared: ``[b, R]``, 0 or 1.
        trained: ``[b, R]``, 0 or 1.
        rules: at least one.

    Returns:
        ``[b, R]`` bool within ``trained``; and ``rollout_rs_masked_fraction`` of the trained tokens,
        ``rollout_rs_seq_masked_fraction`` of the sequences, and the former for each rule by itself.

    Raises:
        ValueError: an option is not known.
    """
    learned = trained.bool()
    tokens = int(learned.sum())
    rejected, statistics = torch.zeros_like(learned), {}
    for rule in rules:
        outside = _outside(log_ratio, compared.bool(), rule) & learned
        rejected |= outside
        statistics[f"rollout_rs_{rule.option}_masked_fraction"] = int(outside.sum()) / max(tokens, 1)
    rows = int(learned.any(-1).sum())
    statistics["rollout_rs_masked_fraction"] = int(rejected.sum()) / max(tokens, 1)
    statistics["rollout_rs_seq_masked_fraction"] = int(rejected.any(-1).sum()) / max(rows, 1)
    return rejected, statistics


def _outside(log_ratio: Tensor, compared: Tensor, rule: Rejection) -> Tensor:
    """Tokens of the rectangle that one rule rejects, or whose sequence it rejects."""
    if rule.option not in REJECTIONS:
        raise ValueError(f"rejection {rule.option!r} is not known; known are {', '.join(REJECTIONS)}")
    scope, _, estimate = rule.option.rpartition("_")
    reduce = _SCOPES[scope]
    values = _ESTIMATES[estimate](log_ratio)
    some = compared
    if reduce is not None:
        values, some = reduce(values, compared), compared.any(-1)
    if estimate == "k1":
        values = values.exp()
        inside = (values >= rule.lower) & (values <= rule.upper)
    else:
        inside = values <= rule.upper
    outside = ~inside & some
    return outside if reduce is None else outside[:, None].expand_as(log_ratio)


def off_policy_statistics(old: Tensor, rollout: Tensor, compared: Tensor) -> Statistics:
    """How far the actor's policy ("training") is from the engine's ("rollout"): KL, perplexities, chi-squared.

    Perplexities are of each sequence, then averaged over sequences with a compared token. Empty where there is none.

    Args:
        old: the actor's log-probs, ``[b, R]``.
        rollout: the engine's, ``[b, R]``.
        compared: ``[b, R]``, 0 or 1.
    """
    mask = compared.bool()
    rows = mask.any(-1)
    if not rows.any():
        return {}
    mask, log_ratio = mask[rows], log_ratios(old, rollout, compared)[rows]
    training_log_ppl = -masked_mean(old.double()[rows], mask, -1)
    rollout_log_ppl = -masked_mean(rollout.double()[rows], mask, -1)
    difference = training_log_ppl - rollout_log_ppl
    limited = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    whole = log_ratio.sum(-1).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {
        "kl": -log_ratio[mask].mean().item(),
        "k3_kl": _ESTIMATES["k3"](limited)[mask].mean().item(),
        "training_ppl": training_log_ppl.exp().mean().item(),
        "rollout_ppl": rollout_log_ppl.exp().mean().item(),
        "ppl_ratio": difference.exp().mean().item(),
        "training_log_ppl": training_log_ppl.mean().item(),
        "rollout_log_ppl": rollout_log_ppl.mean().item(),
        "log_ppl_diff": difference.mean().item(),
        "log_ppl_abs_diff": difference.abs().mean().item(),
        "log_ppl_diff_max": difference.max().item(),
        "log_ppl_diff_min": difference.min().item(),
        "chi2_token": (2 * limited[mask]).exp().mean().item() - 1,
        "chi2_seq": (2 * whole).exp().mean().item() - 1,
    }


def log_prob_differences(old: Tensor, rollout: Tensor) -> Statistics:
    """Distance of two lists of log-probs ``[n]``: differences of log-probs and of probabilities, and correlation.

    ``rollout_actor_probs_pearson_corr`` is of the probabilities; where one of the two does not vary it is not told.
    """
    if old.numel() == 0:
        return {}
    old, rollout = old.double(), rollout.double()
    logs, probs = (rollout - old).abs(), (rollout.exp() - old.exp()).abs()
    statistics = {
        "rollout_log_probs_diff_mean": logs.mean().item(),
        "rollout_log_probs_diff_max": logs.max().item(),
        "rollout_probs_diff_mean": probs.mean().item(),
        "rollout_probs_diff_max": probs.max().item(),
        "rollout_probs_diff_std": probs.std(unbiased=False).item(),
    }
    a, b = rollout.exp() - rollout.exp().mean(), old.exp() - old.exp().mean()
    scale = (a.square().sum() * b.square().sum()).sqrt()
    if scale > 0:
        statistics["rollout_actor_probs_pearson_corr"] = ((a * b).sum() / scale).item()
    return statistics
