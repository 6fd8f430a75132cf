"""Views of the tensors of experts in files that stack all experts of a layer, and of the stacked tensors.

The weight map has one tensor per expert, see :mod:`megarl.models.hf_folder`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from megarl.convert.source import whole_view
from megarl.convert.stored import Files, Scratch, StoredTensor, TensorView
from megarl.models.hf_folder import StackedPart, file_shapes
from megarl.models.number_formats import dequantize_mxfp4

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class ExpertView(TensorView):
    """A tensor of an expert: an entry of a tensor of a file, whose other dimensions are in reverse order."""

    stored: StoredTensor
    expert: int

    def read(self, first: int, last: int, dtype: torch.dtype, files: Files, scratch: Scratch) -> Tensor:
        """Read rows and transpose them."""
        out = scratch.tensor("rows", (last - first, *self.shape[1:]), dtype)
        entry = scratch.tensor("expert", (1, *reversed(out.shape)), dtype)
        self.stored.read((self.expert, *(0,) * (out.dim() - 1), first), entry, files, scratch)
        return out.copy_(entry[0].permute(*reversed(range(out.dim()))))


@dataclass(frozen=True)
class QuantizedExpertView(TensorView):
    """A matrix of an expert in MXFP4, read as bfloat16."""

    blocks: StoredTensor
    scales: StoredTensor
    expert: int

    def read(self, first: int, last: int, dtype: torch.dtype, files: Files, scratch: Scratch) -> Tensor:
        """Read rows and dequantize them."""
        blocks = scratch.tensor("blocks", (1, last - first, *self.blocks.shape[2:]), torch.uint8)
        scales = scratch.tensor("scales", (1, last - first, *self.scales.shape[2:]), torch.uint8)
        self.blocks.read((self.expert, first, 0, 0), blocks, files, scratch)
        self.scales.read((self.expert, first, 0), scales, files, scratch)
        out = scratch.tensor("rows", (last - first, *self.shape[1:]), dtype)
        return out.copy_(dequantize_mxfp4(blocks[0], scales[0]))


@dataclass(frozen=True)
class StackedView(TensorView):
    """A file's tensor of all experts; a row is an expert."""

    experts: tuple[TensorView, ...]

    def read(self, first: int, last: int, dtype: torch.dtype, files: Files, scratch: Scratch) -> Tensor:
        """Read the matrices of some experts and stack them."""
        out = scratch.tensor("stacked", (last - first, *self.shape[1:]), dtype)
        for row, view in enumerate(self.experts[first:last]):
            values = view.read(0, view.shape[0], dtype, files, scratch)
            out[row].copy_(values.permute(*reversed(range(values.dim()))))
        return out


def expert_view(name: str, stored: StoredTensor, expert: int) -> TensorView:
    """Return the view of an expert in a file's tensor of all experts."""
    whole = whole_view(name, stored)
    return ExpertView(name, stored.shape[:0:-1], stored.dtype, whole.regions, stored, expert)


def quantized_expert_view(
    name: str, shape: tuple[int, ...], blocks: StoredTensor, scales: StoredTensor, expert: int
) -> TensorView:
    """Return the view of an expert in a file's blocks and scales of all experts."""
    regions = (*whole_view(name, blocks).regions, *whole_view(name, scales).regions)
    return QuantizedExpertView(name, shape, torch.bfloat16, regions, blocks, scales, expert)


def stacked_views(tensors: Mapping[str, TensorView], parts: Mapping[str, StackedPart]) -> dict[str, TensorView]:
    """Replace the tensors of experts by a file's, in the same order (see ``hf_folder.stacked_parts``)."""
    experts: dict[str, list[TensorView]] = {}
    for name, view in tensors.items():
        if name in parts:
            experts.setdefault(parts[name].name, []).append(view)
    shapes = file_shapes({name: view.shape for name, view in tensors.items()}, parts)
    result = {}
    for name, shape in shapes.items():
        views = tuple(experts.get(name, ()))
        regions = tuple(region for view in views for region in view.regions)
        result[name] = StackedView(name, shape, views[0].dtype, regions, views) if views else tensors[name]
    return result


def by_file(values: Mapping[str, _Value], parts: Mapping[str, StackedPart]) -> dict[str, _Value]:
    """Name values by the tensors of a file instead of those of the weight map; of experts, the first one's."""
    result: dict[str, _Value] = {}
    for name, value in values.items():
        result.setdefault(parts[name].name if name in parts else name, value)
    return result
