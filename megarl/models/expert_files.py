"""Tensors of a file that hold a matrix, or a bias, of every expert of a layer, in bfloat16 or MXFP4.

The weight map has one tensor per expert. It is entry ``index`` of the file's tensor, with the dimensions reversed: the
file has ``[experts, inputs, outputs]`` for the weight map's ``[outputs, inputs]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.models.model_config import ModelConfig
from megarl.models.registry import family_of

BLOCK = 32
"""Neighbouring inputs that share a scale in MXFP4."""
BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the names of the two tensors that hold one in MXFP4."""

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class StackedPart(NamedTuple):
    """Place of an expert's tensor: the tensor of the file, and the number of the expert in it."""

    name: str
    index: int


def stacked_parts(config: ModelConfig) -> dict[str, StackedPart]:
    """Return the place in a file of each tensor of an expert, by its name; empty if a file has one tensor for each."""
    if config.experts is None:
        return {}
    stacked = [declared for declared in family_of(config.architecture).layer if declared.hf[0].stacked]
    return {
        tensor.name.format(layer=layer, expert=expert): StackedPart(tensor.stacked.format(layer=layer), expert)
        for layer in range(config.num_layers)
        for declared in stacked
        if declared.when is None or declared.when(config, layer)
        for tensor in declared.hf
        for expert in range(config.experts.count)
    }


def file_shapes(shapes: Mapping[str, tuple[int, ...]], parts: Mapping[str, StackedPart]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a file from those of the weight map, in the same order.

    Args:
        shapes: shape of each tensor of the weight map.
        parts: places of the tensors of experts (:func:`stacked_parts`).
    """
    result: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        part = parts.get(name)
        result[name if part is None else part.name] = shape if part is None else (part.index + 1, *reversed(shape))
    return result


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Compute the bfloat16 values of MXFP4 blocks (https://arxiv.org/abs/2310.10537), as transformers does.

    Args:
        blocks: ``[..., blocks, 16]`` uint8, two numbers of four bits (E2M1) each, the lower half first.
        scales: ``[..., blocks]`` uint8, the exponent of each block's power of two plus 127.

    Returns:
        ``[..., 32 * blocks]``.
    """
    table = torch.tensor([*_FP4, *(-value for value in _FP4)], dtype=torch.bfloat16, device=blocks.device)
    halves = torch.stack([blocks & 0x0F, blocks >> 4], dim=-1).flatten(-2)
    exponents = scales.to(torch.int32)[..., None] - 127
    return torch.ldexp(table[halves.to(torch.int32)], exponents).flatten(-2)
