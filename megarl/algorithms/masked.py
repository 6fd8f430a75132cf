"""Masked statistics: moments that merge, and reductions per sequence of rectangles and packed tokens.

Packed tokens are all sequences' tokens in order, without padding; ``lengths [b]`` counts the tokens of each sequence.
A function with an argument ``lengths`` accepts both forms: rectangles with ``lengths=None``. A rectangle is packed
tokens of sequences of equal length, so :func:`flat_tokens` converts it without a copy.

An entry outside the mask may hold any value, NaN included: it is never read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


def full_precision(*tensors: Tensor) -> list[Tensor]:
    """Convert floating-point tensors to their widest type, at least float32; numpy has no bfloat16."""
    widest = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors], torch.float32)
    return [tensor.to(widest) for tensor in tensors]


def select_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """Return the entries of ``mask`` (bool, same shape) in order, ``[k]``; a view if the mask has no hole."""
    return values.reshape(-1) if bool(mask.all()) else values[mask]


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Average ``values`` over the entries of ``mask`` (same shape, 0 or 1); the mean over an empty mask is 0."""
    kept = mask.bool()
    return torch.where(kept, values, torch.zeros_like(values)).sum() / kept.sum().clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, moments: Moments | None = None) -> Tensor:
    """Whiten the entries of the mask to mean 0 and variance 1; all other entries become 0.

    ``(x - mean) / sqrt(variance + 1e-8)`` with the sample variance, in double precision. A constant becomes 0.

    Args:
        mask: 0 or 1, in the shape of ``values``.
        moments: over all processes; None = of these entries.
    """
    kept = mask.bool()
    entries = select_tokens(values, kept)
    moments = Moments.of(entries) if moments is None else moments
    return torch.zeros_like(values).masked_scatter_(kept, moments.whiten(entries))


def sequence_sums(values: Tensor, mask: Tensor, lengths: Tensor | None) -> Tensor:
    """Sum ``values`` over the trained tokens of each sequence, ``[b]`` in double precision; differentiable.

    Args:
        values: ``[b, R]``, or packed ``[n]`` together with ``lengths``; entries outside the mask may hold any value.
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
    """Average over each sequence's trained tokens, ``[b]`` double, 0 without any; see :func:`sequence_sums`."""
    return sequence_sums(values, mask, lengths) / sequence_counts(mask, lengths).clamp(min=1)


def sequence_maxima(values: Tensor, mask: Tensor, lengths: Tensor | None, initial: float) -> Tensor:
    """Return the maximum of ``initial`` and each sequence's trained values, ``[b]``; see :func:`sequence_sums`."""
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
    """Find the kept token before each of ``tokens``.

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
    """View values of either form as packed tokens ``[n]``; return them and the lengths ``[b]``."""
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


@dataclass(frozen=True)
class Moments:
    """Count, mean, spread and range of numbers.

    Attributes:
        mean: 0 for none.
        squares: sum of the squared deviations from the mean.
        least: infinity for none.
        most: minus infinity for none.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    @classmethod
    def of(cls, values: Tensor) -> Moments:
        """Compute the moments of a tensor's entries."""
        if not values.numel():
            return cls()
        doubles = values.detach().double()
        mean, (least, most) = doubles.mean(), doubles.aminmax()
        squares = (doubles - mean).square_().sum()
        return cls(doubles.numel(), mean.item(), squares.item(), least.item(), most.item())

    @classmethod
    def merged(cls, parts: Sequence[Moments]) -> Moments:
        """Merge the moments of disjoint parts."""
        parts = [part for part in parts if part.count]
        if len(parts) < 2:
            return parts[0] if parts else cls()
        count = sum(part.count for part in parts)
        mean = math.fsum(part.count * part.mean for part in parts) / count
        squares = math.fsum(part.squares + part.count * (part.mean - mean) ** 2 for part in parts)
        return cls(count, mean, squares, min(part.least for part in parts), max(part.most for part in parts))

    @property
    def sample_variance(self) -> float:
        """Variance with divisor ``n - 1``; 0 for fewer than two numbers."""
        return self.squares / max(1, self.count - 1)

    @property
    def deviation(self) -> float:
        """Standard deviation with divisor ``n``; 0 for none."""
        return math.sqrt(self.squares / max(1, self.count))

    def whiten(self, values: Tensor) -> Tensor:
        """Shift and scale values by these moments: ``(x - mean) / sqrt(variance + 1e-8)``, in their own type."""
        return ((values.double() - self.mean) / math.sqrt(self.sample_variance + 1e-8)).to(values.dtype)


class PairMoments(NamedTuple):
    """Moments of two paired sets of numbers, and their co-moment.

    Attributes:
        products: sum of the products of both deviations.
    """

    first: Moments = Moments()
    second: Moments = Moments()
    products: float = 0.0

    @classmethod
    def of(cls, first: Tensor, second: Tensor) -> PairMoments:
        """Compute the moments of two tensors of one shape."""
        if not first.numel():
            return cls()
        a, b = first.double().flatten(), second.double().flatten()
        return cls(Moments.of(a), Moments.of(b), torch.dot(a - a.mean(), b - b.mean()).item())

    @classmethod
    def merged(cls, parts: Sequence[PairMoments]) -> PairMoments:
        """Merge the moments of disjoint parts."""
        first = Moments.merged([part.first for part in parts])
        second = Moments.merged([part.second for part in parts])
        products = math.fsum(
            part.products + part.first.count * (part.first.mean - first.mean) * (part.second.mean - second.mean)
            for part in parts
        )
        return cls(first, second, products)

    @property
    def correlation(self) -> float | None:
        """Pearson correlation; None if one set is constant."""
        scale = math.sqrt(self.first.squares * self.second.squares)
        return self.products / scale if scale > 0 else None


def explained_variance(errors: Moments, targets: Moments) -> float:
    """Compute a critic's explained variance ``1 - Var(G - V) / (Var(G) + 1e-5)``.

    1 is a perfect critic, 0 a critic no better than a constant, a negative value a worse one.

    Args:
        errors: of ``G - V`` over the trained tokens.
        targets: of the returns ``G``.
    """
    return 1.0 - errors.sample_variance / (targets.sample_variance + 1e-5)  # finite for constant returns
