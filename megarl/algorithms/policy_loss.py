"""Policy losses per token (PPO, GSPO, GMPO, CISPO, SAPO, REINFORCE), a critic's loss, and the weights of tokens.

All functions accept rectangles ``[b, R]`` and packed tokens ``[n]``. In the formulas ``r`` is the importance ratio
``exp(log_prob - old_log_prob)`` of a token and ``A`` its advantage.

A mini-batch is split over ranks and micro-batches. A mean per part would change the loss with the split. Instead the
counts of the whole mini-batch are known before the first backward pass, and :func:`token_weights` gives each token its
weight in the global loss. The loss is ``sum(weight * loss)`` over tokens, micro-batches and ranks in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.masked import expand_to_tokens, sequence_means, sequence_sums
from megarl.base.algorithm_names import DEFAULT_AGGREGATION, default_aggregation
from megarl.base.registry import Registry
from megarl.base.user_code import load_user_function

LOG_RATIO_LIMIT = 20.0
"""Bound on the absolute log of a probability ratio; it keeps the exponential finite."""


@dataclass(frozen=True)
class PolicyLossOptions:
    """Settings of the policy losses; a loss reads only its settings. The defaults are in the configuration's schema.

    Attributes:
        clip_ratio_low: lower clip range of the ratio, below 1.
        clip_ratio_high: upper clip range of the ratio, above 1.
        clip_ratio_c: dual clip, the largest ratio for negative advantages.
        tau_pos: SAPO, steepness of the gate for positive advantages.
        tau_neg: the same for other advantages.
        clip_cov_ratio: share of the tokens that clip_cov removes.
        clip_cov_lb: clip_cov removes tokens with a covariance above this,
        clip_cov_ub: and below this.
        kl_cov_ratio: share of the tokens that kl_cov penalises.
        ppo_kl_coef: coefficient of that KL penalty.
        m2_threshold: m2po, bound on the mean of ``(log r)^2``.
    """

    clip_ratio_low: float
    clip_ratio_high: float
    clip_ratio_c: float
    tau_pos: float
    tau_neg: float
    clip_cov_ratio: float
    clip_cov_lb: float
    clip_cov_ub: float
    kl_cov_ratio: float
    ppo_kl_coef: float
    m2_threshold: float


@dataclass(frozen=True)
class PolicyLossInputs:
    """Inputs of a policy loss; the tensors have one shape, ``[b, R]`` or packed ``[n]``.

    Attributes:
        log_prob: log-probs of the tokens under the current policy, with gradients.
        old_log_prob: log-probs before this step's updates.
        response_mask: 1 for trained tokens; the loss of other tokens is not read.
        lengths: ``[b]``, tokens of each packed sequence, all complete; None for rectangles.
        chosen: 1 for chosen tokens, for losses that choose tokens on the whole mini-batch; otherwise None.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor
    lengths: Tensor | None = None
    chosen: Tensor | None = None
    options: PolicyLossOptions = field(kw_only=True)

    @property
    def log_ratio(self) -> Tensor:
        """``log r``, clamped to :data:`LOG_RATIO_LIMIT`."""
        return (self.log_prob - self.old_log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@dataclass(frozen=True)
class TokenLoss:
    """A loss per token with its diagnostics.

    Attributes:
        loss: loss of each token, with gradients.
        diagnostics: metric name (without its prefix) to a value per token, without gradients; the metric is the mean
            over the trained tokens.
    """

    loss: Tensor
    diagnostics: dict[str, Tensor]


@dataclass(frozen=True)
class WholeMiniBatch:
    """All tokens of a mini-batch over all ranks, packed ``[n]`` in any order, without gradients.

    Attributes:
        log_prob: log-probs before this mini-batch's update.
        old_log_prob: log-probs before this step's updates.
        response_mask: 1 for trained tokens.
        keys: a random integer per token, a function of the sample and the token's position alone.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor
    keys: Tensor


PolicyLossFunction = Callable[[PolicyLossInputs], TokenLoss]
ChoiceFunction = Callable[[WholeMiniBatch, PolicyLossOptions], Tensor]


@dataclass(frozen=True)
class PolicyLoss:
    """A registered policy loss.

    Attributes:
        aggregation: the ``loss_agg_mode`` of the paper, used if the configuration sets none.
        choose: maps the whole mini-batch to a bool per token, passed to the loss as ``chosen``. It costs a forward pass
            over the mini-batch. None for losses that choose no tokens.
    """

    function: PolicyLossFunction
    aggregation: str = DEFAULT_AGGREGATION
    choose: ChoiceFunction | None = None

    def __call__(self, inputs: PolicyLossInputs) -> TokenLoss:
        """Compute the loss of each token.

        Raises:
            ValueError: the loss chooses tokens, and ``chosen`` is missing.
        """
        if self.choose is not None and inputs.chosen is None:
            raise ValueError("this policy loss needs `chosen`, the tokens chosen on the whole mini-batch")
        return self.function(inputs)


def _load_user_loss(spec: str, key: str) -> PolicyLoss:
    function = load_user_function(spec, key, arguments=1)
    return function if isinstance(function, PolicyLoss) else PolicyLoss(function)


POLICY_LOSSES: Registry[PolicyLoss] = Registry("actor_rollout_ref.actor.policy_loss.loss_mode", loader=_load_user_loss)


def register_policy_loss(
    *names: str, aggregation: str | None = None, choose: ChoiceFunction | None = None
) -> Callable[[PolicyLossFunction], PolicyLoss]:
    """Return a decorator that registers a loss under ``names``; arguments as in :class:`PolicyLoss`.

    A None ``aggregation`` is the one in :mod:`megarl.base.algorithm_names`.
    """

    def add(function: PolicyLossFunction) -> PolicyLoss:
        return POLICY_LOSSES.register(*names)(
            PolicyLoss(function, aggregation or default_aggregation(names[0]), choose)
        )

    return add


def clipped_terms(ratio: Tensor, inputs: PolicyLossInputs) -> tuple[Tensor, Tensor]:
    """Return ``-A r`` and ``-A clip(r, 1 - low, 1 + high)``."""
    low, high = 1 - inputs.options.clip_ratio_low, 1 + inputs.options.clip_ratio_high
    return -inputs.advantages * ratio, -inputs.advantages * ratio.clamp(low, high)


@register_policy_loss("vanilla")
def clipped_policy_loss(inputs: PolicyLossInputs) -> TokenLoss:
    """Compute PPO's clipped loss with dual clip.

    ``L = max(-A r, -A clip(r, 1 - low, 1 + high))`` (Schulman et al. 2017, arXiv:1707.06347, eq. 7; a separate
    ``high``: Yu et al. 2025, arXiv:2503.14476). For ``A < 0``: ``min(L, -A c)`` (Ye et al. 2020, arXiv:1912.09729).

    Returns:
        The loss, with diagnostics ``ppo_kl`` (``old_log_prob - log_prob``), ``pg_clipfrac`` (1 if the clip removed
        the gradient) and ``pg_clipfrac_lower`` (1 if the dual clip did).
    """
    log_ratio = inputs.log_ratio
    plain, clipped = clipped_terms(log_ratio.exp(), inputs)
    pessimistic = torch.maximum(plain, clipped)
    bound = -inputs.advantages * inputs.options.clip_ratio_c
    bad = inputs.advantages < 0
    return TokenLoss(
        loss=torch.where(bad, torch.minimum(pessimistic, bound), pessimistic),
        diagnostics={
            "ppo_kl": -log_ratio.detach(),
            "pg_clipfrac": (clipped > plain).to(plain.dtype),
            "pg_clipfrac_lower": (bad & (pessimistic > bound)).to(plain.dtype),
        },
    )


@register_policy_loss("gspo")
def gspo(inputs: PolicyLossInputs) -> TokenLoss:
    """GSPO (Zheng et al. 2025, arXiv:2507.18071): clip the length-normalised ratio of whole sequences.

    ``s = (prod_t r_t)^(1 / l)`` over the ``l`` trained tokens of a sequence. In the GSPO-token form,
    ``s_t = sg[s] p_t / sg[p_t]`` and ``L_t = max(-A s_t, -A clip(s_t, 1 - low, 1 + high))``. If all tokens of a
    sequence share ``A``, the mean over its tokens has the gradient of the GSPO loss. The paper clips at 3e-4 and 4e-4.
    """
    log_ratio = inputs.log_ratio
    mean_log_ratio = sequence_means(log_ratio.detach(), inputs.response_mask, inputs.lengths)
    expanded = expand_to_tokens(mean_log_ratio, log_ratio, inputs.lengths).to(log_ratio.dtype)
    plain, clipped = clipped_terms((inputs.log_prob - inputs.log_prob.detach() + expanded).exp(), inputs)
    return TokenLoss(
        loss=torch.maximum(plain, clipped),
        diagnostics={"ppo_kl": -log_ratio.detach(), "pg_clipfrac": (clipped > plain).to(plain.dtype)},
    )


@register_policy_loss("geo_mean")
def gmpo(inputs: PolicyLossInputs) -> TokenLoss:
    """GMPO (Zhao et al. 2025, arXiv:2507.20673): the geometric mean of a sequence's clipped ratios.

    ``L = -A (prod_t rho_t)^(1 / l)`` for each of a sequence's ``l`` trained tokens. ``log rho_t`` is the pessimistic
    choice, by the sign of ``A``, between ``log r_t`` and ``clip(log r_t, -low, high)``. ``A`` is the mean advantage of
    the tokens. The paper clips the logarithm at 0.4 on both sides.

    Returns:
        The loss, with diagnostics ``ppo_kl``, ``pg_clipfrac`` and ``pg_clipfrac_lower``: tokens with a ratio out of
        bounds and an advantage above, or below, 0.
    """
    log_ratio, advantages, options = inputs.log_ratio, inputs.advantages, inputs.options
    clipped = log_ratio.clamp(-options.clip_ratio_low, options.clip_ratio_high)
    sign = advantages.sign()
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * clipped)
    ratio = sequence_means(pessimistic, inputs.response_mask, inputs.lengths).exp()
    advantage = sequence_means(advantages, inputs.response_mask, inputs.lengths)
    outside = log_ratio.detach() != clipped.detach()
    return TokenLoss(
        loss=expand_to_tokens(-advantage * ratio, log_ratio, inputs.lengths).to(log_ratio.dtype),
        diagnostics={
            "ppo_kl": -log_ratio.detach(),
            "pg_clipfrac": (outside & (advantages > 0)).to(log_ratio.dtype),
            "pg_clipfrac_lower": (outside & (advantages < 0)).to(log_ratio.dtype),
        },
    )


@register_policy_loss("cispo")
def cispo(inputs: PolicyLossInputs) -> TokenLoss:
    """CISPO (MiniMax 2025, arXiv:2506.13585): REINFORCE with clipped importance weights.

    ``L = -sg[clip(r, 1 - low, 1 + high)] A log p``: a clipped token keeps a reduced gradient.
    """
    log_ratio, options = inputs.log_ratio.detach(), inputs.options
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - options.clip_ratio_low, 1 + options.clip_ratio_high)
    return TokenLoss(
        loss=-weight * inputs.advantages * inputs.log_prob,
        diagnostics={"ppo_kl": -log_ratio, "pg_clipfrac": (weight != ratio).to(ratio.dtype)},
    )


@register_policy_loss("reinforce", "gpg")
def reinforce(inputs: PolicyLossInputs) -> TokenLoss:
    """REINFORCE (Williams 1992), and GPG (Chu et al. 2025, arXiv:2504.02546): ``L = -A log p``, without a ratio."""
    return TokenLoss(-inputs.advantages * inputs.log_prob, {"ppo_kl": -inputs.log_ratio.detach()})


@register_policy_loss("sapo")
def sapo(inputs: PolicyLossInputs) -> TokenLoss:
    """SAPO (Gao et al. 2025, arXiv:2511.20347): a smooth gate instead of the clip.

    ``L = -A (4 / tau) sigmoid(tau (r - 1))`` with ``tau_pos`` for ``A > 0`` and ``tau_neg`` otherwise. Its slope in
    ``r`` equals that of ``-A r`` at ``r = 1`` and decreases on both sides.
    """
    log_ratio, options = inputs.log_ratio, inputs.options
    tau = torch.full_like(log_ratio, options.tau_neg).masked_fill(inputs.advantages > 0, options.tau_pos)
    gate = (tau * (log_ratio.exp() - 1)).sigmoid() * 4 / tau
    return TokenLoss(-inputs.advantages * gate, {"ppo_kl": -log_ratio.detach()})


class LossCounts(NamedTuple):
    """Normalizers of a loss; counts of parts add up to counts of the whole.

    Attributes:
        sequences: sequences with at least one trained token.
    """

    tokens: int
    sequences: int


class _Normalizers(NamedTuple):
    sequence_tokens: Tensor  # trained tokens in the sequence of each token, same shape as the mask
    counts: LossCounts  # of the whole mini-batch
    horizon: int | None


AGGREGATIONS: Registry[Callable[[_Normalizers], Tensor | float]] = Registry("actor_rollout_ref.actor.loss_agg_mode")


def _sum_norm(normalizers: _Normalizers) -> float:
    if not normalizers.horizon:
        raise ValueError("loss_agg_mode 'seq-mean-token-sum-norm' needs `horizon`, the longest response in tokens")
    return 1.0 / (max(normalizers.counts.sequences, 1) * normalizers.horizon)


AGGREGATIONS.update(
    {
        "token-mean": lambda n: 1.0 / max(n.counts.tokens, 1),
        "token-sum": lambda n: 1.0,
        "seq-mean-token-sum": lambda n: 1.0 / max(n.counts.sequences, 1),
        "seq-mean-token-mean": lambda n: 1.0 / (n.sequence_tokens.clamp(min=1) * max(n.counts.sequences, 1)),
        "seq-mean-token-sum-norm": _sum_norm,
    }
)


def _sequence_token_counts(response_mask: Tensor, lengths: Tensor | None) -> Tensor:
    return sequence_sums(torch.ones_like(response_mask, dtype=torch.double), response_mask, lengths)


def loss_counts(response_mask: Tensor, lengths: Tensor | None = None) -> LossCounts:
    """Count trained tokens and sequences of one part of a mini-batch; arguments as in :func:`token_weights`."""
    tokens = _sequence_token_counts(response_mask, lengths)
    return LossCounts(tokens=int(tokens.sum()), sequences=int((tokens > 0).sum()))


def token_weights(
    response_mask: Tensor,
    mode: str,
    *,
    global_tokens: int,
    global_sequences: int,
    lengths: Tensor | None = None,
    horizon: int | None = None,
) -> Tensor:
    """Compute each token's weight in the mini-batch's loss; 0 outside the mask.

    - ``token-mean``: mean over all trained tokens (Yu et al. 2025, arXiv:2503.14476).
    - ``token-sum``: sum over all trained tokens, so that a step grows with the mini-batch.
    - ``seq-mean-token-sum``: sum over a sequence's tokens, mean over sequences.
    - ``seq-mean-token-mean``: mean over a sequence's tokens, mean over sequences (Shao et al. 2024, eq. 3).
    - ``seq-mean-token-sum-norm``: sum over a sequence's tokens divided by ``horizon``, mean over sequences
      (Liu et al. 2025, arXiv:2503.20783).

    A sequence without a trained token counts in no mean.

    Args:
        global_tokens: trained tokens of the whole mini-batch, over all ranks (see :func:`loss_counts`).
        lengths: ``[b]`` integers that add up to ``n``: the tokens of each packed sequence. Sequences must be complete.
        horizon: the divisor of ``seq-mean-token-sum-norm``.

    Returns:
        float32, same shape as ``response_mask``.

    Raises:
        ConfigError: the mode is unknown.
        ValueError: ``horizon`` is missing, or a packed mask comes without ``lengths``.
    """
    counts = _sequence_token_counts(response_mask, lengths)
    sequence_tokens = expand_to_tokens(counts, response_mask, lengths)
    weight = AGGREGATIONS[mode](_Normalizers(sequence_tokens, LossCounts(global_tokens, global_sequences), horizon))
    return (response_mask.bool() * weight).float()


def clipped_value_loss(vpreds: Tensor, values: Tensor, returns: Tensor, cliprange_value: float) -> TokenLoss:
    """Compute a critic's clipped squared error (PPO): no gradient for values far from the old ones.

    ``0.5 * max((v - G)^2, (clip(v, V - c, V + c) - G)^2)``, as in the reference implementation of Schulman et al. 2017.
    Tensors are rectangles ``[b, R]`` or packed tokens ``[n]``.

    Args:
        vpreds: current values ``v``, with gradients.
        values: ``V``, before this step's updates.
        returns: regression targets ``G``.
        cliprange_value: ``c``.

    Returns:
        The loss, with diagnostics ``vf_clipfrac`` (1 if the clip removed the gradient) and ``vpred_mean``.
    """
    clipped_values = torch.minimum(torch.maximum(vpreds, values - cliprange_value), values + cliprange_value)
    plain, clipped = (vpreds - returns) ** 2, (clipped_values - returns) ** 2
    return TokenLoss(
        loss=0.5 * torch.maximum(plain, clipped),
        diagnostics={"vf_clipfrac": (clipped > plain).to(plain.dtype), "vpred_mean": vpreds.detach()},
    )
