"""Statistics over the entries of a tensor that a mask selects.

An entry outside the mask may hold anything, NaN included: it is never read.
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of the ``values`` where ``mask`` (same shape, 0 or 1) is set, over ``dim`` or over everything."""
    kept = torch.where(mask.bool(), values, torch.zeros_like(values))
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the ``values`` where ``mask`` (same shape, 0 or 1) is set, over ``dim`` or over everything.

    Where nothing is selected the mean is 0.
    """
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def masked_variance(values: Tensor, mask: Tensor) -> Tensor:
    """Sample variance (divisor ``n - 1``) of the selected entries, a scalar; 0 where fewer than two are selected."""
    count = mask.bool().sum()
    squares = masked_sum((values - masked_mean(values, mask)) ** 2, mask)
    return squares / (count - 1).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Selected entries shifted to mean 0 and scaled to variance 1; the others become 0.

    ``(x - mean) / sqrt(variance + eps)`` with the sample variance, taken in double precision.

    Args:
        values: any shape.
        mask: same shape, 0 or 1.
        eps: keeps a constant input finite (it becomes 0).

    Returns:
        Same shape and type as ``values``.
    """
    wide = values.double()
    white = (wide - masked_mean(wide, mask)) * torch.rsqrt(masked_variance(wide, mask) + eps)
    return torch.where(mask.bool(), white, torch.zeros_like(white)).to(values.dtype)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, eps: float = 1e-5) -> float:
    """Share of the variance of the returns that the critic's values explain: ``1 - Var(G - V) / (Var(G) + eps)``.

    1 is a perfect critic, 0 one no better than a constant, negative one that is worse. All tensors have one shape.
    """
    wide_values, wide_returns = values.double(), returns.double()
    unexplained = masked_variance(wide_returns - wide_values, mask)
    return (1.0 - unexplained / (masked_variance(wide_returns, mask) + eps)).item()
