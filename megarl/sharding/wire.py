"""How the rectangles that one rank sends another in a bucket lie behind each other in bytes; both ends compute it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.sharding.plan import Move


class Packing(NamedTuple):
    """The moves between two ranks in a bucket, in the order in which they are packed.

    Those in float32 come first: then every element lies at a multiple of its size, and no byte is lost.
    """

    moves: tuple[Move, ...]
    dtypes: tuple[torch.dtype, ...]
    sizes: tuple[int, ...]
    """Bytes of each move."""

    @property
    def nbytes(self) -> int:
        """Bytes of all moves."""
        return sum(self.sizes)

    def views(self, data: Tensor) -> list[Tensor]:
        """Each move's rectangle in flat bytes ``data`` of this packing; not copies."""
        parts = zip(self.moves, self.dtypes, data.split(self.sizes), strict=True)
        return [part.view(dtype).view(move.shape) for move, dtype, part in parts]


def packing_of(moves: Sequence[Move], dtype: torch.dtype, float32_params: Collection[str]) -> Packing:
    """The packing of moves between two ranks.

    Args:
        moves: in the plan's order.
        dtype: number format of what is sent.
        float32_params: names of parameters that are sent in float32 whatever ``dtype``.
    """
    ordered = sorted(moves, key=lambda move: move.dst_param not in float32_params)
    dtypes = [torch.float32 if move.dst_param in float32_params else dtype for move in ordered]
    sizes = [prod(move.shape) * kind.itemsize for move, kind in zip(ordered, dtypes, strict=True)]
    return Packing(tuple(ordered), tuple(dtypes), tuple(sizes))
