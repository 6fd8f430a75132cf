"""Moments of a set of numbers that is spread over processes: computed from parts, then merged.

The merge is exact up to rounding in double precision (Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise
algorithm for computing sample variances").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


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
        """Compute the moments of all entries of a tensor."""
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

    def whiten(self, values: Tensor, eps: float = 1e-8) -> Tensor:
        """Shift and scale values by these moments: ``(x - mean) / sqrt(variance + eps)``, in their own type."""
        return ((values.double() - self.mean) / math.sqrt(self.sample_variance + eps)).to(values.dtype)


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


def explained_variance(errors: Moments, targets: Moments, eps: float = 1e-5) -> float:
    """Compute a critic's explained variance ``1 - Var(G - V) / (Var(G) + eps)``.

    1 is a perfect critic, 0 a critic no better than a constant, a negative value a worse one.

    Args:
        errors: of ``G - V`` over the trained tokens.
        targets: of the returns ``G``.
        eps: keeps constant returns finite.
    """
    return 1.0 - errors.sample_variance / (targets.sample_variance + eps)
