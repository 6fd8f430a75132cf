"""Rollout correction: importance weights and rejection masks for the mismatch between rollout engine and actor.

The ratio of a token is ``r = p_old / p_rollout``: the actor's probability over the probability at which the engine
sampled it. A loss is corrected by importance weights, truncated at a bound, or by rejecting tokens or whole sequences.
``docs/reference/rollout_correction.md`` has the formulas and their sources. All functions work on rectangles
``[b, R]``, or on packed tokens ``[n]`` with ``lengths [b]``, in double precision and without gradients. Rows may be
part of a batch: statistics follow from moments and counts, which merge over the parts.

Masks: ``trained`` marks trained tokens, ``compared`` the trained tokens that the engine sampled. A tool result may be
trained on, but the engine has no log-prob for it: it takes part in no ratio, and its weight in a token-level correction
is 1.

Stale tokens have three policies: the behaviour policy sampled them, the proximal policy has the weights of the last
sync, and the current policy is trained (Fu et al. 2025, arXiv:2505.24298, section 5.2). Decoupled PPO clips the ratio
about the proximal policy and weighs it by ``p_proximal / p_behaviour``. AReaL's ``prox_logp_method=loglinear``
estimates the proximal log-probs from the other two and the versions of the weights, without a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.masked import (
    Moments,
    PairMoments,
    expand_to_tokens,
    have_tokens,
    select_tokens,
    sequence_maxima,
    sequence_means,
    sequence_sums,
)
from megarl.algorithms.policy_loss import LOG_RATIO_LIMIT
from megarl.base.reductions import Largest, Smallest

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


@dataclass(frozen=True)
class Correction:
    """A configured rollout correction.

    Attributes:
        level: see :func:`importance_weights`; None = no weights.
    """

    level: str | None
    truncation: Truncation
    rules: tuple[Rejection, ...] = ()


def log_ratios(old: Tensor, rollout: Tensor, compared: Tensor) -> Tensor:
    """Compute ``log r`` of each compared token, 0 elsewhere; ``[b, R]`` doubles."""
    return torch.where(compared.bool(), old.double() - rollout.double(), 0.0)


class WeightMoments(NamedTuple):
    """Moments of importance weights and of their ratios before truncation, over some rows.

    Attributes:
        tokens: weights of compared tokens.
        sequences: weights of sequences; empty for weights by token.
        distances: distances of the sequences' weights from 1.
        log_ratios: ``log r`` before truncation, by token or sequence.
        high: number of ratios above the upper bound.
        low: number of ratios below the lower bound, or below the reciprocal of the upper one.
    """

    tokens: Moments = Moments()
    sequences: Moments = Moments()
    distances: Moments = Moments()
    log_ratios: Moments = Moments()
    high: int = 0
    low: int = 0

    @classmethod
    def merged(cls, parts: Sequence[WeightMoments]) -> WeightMoments:
        """Merge the moments of disjoint rows."""
        columns: list[Any] = list(zip(*parts, strict=True))
        merged: list[Any] = [*map(Moments.merged, columns[:4]), *map(sum, columns[4:])]
        return cls(*merged)

    @property
    def mean(self) -> float:
        """Mean weight of tokens or of sequences, to normalize by; 1 if there is none, or all weights are 0."""
        units = self.sequences if self.sequences.count else self.tokens
        return units.mean if units.mean > 0 else 1.0

    def statistics(self) -> Statistics:
        """Compute ``rollout_is_*`` without a prefix; empty without a compared token.

        ``mean``, ``std`` and ``eff_sample_size`` describe the final token weights, ``seq_*`` the final sequence
        weights; ``min``, ``max`` and the fractions describe the ratios before truncation.
        """
        tokens, whole, ratios = self.tokens, self.sequences, self.log_ratios
        if not tokens.count:
            return {}
        squares = tokens.mean**2 + tokens.squares / tokens.count
        least, most = torch.tensor([ratios.least, ratios.most], dtype=torch.double).exp().tolist()
        statistics = {
            "rollout_is_mean": tokens.mean,
            "rollout_is_std": tokens.deviation,
            "rollout_is_min": Smallest(least),
            "rollout_is_max": Largest(most),
            "rollout_is_eff_sample_size": tokens.mean**2 / squares if squares > 0 else 0.0,
            "rollout_is_ratio_fraction_high": self.high / ratios.count,
            "rollout_is_ratio_fraction_low": self.low / ratios.count,
        }
        if not whole.count:
            return statistics
        return statistics | {
            "rollout_is_seq_mean": whole.mean,
            "rollout_is_seq_std": whole.deviation,
            "rollout_is_seq_min": Smallest(whole.least),
            "rollout_is_seq_max": Largest(whole.most),
            "rollout_is_seq_max_deviation": Largest(self.distances.most),
        }


def importance_weights(
    log_ratio: Tensor,
    compared: Tensor,
    trained: Tensor,
    *,
    level: str,
    truncation: Truncation,
    mean: float = 1.0,
    lengths: Tensor | None = None,
) -> tuple[Tensor, WeightMoments]:
    """Compute each token's importance weight, and the weights' moments.

    Args:
        level: ``token``: ``r`` of the token; ``sequence``: the product of all ``r`` of its sequence.
        mean: divides the truncated weights: :attr:`WeightMoments.mean` of the batch, to normalize them.

    Returns:
        Weights ``[b, R]`` in float32, 0 outside ``trained``; and their moments.
    """
    kept = compared.bool()
    by_row = level == "sequence"
    raw = sequence_sums(log_ratio, torch.ones_like(kept), lengths) if by_row else log_ratio
    counted = have_tokens(kept, lengths) if by_row else kept
    weights = truncated(raw.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), truncation) / mean
    per_token = expand_to_tokens(weights, log_ratio, lengths) if by_row else weights
    moments = _weight_moments(per_token[kept], weights[counted] if by_row else None, raw[counted], truncation)
    return torch.where(trained.bool(), per_token, 0.0).float(), moments


def truncated(weights: Tensor, bounds: Truncation) -> Tensor:
    """Clamp weights to the upper bound, or zero all outside of two bounds."""
    if bounds.lower is None:
        return weights.clamp(max=bounds.upper)
    return torch.where((weights >= bounds.lower) & (weights <= bounds.upper), weights, 0.0)


def _weight_moments(tokens: Tensor, sequences: Tensor | None, log_ratio: Tensor, bounds: Truncation) -> WeightMoments:
    whole = torch.empty(0) if sequences is None else sequences
    ratios, lowest = log_ratio.exp(), 1 / bounds.upper if bounds.lower is None else bounds.lower
    return WeightMoments(
        tokens=Moments.of(tokens),
        sequences=Moments.of(whole),
        distances=Moments.of((whole - 1).abs()),
        log_ratios=Moments.of(log_ratio),
        high=int((ratios > bounds.upper).sum()),
        low=int((ratios < lowest).sum()),
    )


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


class RejectionCounts(NamedTuple):
    """Numbers of rejected tokens and sequences among the trained ones, of some rows.

    Attributes:
        tokens: trained tokens.
        sequences: sequences with a trained token.
        rejected_tokens: trained tokens that some rule rejects.
        rejected_sequences: sequences with a rejected token.
        by_rule: tokens that each rule rejects, by its option.
    """

    tokens: int
    sequences: int
    rejected_tokens: int
    rejected_sequences: int
    by_rule: Mapping[str, int]

    @classmethod
    def merged(cls, parts: Sequence[RejectionCounts]) -> RejectionCounts:
        """Add up the counts of disjoint rows."""
        by_rule = {rule: sum(part.by_rule[rule] for part in parts) for rule in parts[0].by_rule}
        counts: list[Any] = [sum(column) for column in list(zip(*parts, strict=True))[:4]]
        return cls(*[*counts, by_rule])

    def statistics(self) -> Statistics:
        """Compute the rejected fractions: of tokens, of sequences, and of tokens by rule."""
        tokens, sequences = max(self.tokens, 1), max(self.sequences, 1)
        by_rule = {f"rollout_rs_{option}_masked_fraction": count / tokens for option, count in self.by_rule.items()}
        return {
            **by_rule,
            "rollout_rs_masked_fraction": self.rejected_tokens / tokens,
            "rollout_rs_seq_masked_fraction": self.rejected_sequences / sequences,
        }


def rejected_tokens(
    log_ratio: Tensor,
    compared: Tensor,
    trained: Tensor,
    rules: Sequence[Rejection],
    lengths: Tensor | None = None,
) -> tuple[Tensor, RejectionCounts]:
    """Select the tokens that at least one of the rules rejects.

    Returns:
        ``[b, R]`` bool within ``trained``; and the numbers of rejected tokens and sequences.

    Raises:
        ValueError: an option is unknown.
    """
    kept = trained.bool()
    rejected, by_rule = torch.zeros_like(kept), {}
    for rule in rules:
        outside = _outside(log_ratio, compared.bool(), rule, lengths) & kept
        rejected |= outside
        by_rule[rule.option] = int(outside.sum())
    rows, rejected_rows = (int(have_tokens(mask, lengths).sum()) for mask in (kept, rejected))
    return rejected, RejectionCounts(int(kept.sum()), rows, int(rejected.sum()), rejected_rows, by_rule)


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
    """Moments that compare the actor's log-probs ("training") with the engine's ("rollout"), over some rows.

    Attributes:
        log_ratio: ``log r`` per compared token, as all numbers per token.
        squared: ``r^2`` per token.
        squared_sequence: square of a sequence's product of all ``r``.
        training: log-perplexity of a sequence under the actor, ``training_ppl`` its exponential.
        rollout: log-perplexity of a sequence under the engine, ``rollout_ppl`` its exponential.
        ppl_ratio: the first perplexity over the second.
        difference: the first log-perplexity minus the second, ``distance`` its absolute value.
        log_distance: distance of the log-probs per token.
        prob_distance: distance of the probabilities per token.
        probs: the engine's and the actor's probability per token.
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
        """Compute the moments of the actor's and the engine's log-probs, ``[b, R]`` each.

        Sequences without a compared token have no perplexity.
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
            "log_ppl_diff_max": Largest(self.difference.most),
            "log_ppl_diff_min": Smallest(self.difference.least),
            "chi2_token": self.squared.mean - 1,
            "chi2_seq": self.squared_sequence.mean - 1,
        }

    def differences(self) -> Statistics:
        """Compute how log-probs and probabilities differ, and how the probabilities correlate.

        ``rollout_actor_probs_pearson_corr`` is missing if the probabilities of one side are constant.
        """
        if not self.log_ratio.count:
            return {}
        statistics = {
            "rollout_log_probs_diff_mean": self.log_distance.mean,
            "rollout_log_probs_diff_max": Largest(self.log_distance.most),
            "rollout_probs_diff_mean": self.prob_distance.mean,
            "rollout_probs_diff_max": Largest(self.prob_distance.most),
            "rollout_probs_diff_std": self.prob_distance.deviation,
        }
        correlation = self.probs.correlation
        return statistics if correlation is None else {**statistics, "rollout_actor_probs_pearson_corr": correlation}


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
        behaviour: log-probs under the policy that sampled the tokens, in the shape of ``log_prob``.
        fractions: see :func:`proximal_fractions`.
    """
    return behaviour + fractions * (log_prob.detach() - behaviour)


def proximal_weights(proximal: Tensor, behaviour: Tensor, bounds: Truncation) -> Tensor:
    """Compute the importance weight ``p_proximal / p_behaviour`` of each token, within bounds; any shape."""
    return truncated((proximal - behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), bounds)
