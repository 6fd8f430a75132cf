"""Rollout correction: importance weights and rejection masks for the mismatch between rollout engine and actor.

The ratio of a token is ``r = p_old / p_rollout``: the actor's probability over the probability at which the engine
sampled it. A loss is corrected by importance weights, truncated at a bound, or by rejecting tokens or whole sequences.
``docs/rollout_correction.md`` has the formulas and their sources. All functions work on rectangles ``[b, R]``, or on
packed tokens ``[n]`` with ``lengths [b]``, over the whole batch, in double precision and without gradients.

Masks: ``trained`` marks trained tokens, ``compared`` the trained tokens that the engine sampled. A tool result may be
trained on, but the engine has no log-prob for it: it takes part in no ratio, and its weight in a token-level correction
is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.masked import (
    expand_to_tokens,
    have_tokens,
    masked_mean,
    select_tokens,
    sequence_maxima,
    sequence_means,
    sequence_sums,
)
from megarl.algorithms.moments import Moments, PairMoments
from megarl.algorithms.policy_loss import LOG_RATIO_LIMIT

Statistics = dict[str, float]


class Truncation(NamedTuple):
    """Bounds of importance weights.

    Attributes:
        upper: larger weights are clamped to this bound.
        lower: if set, weights below it or above ``upper`` become 0 instead.
    """

    upper: float
    lower: float | None = None


class Rejection(NamedTuple):
    """A rule that rejects tokens or sequences.

    Attributes:
        option: one of :data:`REJECTIONS`.
        upper: upper bound: of the ratio for ``k1``, of the estimate for ``k2`` and ``k3``.
        lower: lower bound of the ratio, for ``k1``.
    """

    option: str
    upper: float
    lower: float = 0.0


def log_ratios(old: Tensor, rollout: Tensor, compared: Tensor) -> Tensor:
    """Compute ``log r`` of each compared token, 0 elsewhere; ``[b, R]`` doubles."""
    return torch.where(compared.bool(), old.double() - rollout.double(), 0.0)


def importance_weights(
    log_ratio: Tensor,
    compared: Tensor,
    trained: Tensor,
    *,
    level: str,
    truncation: Truncation,
    normalize: bool = False,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Statistics]:
    """Compute the importance weight of each token's policy loss, with statistics of the weights.

    Args:
        log_ratio: ``[b, R]``, see :func:`log_ratios`.
        compared: ``[b, R]``, 0 or 1.
        trained: ``[b, R]``, 0 or 1.
        level: ``token``: ``r`` of the token; ``sequence``: the product of all ``r`` of its sequence.
        truncation: bounds of the weights.
        normalize: divide by the mean weight, over tokens or over sequences.
        lengths: ``[b]`` of packed tokens; None = rectangles.

    Returns:
        Weights ``[b, R]`` in float32, 0 outside ``trained``; and ``rollout_is_*`` without a prefix: ``mean``, ``std``
        and ``eff_sample_size`` of the final weights, ``min``, ``max`` and fractions of the ratios before truncation.
    """
    kept = compared.bool()
    by_row = level == "sequence"
    raw = sequence_sums(log_ratio, torch.ones_like(kept), lengths) if by_row else log_ratio
    counted = have_tokens(kept, lengths) if by_row else kept
    weights = truncated(raw.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), truncation)
    if normalize:
        mean = masked_mean(weights, counted)
        weights = torch.where(mean > 0, weights / mean, weights)
    per_token = expand_to_tokens(weights, log_ratio, lengths) if by_row else weights
    statistics = _weight_statistics(per_token[kept], raw[counted].exp(), truncation)
    if by_row:
        statistics |= _sequence_statistics(weights[counted])
    return torch.where(trained.bool(), per_token, 0.0).float(), statistics


def truncated(weights: Tensor, bounds: Truncation) -> Tensor:
    """Clamp weights to the upper bound, or set those outside of two bounds to 0."""
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
"""Bounded quantity as a function of ``log r``; for ``k1`` its exponential, the ratio, is bounded."""

_SCOPES: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor] | None] = {
    "token": None,
    "seq_sum": sequence_sums,
    "seq_mean": sequence_means,
    "seq_max": lambda values, mask, lengths: sequence_maxima(values, mask, lengths, 0.0),
}
"""Reduction of a sequence's estimates to one number; None: every token is tested separately."""

