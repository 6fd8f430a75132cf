"""Masked statistics over tensors, and per-sequence reductions of rectangles ``[b, R]`` and packed tokens ``[n]``.

Packed tokens are those of all sequences in order, without padding; ``lengths [b]`` counts the tokens of each sequence.
A function with an argument ``lengths`` accepts both forms: rectangles with ``lengths=None``. A rectangle is packed
tokens of sequences of equal length, so :func:`flat_tokens` converts it without a copy.

An entry outside the mask may hold any value, NaN included: it is never read.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.moments import Moments


def full_precision(*tensors: Tensor) -> list[Tensor]:
    """Convert floating-point tensors to their widest type, at least float32; numpy has no bfloat16."""
    widest = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors], torch.float32)
    return [tensor.to(widest) for tensor in tensors]


def select_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """Return the entries of ``mask`` (bool, same shape) in order, ``[k]``; a view if the mask has no hole."""
    return values.reshape(-1) if bool(mask.all()) else values[mask]


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum ``values`` over the entries of ``mask`` (same shape, 0 or 1), along ``dim`` or over all dimensions."""
    kept = torch.where(mask.bool(), values, torch.zeros_like(values))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Average ``values`` over the entries of ``mask`` (same shape, 0 or 1), along ``dim`` or over all dimensions.

    The mean over an empty mask is 0.
    """
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, moments: Moments | None = None) -> Tensor:
    """Whiten the entries of the mask to mean 0 and variance 1; all other entries become 0.

    ``(x - mean) / sqrt(variance + 1e-8)`` with the sample variance, in double precision. A constant becomes 0.

    Args:
        values: any shape.
        mask: same shape, 0 or 1.
        moments: of the entries of all processes; None = of these entries.

    Returns:
        Same shape and type as ``values``.
    """
    kept = mask.bool()
    entries = select_tokens(values, kept)
    moments = Moments.of(entries) if moments is None else moments
    return torch.zeros_like(values).masked_scatter_(kept, moments.whiten(entries))


def sequence_sums(values: Tensor, mask: Tensor, lengths: Tensor | None) -> Tensor:
    """Sum ``values`` over the trained tokens of each sequence, ``[b]`` in double precision; differentiable.

    Args:
        values: ``[b, R]``, or packed ``[n]`` together with ``lengths``; entries outside the mask may hold any value.
        mask: same shape, 0 or 1.
        lengths: ``[b]`` integers that add up to ``n``: the tokens of each packed sequence. Sequences must be complete.

    Raises:
        ValueError: packed values come without ``lengths``.
    """
    _check_form(values, lengths)
    if lengths is not None and not values.requires_grad and values.device.type == "cpu":
        return _array_sums(values, mask, lengths)
    kept = torch.where(mask.bool(), values.double(), 0.0)
    if lengths is None:
        return kept.sum(-1)
    sequence = expand_to_tokens(torch.arange(len(lengths), device=values.device), values, lengths)
    empty = torch.zeros(len(lengths), dtype=torch.double, device=values.device)
    return empty.index_add(0, sequence, kept)


def _array_sums(values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Compute :func:`sequence_sums` of packed tokens without gradients, with little memory: batches may be large."""
    kept = values if mask is values or bool(mask.all()) else torch.where(mask.bool(), values, torch.zeros_like(values))
    if kept.dtype == torch.bfloat16:
        (kept,) = full_precision(kept)
    counts = lengths.numpy(force=True)
    sums, filled = np.zeros(len(counts)), counts > 0
    if filled.any():  # reduceat gives an empty sequence the value of the next one
        starts = (np.cumsum(counts) - counts)[filled]
        sums[filled] = np.add.reduceat(kept.numpy(), starts, dtype=np.float64)
    return torch.from_numpy(sums)


def sequence_means(values: Tensor, mask: Tensor, lengths: Tensor | None) -> Tensor:
    """Average ``values`` over the trained tokens of each sequence, ``[b]`` double, 0 for a sequence without any.

    Arguments and errors are those of :func:`sequence_sums`.
    """
    return sequence_sums(values, mask, lengths) / sequence_counts(mask, lengths).clamp(min=1)


def sequence_maxima(values: Tensor, mask: Tensor, lengths: Tensor | None, initial: float) -> Tensor:
    """Return the maximum of ``values`` and ``initial`` over the trained tokens of each sequence, ``[b]``.

    Arguments and errors are those of :func:`sequence_sums`.
    """
    _check_form(values, lengths)
    kept = torch.where(mask.bool(), values, initial)
    if lengths is None:
        return kept.amax(-1).clamp(min=initial)
    sequence = expand_to_tokens(torch.arange(len(lengths), device=values.device), values, lengths)
    empty = torch.full((len(lengths),), initial, dtype=values.dtype, device=values.device)
    return empty.scatter_reduce(0, sequence, kept, "amax")


def have_tokens(mask: Tensor, lengths: Tensor | None) -> Tensor:
    """Mark the sequences with a token in the mask, ``[b]`` bool; see :func:`sequence_sums` for the forms."""
    if lengths is None:
        return mask.bool().any(-1)
    return sequence_counts(mask, lengths) > 0


def sequence_counts(mask: Tensor, lengths: Tensor | None) -> Tensor:
    """Count the tokens of the mask in each sequence, ``[b]`` int64; see :func:`sequence_sums` for the forms."""
    _check_form(mask, lengths)
    if lengths is None:
        return mask.bool().sum(-1)
    return sequence_sums(mask, mask, lengths).long()


def sequence_starts(lengths: Tensor) -> Tensor:
    """Return the position of each sequence's first packed token, ``[b]``."""
    return lengths.cumsum(0) - lengths


def kept_before(kept: Tensor, lengths: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the token of the mask before each of the given tokens.

    Args:
        kept: ``[n]`` bool, mask over packed tokens.
        lengths: ``[b]``.
        tokens: ``[k]`` positions outside the mask.

    Returns:
        By token ``[k]``: number of the last kept token before it, counted over all kept tokens; number of the first
        kept token of its sequence; whether its sequence has one. The first number is below the second if no kept
        token of the sequence precedes it.
    """
    counts, sequence = sequence_counts(kept, lengths), torch.searchsorted(lengths.cumsum(0), tokens, right=True)
    return kept.cumsum(0)[tokens] - 1, sequence_starts(counts)[sequence], counts[sequence] > 0


def flat_tokens(values: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """View values of either form as packed tokens ``[n]``; returns them and the lengths ``[b]``.

    Raises:
        ValueError: packed values come without ``lengths``.
    """
    _check_form(values, lengths)
    if lengths is not None:
        return values, lengths.to(values.device)
    return values.reshape(-1), torch.full((values.shape[0],), values.shape[1], device=values.device)


def _check_form(values: Tensor, lengths: Tensor | None) -> None:
    if (lengths is None) != (values.dim() == 2):
        raise ValueError(
            f"tokens of shape {tuple(values.shape)}: rectangles have 2 dimensions, packed tokens `lengths`"
        )


def expand_to_tokens(per_sequence: Tensor, like: Tensor, lengths: Tensor | None) -> Tensor:
    """Repeat a number per sequence ``[b]`` at each of its tokens, in the shape of ``like``; differentiable."""
    if lengths is None:
        return per_sequence[:, None].expand_as(like)
    # With its size known, a GPU need not report it to the host.
    return torch.repeat_interleave(per_sequence, lengths.to(per_sequence.device), output_size=len(like))
