"""Rotary position embedding (Su et al., RoFormer, https://arxiv.org/abs/2104.09864), halves rotated as in Llama."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.models.rope import inverse_frequencies

__all__ = ["inverse_frequencies", "rotate", "rotation_table"]


def rotation_table(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine ``[tokens, 1, head_dim / 2]`` of each token's rotations; the angles are taken in float32."""
    angles = (positions.to(torch.float32)[:, None] * frequencies)[:, None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates ``heads [tokens, heads, head_dim]`` by a table of :func:`rotation_table`; differentiable in ``heads``."""
    result: Tensor = _Rotate.apply(heads, cosine, sine)
    return result


class _Rotate(torch.autograd.Function):
    """The backward of a rotation is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _turn(heads, cosine, sine)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _turn(grads[0], cosine, -sine), None, None


def _turn(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    result = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    upper, lower = result.chunk(2, dim=-1)
    torch.mul(first, cosine, out=upper).addcmul_(second, sine, value=-1)
    torch.mul(second, cosine, out=lower).addcmul_(first, sine)
    return result