REJECTIONS = tuple(
    f"{scope}_{estimate}" for scope in _SCOPES for estimate in _ESTIMATES if (scope, estimate) != ("seq_max", "k1")
)
"""Rejection options. ``seq_max_k1`` is missing: the maximum of signed numbers would bound one side only."""


def rejected_tokens(
    log_ratio: Tensor,
    compared: Tensor,
    trained: Tensor,
    rules: Sequence[Rejection],
    lengths: Tensor | None = None,
) -> tuple[Tensor, Statistics]:
    """Select the tokens that at least one of the rules rejects.

    Args:
        log_ratio: ``[b, R]``, see :func:`log_ratios`.
        compared: ``[b, R]``, 0 or 1.
        trained: ``[b, R]``, 0 or 1.
        rules: at least one.
        lengths: ``[b]`` of packed tokens; None = rectangles.

    Returns:
        ``[b, R]`` bool within ``trained``; and the statistics ``rollout_rs_masked_fraction`` of the trained tokens,
        ``rollout_rs_seq_masked_fraction`` of the sequences, and the token fraction of each rule.

    Raises:
        ValueError: an option is unknown.
    """
    kept = trained.bool()
    tokens = int(kept.sum())
    rejected, statistics = torch.zeros_like(kept), {}
    for rule in rules:
        outside = _outside(log_ratio, compared.bool(), rule, lengths) & kept
        rejected |= outside
        statistics[f"rollout_rs_{rule.option}_masked_fraction"] = int(outside.sum()) / max(tokens, 1)
    rows = int(have_tokens(kept, lengths).sum())
    statistics["rollout_rs_masked_fraction"] = int(rejected.sum()) / max(tokens, 1)
    statistics["rollout_rs_seq_masked_fraction"] = int(have_tokens(rejected, lengths).sum()) / max(rows, 1)
    return rejected, statistics


def _outside(log_ratio: Tensor, compared: Tensor, rule: Rejection, lengths: Tensor | None) -> Tensor:
    """Select the tokens that one rule rejects, by token or by sequence."""
    if rule.option not in REJECTIONS:
        raise ValueError(f"rejection {rule.option!r} is unknown; known ones: {', '.join(REJECTIONS)}")
    scope, _, estimate = rule.option.rpartition("_")
    reduce = _SCOPES[scope]
    values = _ESTIMATES[estimate](log_ratio)
    counted = compared
    if reduce is not None:
        values, counted = reduce(values, compared, lengths), have_tokens(compared, lengths)
    if estimate == "k1":
        values = values.exp()
        inside = (values >= rule.lower) & (values <= rule.upper)
    else:
        inside = values <= rule.upper
    outside = ~inside & counted
    return outside if reduce is None else expand_to_tokens(outside, log_ratio, lengths)


