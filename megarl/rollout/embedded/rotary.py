"""Rotary position embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.models import ModelConfig
from megarl.models.rope import attention_factor, inverse_frequencies


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
        cos, sin = angles.cos() * attention_factor(config), angles.sin() * attention_factor(config)
        self._cos = torch.cat([cos, cos], -1).to(device, dtype)
        # The first half's partner enters with a minus sign: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin).
        self._sin = torch.cat([-sin, sin], -1).to(device, dtype)
        self._half = config.head_dim // 2

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines ``[tokens, 1, head_dim]`` of the given positions ``[tokens]``."""
        return self._cos[positions][:, None], self._sin[positions][:, None]

    def rotate(self, heads: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Rotates ``[tokens, heads, head_dim]`` by what :meth:`at` gave; a new tensor."""
        cos, sin = angles
        return torch.addcmul(heads * cos, heads.roll(self._half, -1), sin)
