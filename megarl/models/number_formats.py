"""Number formats of published weights: blockwise FP8 (DeepSeek-V3) and MXFP4 (gpt-oss).

Blockwise FP8 has e4m3 codes and one float32 scale per block of 128 x 128 weights (``weight`` and
``weight_scale_inv``): a weight is its code times the scale of its block. The blocks at the lower and right edges may be
smaller.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.models.declaration import FP8_BLOCK

FP8_DTYPE = torch.float8_e4m3fn
LARGEST_CODE = torch.finfo(FP8_DTYPE).max
SMALLEST = 2.0**-100
"""A block without a larger weight counts as zero: the reciprocal of its scale could overflow float32."""

_STRIP_ELEMENTS = 2**22
"""Weights that are converted to float32 at a time."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class BlockwiseFP8(NamedTuple):
    """A matrix in blockwise FP8.

    Attributes:
        codes: e4m3 ``[rows, columns]``.
        scales: float32 ``[ceil(rows / 128), ceil(columns / 128)]``.
        finite: bool scalar on the device: no weight was infinite or NaN, which have no codes.
    """

    codes: Tensor
    scales: Tensor
    finite: Tensor


def quantize_blocks(matrix: Tensor) -> BlockwiseFP8:
    """Quantize ``matrix [rows, columns]`` to blockwise FP8: the largest weight of each block gets the code 448.

    The codes are rounded to nearest, ties to even. A block of zeros has codes 0 and scale 1.
    """
    codes = torch.empty_like(matrix, dtype=FP8_DTYPE)
    scales = matrix.new_empty(scales_shape(matrix.shape), dtype=torch.float32)
    finite = torch.ones((), dtype=torch.bool, device=matrix.device)
    for rows, of_scales in _strips(matrix.shape):
        blocks = _blocks(matrix[rows].float())
        largest = blocks.abs().amax(dim=(1, 3))
        finite = finite & largest.isfinite().all()
        factors = torch.where(largest >= SMALLEST, largest.reciprocal() * LARGEST_CODE, 1.0)
        scaled = (blocks * factors[:, None, :, None]).clamp(-LARGEST_CODE, LARGEST_CODE)
        height, width = matrix[rows].shape
        codes[rows] = scaled.flatten(2).flatten(0, 1)[:height, :width].to(FP8_DTYPE)
        scales[of_scales] = 1.0 / factors
    return BlockwiseFP8(codes, scales, finite)


def dequantize_blocks(quantized: BlockwiseFP8, out: Tensor) -> None:
    """Write the weights that a matrix in blockwise FP8 stands for into ``out``, rounded to its dtype."""
    for rows, of_scales in _strips(out.shape):
        blocks = _blocks(quantized.codes[rows].float()) * quantized.scales[of_scales][:, None, :, None]
        height, width = out[rows].shape
        out[rows] = blocks.flatten(2).flatten(0, 1)[:height, :width].to(out.dtype)


def scales_shape(shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """Return the scales' shape for a matrix, or for matrices stacked along leading dimensions."""
    return (*shape[:-2], *(-(-size // FP8_BLOCK) for size in shape[-2:]))


def _blocks(strip: Tensor) -> Tensor:
    """Pad a strip with zeros to whole blocks: ``[block rows, 128, block columns, 128]``."""
    rows, columns = strip.shape
    padded: Tensor = F.pad(strip, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks: Tensor = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
    return blocks


def _strips(shape: torch.Size | tuple[int, ...]) -> list[tuple[slice, slice]]:
    """Cut a matrix into strips of whole block rows: slices of its rows and its scales' rows."""
    rows, columns = shape
    blocks = max(1, _STRIP_ELEMENTS // (columns * FP8_BLOCK))
    firsts = range(0, -(-rows // FP8_BLOCK), blocks)
    return [
        (slice(first * FP8_BLOCK, min(rows, (first + blocks) * FP8_BLOCK)), slice(first, first + blocks))
        for first in firsts
    ]


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
