"""Verification of weights: checksums, which two processes compare, and coverage of a tensor by slices."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.base.errors import MegarlError, WeightSyncError

_PIECE_BYTES = 2**20
_RECENT = 16
"""Boxes that are compared one by one: most tensors have few, and an array of few is slower."""
_ODD = (0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_COLUMN_BITS = 20
_COLUMNS = 2**16
"""Columns per sum: 16-bit numbers times 20-bit weights then stay below 2**52, exact in float64."""
_CHUNK = {"cpu": 2**18, "cuda": 2**24}
"""Numbers per conversion to float64: they fit a core's cache, or keep a GPU busy for longer than a launch takes."""


def tensor_checksum(tensor: Tensor) -> str:
    """Hash a tensor's dtype, shape and bytes with BLAKE2b (128 bits, hexadecimal).

    Equal for equal bits, on any device and with any strides: a NaN equals itself, 0.0 differs from -0.0.
    """
    digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    for part in data.split(_PIECE_BYTES):
        # a copy: torch cannot free or resize memory that was ever exposed as a numpy array
        digest.update(part.clone().numpy().data)
    return digest.hexdigest()


def rectangle_checksum(tensor: Tensor, start: Sequence[int], dtype: torch.dtype | None = None) -> int:
    """Compute a rectangle's additive checksum; checksums of tiles add up to the tensor's.

    Every 16-bit word of the rectangle is multiplied by a weight that depends on its position in the larger tensor, and
    the products are summed modulo 2**64. One number per shard then compares two layouts of a tensor and detects wrong
    and misplaced values. The sum runs on the tensor's device, exactly, in any order.

    Args:
        tensor: the rectangle, of a dtype of 2 or 4 bytes; any strides.
        start: its offset in the larger tensor, a number per dimension.
        dtype: dtype to convert to first; None = no conversion.

    Returns:
        A number in [0, 2**64).
    """
    if not tensor.numel():
        return 0
    *above, width = tensor.shape
    rows = tensor.detach().reshape(-1, width)
    words = (dtype or tensor.dtype).itemsize // 2
    weights = _row_weights(above, start[:-1], tensor.device)
    columns = _mixed(torch.arange(words * start[-1], words * (start[-1] + width), device=tensor.device), 0)
    columns = (columns & (2**_COLUMN_BITS - 1) | 1).double()
    height = max(1, _CHUNK.get(tensor.device.type, _CHUNK["cuda"]) // min(words * width, _COLUMNS))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part, weight in zip(rows.split(height), weights.split(height), strict=True):
        bits = part.to(dtype or tensor.dtype).contiguous().view(torch.int16)
        for cut, by in zip(bits.split(_COLUMNS, dim=1), columns.split(_COLUMNS), strict=True):
            total += (torch.mv(cut.double(), by).long() * weight).sum()
    return int(total) % 2**64


class ParamRectangle(NamedTuple):
    """A box of a local parameter, which is a rectangle of a larger tensor.

    Attributes:
        at: offset in the parameter.
        extent: shape in the parameter.
        start: offset in the larger tensor.
        shape: shape in the larger tensor, with the same elements.
        dtype: dtype of the compared weights, such as ``bfloat16``.
    """

    name: str
    at: Sequence[int]
    extent: Sequence[int]
    start: Sequence[int]
    shape: Sequence[int]
    dtype: str

    def checksum(self, param: Tensor, *, convert: bool = False) -> int:
        """Return the :func:`rectangle_checksum` of the box, computed on the parameter's device.

        Args:
            convert: convert to the compared dtype first.

        Raises:
            WeightSyncError: the parameter has another dtype, and is not converted.
        """
        dtype: torch.dtype = getattr(torch, self.dtype)
        if param.dtype != dtype and not convert:
            raise WeightSyncError(
                f"parameter '{self.name}' of the engine is {param.dtype} and was sent as {dtype}; a verified sync must "
                "send the engine's dtype",
                code="sync.verify-dtype",
            )
        box = tuple(slice(a, a + n) for a, n in zip(self.at, self.extent, strict=True))
        return rectangle_checksum(param[box].reshape(*self.shape), self.start, dtype)


def _row_weights(shape: Sequence[int], start: Sequence[int], device: torch.device) -> Tensor:
    """A weight per row: the product of the weights of its index in each dimension except the last."""
    weights = torch.ones(1, dtype=torch.int64, device=device)
    for axis, (count, first) in enumerate(zip(shape, start, strict=True)):
        of_axis = _mixed(torch.arange(first, first + count, device=device), axis + 1) | 1
        weights = torch.outer(weights, of_axis).flatten()
    return weights


def _mixed(index: Tensor, axis: int) -> Tensor:
    """Hash integers with SplitMix64 in wrapping arithmetic."""
    mixed = (index + 1 + (axis << 32)) * _ODD[0]
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * _ODD[1]
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * _ODD[2]
    return mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)


class Coverage:
    """Written elements of one tensor, as boxes that must not overlap.

    Args:
        error: type of the error that :meth:`add` raises.
    """

    def __init__(self, name: str, shape: tuple[int, ...], error: type[MegarlError]) -> None:
        self.name, self.shape = name, shape
        self.expected = math.prod(shape)
        self.written = 0
        self._error = error
        self._recent: list[tuple[list[int], list[int]]] = []
        self._earlier = np.empty((0, 2, len(shape)), dtype=np.int64)  # [boxes, start or stop, dimensions]

    def add(self, start: Sequence[int], shape: Sequence[int]) -> None:
        """Record a slice.

        Raises:
            MegarlError: of type ``error``; the slice exceeds the tensor or overlaps an earlier slice.
        """
        stop = [a + n for a, n in zip(start, shape, strict=False)]
        fits = len(start) == len(shape) == len(self.shape)
        if not fits or not all(0 <= a < b <= n for a, b, n in zip(start, stop, self.shape, strict=True)):
            text = f"'{self.name}': slice {list(shape)} at {list(start)} does not fit shape {list(self.shape)}"
            raise self._error(text, code="model.slice-outside")
        if other := self._overlapping(list(start), stop):
            both = f"slice [{list(start)}, {stop}) overlaps [{other[0]}, {other[1]})"
            raise self._error(f"'{self.name}': {both}, which is already written", code="model.slice-overlap")
        self._recent.append((list(start), stop))
        if len(self._recent) == _RECENT:
            self._earlier = np.concatenate([self._earlier, np.array(self._recent, dtype=np.int64)])
            self._recent = []
        self.written += math.prod(shape)

    def _overlapping(self, start: list[int], stop: list[int]) -> tuple[list[int], list[int]] | None:
        """Return a box that overlaps ``[start, stop)``."""
        for box in self._recent:
            if all(a < d and c < b for a, b, c, d in zip(start, stop, *box, strict=True)):
                return box
        if len(self._earlier):
            disjoint = (self._earlier[:, 0] >= stop) | (self._earlier[:, 1] <= start)
            for first, last in self._earlier[~disjoint.any(axis=1)].tolist():
                return first, last
        return None
