"""Reward shaping before advantages: reference quality, alignment, missing end-of-sequence, and reward whitening.

Tensors over tokens are rectangles, or with ``lengths`` packed tokens (:mod:`megarl.algorithms.masked`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.algorithms.masked import (
    Moments,
    expand_to_tokens,
    flat_tokens,
    kept_before,
    masked_whiten,
    sequence_means,
    sequence_starts,
)


def sequence_quality(ref_log_prob: Tensor, mask: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Compute the reference quality of a response: the geometric mean of its token probabilities (inverse perplexity).

    ``q = exp(sum_t m_t log p_t / sum_t m_t)``, in (0, 1]; 1 only if the reference is certain of every token. The mean
    makes responses of different lengths comparable; their plain likelihood falls with every token.

    Args:
        ref_log_prob: in nats.

    Returns:
        ``[b]`` float64; 1 for a row without a token in the mask.
    """
    return sequence_means(ref_log_prob, mask, lengths).exp()


def blend_quality(
    scores: Tensor, quality: Tensor, rows: Tensor, last: Tensor, weight: float, lengths: Tensor | None = None
) -> Tensor:
    """Blend scores with the reference quality: ``(1 - w) * scores``, plus ``w * quality`` at the last response token.

    The sum over a row becomes ``(1 - w) * sum + w * quality``. A score on the last token stays on that token.

    Args:
        scores: rewards per token.
        quality: ``[b]``.
        rows: ``[b]`` bool, the rows to blend; others keep their scores.
        last: ``[b]`` int64, index of each row's last response token in its row.
        weight: ``w`` in [0, 1].
    """
    blended = (1 - weight) * scores.double()
    blended = add_at_last(blended, weight * quality, rows, last, lengths)
    return torch.where(expand_to_tokens(rows, scores, lengths), blended, scores.double()).to(scores.dtype)


def add_at_last(rewards: Tensor, amounts: Tensor, rows: Tensor, last: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Add ``amounts [b]`` to rewards per token at the last response token of the ``rows``, ``[b]`` bool."""
    flat, counts = flat_tokens(rewards, lengths)
    places = (sequence_starts(counts) + last)[rows]
    return flat.index_add(0, places, amounts[rows].to(rewards.dtype)).view_as(rewards)


def row_cosine_similarity(left: Tensor, right: Tensor) -> Tensor:
    """Compute the cosine similarity of corresponding rows of ``[b, hidden]``, ``[b]`` float64; 0 for a zero row."""
    return F.cosine_similarity(left.double(), right.double(), dim=-1, eps=1e-12)


def on_trained_tokens(rewards: Tensor, response_mask: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Move rewards onto the mask: each to the trained token before it, or to the first trained token.

    The sum over a row does not change. A row without a trained token gets no rewards.
    """
    (flat, counts), (kept, _) = flat_tokens(rewards, lengths), flat_tokens(response_mask.bool(), lengths)
    moved = torch.where(kept, flat, 0.0)
    late = (~kept & (flat != 0)).nonzero()[:, 0]
    if len(late):
        place, first, trains = kept_before(kept, counts, late)
        target = torch.maximum(place, first)[trains]
        moved.index_add_(0, kept.nonzero()[target, 0], flat[late[trains]])
    return moved.view_as(rewards)


def whiten_rewards(rewards: Tensor, response_mask: Tensor, moments: Moments | None = None) -> Tensor:
    """Scale rewards to variance 1 over all trained tokens of a batch, with an unchanged mean.

    ``(r - mean) / std + mean`` over the tokens of the mask, 0 elsewhere (Stiennon et al. 2020, arXiv:2009.01325, whose
    code does so before GAE).

    Args:
        rewards: on the mask, see :func:`on_trained_tokens`.
        moments: over all processes; None = of these rewards.
    """
    kept = response_mask.bool()
    moments = Moments.of(rewards[kept]) if moments is None else moments
    return torch.where(kept, masked_whiten(rewards, kept, moments) + moments.mean, torch.zeros_like(rewards))
