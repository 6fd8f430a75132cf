"""Tensors of a file that stack a matrix or bias of all experts of a layer, in bfloat16 or MXFP4.

The weight map has one tensor per expert. It is an entry of the file's tensor, with the dimensions reversed: the
file has ``[experts, inputs, outputs]`` for the weight map's ``[outputs, inputs]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megarl.models.model_config import ModelConfig
from megarl.models.registry import family_of

BLOCK = 32
"""Neighbouring inputs that share a scale in MXFP4."""
BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the names of the two tensors that hold one in MXFP4."""


class StackedPart(NamedTuple):
    """Place of an expert's tensor: the tensor of the file, and the number of the expert in it."""

    name: str
    expert: int


def stacked_parts(config: ModelConfig) -> dict[str, StackedPart]:
    """Return the place of each tensor of an expert in the stacked tensors of a file, by its name.

    It is empty for models whose files have one tensor per expert.
    """
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
        parts: places of the tensors of experts (:func:`stacked_parts`).
    """
    result: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        part = parts.get(name)
        result[name if part is None else part.name] = shape if part is None else (part.expert + 1, *reversed(shape))
    return result
