"""Rotary position embedding (Su et al., RoFormer, https://arxiv.org/abs/2104.09864), halves rotated as in Llama."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megarl.models import ModelConfig


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Radians per position of each rotated pair, float32 ``[head_dim / 2]``.

    With ``rope_type: llama3`` long wavelengths are stretched by ``factor`` and medium ones in part, as defined in
    https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py (``apply_scaling``).
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    # In the order of operations of transformers: one rounding more is visible at large positions.
    turns = float(scaling["original_max_position_embeddings"]) / (2 * math.pi / frequencies)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - keep) * frequencies / factor + keep * frequencies


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
