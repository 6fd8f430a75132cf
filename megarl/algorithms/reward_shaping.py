"""Reward shaping before advantages: reference quality, alignment, missing end-of-sequence, and reward whitening."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.algorithms.masked import masked_mean, masked_whiten


def sequence_quality(ref_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Compute the reference quality of a response: the geometric mean of its token probabilities (inverse perplexity).

    ``q = exp(sum_t m_t log p_t / sum_t m_t)``, in (0, 1]; 1 only if the reference is certain of every token. The mean
    makes responses of different lengths comparable; their plain likelihood falls with every token.

    Args:
        ref_log_prob: ``[b, R]``, in nats.
        mask: ``[b, R]``, 1 for tokens that count; other entries are not read.

    Returns:
        ``[b]`` float64; 1 for a row without a counted token.
    """
    return masked_mean(ref_log_prob.double(), mask, dim=-1).exp()


def blend_quality(scores: Tensor, quality: Tensor, rows: Tensor, last: Tensor, weight: float) -> Tensor:
    """Blend scores with the reference quality: ``(1 - w) * scores``, plus ``w * quality`` at the last response token.

    The sum over a row becomes ``(1 - w) * sum + w * quality``. A score on the last token stays on that token.

    Args:
        scores: ``[b, R]`` rewards per token.
        quality: ``[b]``.
        rows: ``[b]`` bool, the rows to blend; others keep their scores.
        last: ``[b]`` int64, index of each row's last response token.
        weight: ``w`` in [0, 1].
    """
    blended = (1 - weight) * scores.double()
    blended = add_at_last(blended, weight * quality, rows, last)
    return torch.where(rows[:, None], blended, scores.double()).to(scores.dtype)


def add_at_last(rewards: Tensor, amounts: Tensor, rows: Tensor, last: Tensor) -> Tensor:
    """Add ``amounts [b]`` to ``rewards [b, R]`` at the last response token of the selected ``rows``.

    Args:
        rewards: rewards per token.
        amounts: one per row, in the rewards' unit.
        rows: ``[b]`` bool, the rows to change.
        last: ``[b]`` int64, index of each row's last response token.
    """
    result, numbers = rewards.clone(), rows.nonzero()[:, 0]
    result[numbers, last[numbers]] += amounts[numbers].to(rewards.dtype)
    return result


def row_cosine_similarity(left: Tensor, right: Tensor) -> Tensor:
    """Compute the cosine similarity of corresponding rows of ``[b, hidden]``, ``[b]`` float64; 0 for a zero row."""
    return F.cosine_similarity(left.double(), right.double(), dim=-1, eps=1e-12)


def missing_eos(responses: Tensor, last: Tensor, eos_token_ids: Collection[int]) -> Tensor:
    """Flag responses that do not end with an end-of-sequence token, ``[b]`` bool.

    Args:
        responses: ``[b, R]`` token ids.
        last: ``[b]`` int64, index of each row's last response token.
        eos_token_ids: the tokens that end a sequence.
    """
    ends = torch.tensor(sorted(eos_token_ids), dtype=responses.dtype, device=responses.device)
    return ~torch.isin(responses.gather(1, last[:, None])[:, 0], ends)


def on_trained_tokens(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Move rewards ``[b, R]`` onto the mask: each to the trained token before it, or to the first trained token.

    The sum over a row does not change. A row without a trained token gets no rewards.
    """
    kept = response_mask.bool()
    positions = torch.arange(rewards.shape[1], device=rewards.device).expand_as(rewards)
    before = torch.where(kept, positions, -1).cummax(-1).values
    first = kept.long().argmax(-1, keepdim=True)
    moved = torch.zeros_like(rewards).scatter_add(1, torch.where(before < 0, first, before), rewards)
    return torch.where(kept, moved, torch.zeros_like(moved))


def whiten_rewards(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Scale rewards to variance 1 over all trained tokens of a batch, with an unchanged mean.

    ``(r - mean) / std + mean`` over the tokens of the mask, 0 elsewhere (Stiennon et al. 2020, arXiv:2009.01325, whose
    code does so before GAE). Both tensors are ``[b, R]``; a reward outside the mask is first moved onto it.
    """
    moved = on_trained_tokens(rewards, response_mask)
    kept = response_mask.bool()
    mean = masked_mean(moved.double(), kept).to(rewards.dtype)
    return torch.where(kept, masked_whiten(moved, kept) + mean, torch.zeros_like(moved))