class RatioMoments(NamedTuple):
    """Moments of the log-probs of actor ("training") and engine ("rollout") over compared tokens, of some rows.

    Attributes:
        log_ratio: of ``log r`` per token.
        k3: of the k3 estimate per token.
        squared: of ``r^2`` per token.
        squared_sequence: of the square of a sequence's product of all ``r``.
        training: of a sequence's log-perplexity under the actor.
        rollout: of a sequence's log-perplexity under the engine.
        training_ppl: of a sequence's perplexity under the actor.
        rollout_ppl: of a sequence's perplexity under the engine.
        ppl_ratio: of the first perplexity over the second.
        difference: of the first log-perplexity minus the second.
        distance: of the absolute value of this difference.
        log_distance: of the distance of the log-probs per token.
        prob_distance: of the distance of the probabilities per token.
        probs: of the engine's and the actor's probability per token.
    """

    log_ratio: Moments
    k3: Moments
    squared: Moments
    squared_sequence: Moments
    training: Moments
    rollout: Moments
    training_ppl: Moments
    rollout_ppl: Moments
    ppl_ratio: Moments
    difference: Moments
    distance: Moments
    log_distance: Moments
    prob_distance: Moments
    probs: PairMoments

    @classmethod
    def of(cls, old: Tensor, rollout: Tensor, compared: Tensor, lengths: Tensor | None = None) -> RatioMoments:
        """Compute the moments; perplexities are those of sequences with a compared token.

        Args:
            old: the actor's log-probs, ``[b, R]``.
            rollout: the engine's, ``[b, R]``.
            compared: ``[b, R]``, 0 or 1.
            lengths: ``[b]`` of packed tokens; None = rectangles.
        """
        mask = compared.bool()
        rows = have_tokens(mask, lengths)
        training = -sequence_means(old, mask, lengths)[rows]
        engine = -sequence_means(rollout, mask, lengths)[rows]
        difference = training - engine
        log_ratio = log_ratios(old, rollout, mask)
        whole = sequence_sums(log_ratio, mask, lengths)[rows].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        log_ratio = select_tokens(log_ratio, mask)
        limited = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        old_probs, rollout_probs = (select_tokens(one, mask).double().exp() for one in (old, rollout))
        return cls(
            log_ratio=Moments.of(log_ratio),
            k3=Moments.of(_ESTIMATES["k3"](limited)),
            squared=Moments.of((2 * limited).exp()),
            squared_sequence=Moments.of((2 * whole).exp()),
            training=Moments.of(training),
            rollout=Moments.of(engine),
            training_ppl=Moments.of(training.exp()),
            rollout_ppl=Moments.of(engine.exp()),
            ppl_ratio=Moments.of(difference.exp()),
            difference=Moments.of(difference),
            distance=Moments.of(difference.abs()),
            log_distance=Moments.of(log_ratio.abs()),
            prob_distance=Moments.of((rollout_probs - old_probs).abs_()),
            probs=PairMoments.of(rollout_probs, old_probs),
        )

    @classmethod
    def merged(cls, parts: Sequence[RatioMoments]) -> RatioMoments:
        """Merge the moments of disjoint rows."""
        columns = zip(*parts, strict=True)
        return cls(*(type(column[0]).merged(column) for column in columns))

    def off_policy_statistics(self) -> Statistics:
        """Compute off-policy metrics between actor and engine: KL, perplexities, chi-squared; empty without a token."""
        if not self.log_ratio.count:
            return {}
        return {
            "kl": -self.log_ratio.mean,
            "k3_kl": self.k3.mean,
            "training_ppl": self.training_ppl.mean,
            "rollout_ppl": self.rollout_ppl.mean,
            "ppl_ratio": self.ppl_ratio.mean,
            "training_log_ppl": self.training.mean,
            "rollout_log_ppl": self.rollout.mean,
            "log_ppl_diff": self.difference.mean,
            "log_ppl_abs_diff": self.distance.mean,
            "log_ppl_diff_max": self.difference.most,
            "log_ppl_diff_min": self.difference.least,
            "chi2_token": self.squared.mean - 1,
            "chi2_seq": self.squared_sequence.mean - 1,
        }

    def differences(self) -> Statistics:
        """Compute differences of log-probs and of probabilities, and the correlation of the probabilities.

        ``rollout_actor_probs_pearson_corr`` is missing if the probabilities of one side are constant.
        """
        if not self.log_ratio.count:
            return {}
        statistics = {
            "rollout_log_probs_diff_mean": self.log_distance.mean,
            "rollout_log_probs_diff_max": self.log_distance.most,
            "rollout_probs_diff_mean": self.prob_distance.mean,
            "rollout_probs_diff_max": self.prob_distance.most,
            "rollout_probs_diff_std": self.prob_distance.deviation,
        }
        correlation = self.probs.correlation
        return statistics if correlation is None else {**statistics, "rollout_actor_probs_pearson_corr": correlation}
