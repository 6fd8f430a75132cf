"""Values of weights in MXFP4, the format of the published gpt-oss checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Compute the bfloat16 values of MXFP4 blocks (https://arxiv.org/abs/2310.10537), as transformers does.

    Args:
        blocks: ``[..., blocks, 16]`` uint8, two numbers of four bits (E2M1) each, the lower half first.
        scales: ``[..., blocks]`` uint8, the exponent of each block's power of two plus 127.

    Returns:
        ``[..., 32 * blocks]``.
    """
    table = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.bfloat16, device=blocks.device)
    halves = torch.stack([blocks & 0x0F, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.to(torch.int32)[..., None] - 127
    return torch.ldexp(table[halves.to(torch.int32)], exponents).flatten(-2)
