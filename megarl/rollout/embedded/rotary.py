"""Rotary position embeddings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.models import ModelConfig


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each pair of dimensions: ``theta^(-2i/d)``, stretched where Llama 3 asks for it.

    The stretching (``rope_type: llama3``) divides the frequency of waves longer than ``original / low_freq_factor``
    by ``factor``, leaves those shorter than ``original / high_freq_factor``, and interpolates between.

    Returns:
        float32 ``[head_dim / 2]``.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    waves_in_context = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((waves_in_context - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


class RotaryTable:
    """Cosines and sines of every position, looked up per token.

    Args:
        config: the model.
        length: positions ``0 .. length - 1``.
        dtype: number format of the activations to rotate.
        device: where they are.
    """

    def __init__(self, config: ModelConfig, length: int, dtype: torch.dtype, device: torch.device) -> None:
        angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse_frequencies(config))
        self._cos = torch.cat([angles.cos(), angles.cos()], -1).to(device, dtype)
        # The first half's partner enters with a minus sign: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin).
        self._sin = torch.cat([-angles.sin(), angles.sin()], -1).to(device, dtype)
        self._half = config.head_dim // 2

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines ``[tokens, 1, head_dim]`` of the given positions ``[tokens]``."""
        return self._cos[positions][:, None], self._sin[positions][:, None]

    def rotate(self, heads: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Rotates ``[tokens, heads, head_dim]`` by what :meth:`at` gave; a new tensor."""
        cos, sin = angles
        return torch.addcmul(heads * cos, heads.roll(self._half, -1), sin)
