"""Collectives with parts of different sizes, which gloo refuses and experts shared by several ranks need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_uneven(even: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Megatron's gather along the first dimension, also where the ranks' parts differ in size.

    Args:
        even: Megatron's own, used where they do not.
    """

    def gather(
        part: Tensor,
        group: dist.ProcessGroup,
        output_split_sizes: Sequence[int] | None = None,
        *more: Any,
        **options: Any,
    ) -> Tensor:
        """Parts of all ranks, one under the other; communicates."""
        if output_split_sizes is None or group.size() == 1:
            return even(part, group, output_split_sizes, *more, **options)
        widest = part.new_zeros(max(output_split_sizes), *part.shape[1:])
        widest[: len(part)] = part
        parts = [torch.empty_like(widest) for _ in output_split_sizes]
        dist.all_gather(parts, widest, group=group)
        return torch.cat([whole[:size] for whole, size in zip(parts, output_split_sizes, strict=True)])

    return gather


def reduce_scatter_uneven(even: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Megatron's sum that leaves each rank its part, also where the parts differ in size.

    Args:
        even: Megatron's own, used where they do not.
    """

    def reduce_scatter(
        whole: Tensor,
        group: dist.ProcessGroup,
        input_split_sizes: Sequence[int] | None = None,
        *more: Any,
        **options: Any,
    ) -> Tensor:
        """This rank's part of the sum over ranks; communicates."""
        if input_split_sizes is None or group.size() == 1:
            return even(whole, group, input_split_sizes, *more, **options)
        total = whole.clone()
        dist.all_reduce(total, group=group)
        return total.split(list(input_split_sizes))[group.rank()].clone()

    return reduce_scatter
