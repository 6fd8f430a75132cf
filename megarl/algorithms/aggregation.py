"""Loss aggregation (``loss_agg_mode``): per-token weights that do not depend on the micro-batch split.

A mini-batch is split over ranks and micro-batches. A mean per part would change the loss with the split. Instead the
counts of the whole mini-batch are known before the first backward pass, and each token gets its weight in the global
loss. The loss is ``sum(weight * loss)`` over tokens, micro-batches and data-parallel ranks in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.masked import expand_to_tokens, sequence_sums
from megarl.base.registry import Registry


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


@AGGREGATIONS.register("token-mean")
def _token_mean(normalizers: _Normalizers) -> float:
    return 1.0 / max(normalizers.counts.tokens, 1)


@AGGREGATIONS.register("token-sum")
def _token_sum(normalizers: _Normalizers) -> float:
    return 1.0


@AGGREGATIONS.register("seq-mean-token-sum")
def _seq_mean_token_sum(normalizers: _Normalizers) -> float:
    return 1.0 / max(normalizers.counts.sequences, 1)


@AGGREGATIONS.register("seq-mean-token-mean")
def _seq_mean_token_mean(normalizers: _Normalizers) -> Tensor:
    return 1.0 / (normalizers.sequence_tokens.clamp(min=1) * max(normalizers.counts.sequences, 1))


@AGGREGATIONS.register("seq-mean-token-sum-norm")
def _seq_mean_token_sum_norm(normalizers: _Normalizers) -> float:
    if not normalizers.horizon:
        raise ValueError("loss_agg_mode 'seq-mean-token-sum-norm' needs `horizon`, the longest response in tokens")
    return 1.0 / (max(normalizers.counts.sequences, 1) * normalizers.horizon)


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
    """Compute the weight of each token's loss in the loss of the whole mini-batch; 0 outside the mask.

    - ``token-mean``: mean over all trained tokens (Yu et al. 2025, arXiv:2503.14476).
    - ``token-sum``: sum over all trained tokens, so that a step grows with the mini-batch.
    - ``seq-mean-token-sum``: sum over a sequence's tokens, mean over sequences.
    - ``seq-mean-token-mean``: mean over a sequence's tokens, mean over sequences (Shao et al. 2024, eq. 3).
    - ``seq-mean-token-sum-norm``: sum over a sequence's tokens divided by ``horizon``, mean over sequences
      (Liu et al. 2025, arXiv:2503.20783).

    A sequence without a trained token counts in no mean.

    Args:
        response_mask: ``[b, R]``, or packed ``[n]`` together with ``lengths``; 1 for trained tokens.
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
