"""Quantization of weights in the process of an engine's rank, while a weight update writes them.

A training rank's slices, and the tiles of a bucket, cut through the blocks that share a scale. So the weights travel
in the engine's dtype, and the receiving rank quantizes each matrix of its shard once all parts of it have arrived.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from megarl.base.errors import ModelError, WeightSyncError
from megarl.config.schema.rollout import FP8, QUANTIZATION_KEY
from megarl.models import LocalParam, ModelConfig, ParallelLayout, Piece, WeightMap
from megarl.models.declaration import FP8_BLOCK
from megarl.models.verification import ParamRectangle

MatrixId = tuple[str, int | None]
"""A matrix: the name of its parameter, and its number among stacked experts."""


class MatrixStorage(Protocol):
    """The memory of an engine's quantized matrices."""

    def incoming(self, matrix: MatrixId, dtype: torch.dtype) -> Tensor:
        """Return memory ``[rows, columns]`` for the unquantized weights of a matrix."""

    def store(self, matrix: MatrixId, weights: Tensor) -> Tensor:
        """Quantize the complete weights of a matrix; return whether they are finite, as a bool scalar."""


class IncomingMatrices:
    """The matrices of linear layers in a weight update, each quantized when all of its elements have arrived.

    Args:
        is_linear: whether a parameter is quantized; see :meth:`megarl.models.WeightMap.is_linear`.

    Attributes:
        storage: memory of the matrices; may be replaced between updates.
        nbytes: memory of the incomplete matrices.
        peak_bytes: maximum of ``nbytes`` in this update.
    """

    def __init__(self, params: Iterable[LocalParam], is_linear: Callable[[str], bool], storage: MatrixStorage) -> None:
        self._names = set[str]()
        self._pieces: dict[MatrixId, list[Piece]] = defaultdict(list)
        for param in params:
            if is_linear(param.name):
                self._names.add(param.name)
                for piece in param.pieces:
                    self._pieces[param.name, None if len(piece.at) == 2 else piece.at[0]].append(piece)
        self.storage = storage
        self._incoming: dict[MatrixId, Tensor] = {}
        self._missing: dict[MatrixId, int] = {}
        self._finite: dict[MatrixId, Tensor] = {}
        self._checksums: dict[tuple[str, tuple[int, ...], str], int] = {}
        self.nbytes = self.peak_bytes = 0

    def __contains__(self, name: str) -> bool:
        """Whether a parameter is quantized."""
        return name in self._names

    def clear(self) -> None:
        """Drop the matrices and checksums of earlier updates."""
        for values in (self._incoming, self._missing, self._finite, self._checksums):
            values.clear()
        self.nbytes = self.peak_bytes = 0

    def write(self, name: str, start: Sequence[int], values: Tensor) -> None:
        """Copy a slice of a parameter, which was checked, and quantize the matrices that it completes."""
        for number, corner, part in self._parts(start, values):
            matrix = (name, number)
            if matrix not in self._incoming:
                self._open(matrix, part.dtype)
            box = tuple(slice(a, a + n) for a, n in zip(corner, part.shape, strict=True))
            self._incoming[matrix][box].copy_(part)
            self._missing[matrix] -= part.numel()
            if not self._missing[matrix]:
                self._close(matrix)

    def end(self, version: int) -> None:
        """Raise a WeightSyncError that names the first matrix with infinite or NaN weights in an update, if any."""
        matrices = list(self._finite)
        if not matrices:
            return
        finite = torch.stack([self._finite[matrix] for matrix in matrices]).tolist()
        if not all(finite):
            name, number = matrices[finite.index(False)]
            expert = "" if number is None else f", expert {number},"
            raise WeightSyncError(
                f"weight version {version}: '{name}'{expert} has weights that are infinite or NaN, for which "
                f"{QUANTIZATION_KEY}={FP8} has no code; {finite.count(False)} of {len(finite)} matrices are damaged",
                code="sync.weights-not-finite",
            )

    def checksum(self, part: ParamRectangle) -> int:
        """Return a matrix part's checksum before its quantization; WeightSyncError if it did not arrive."""
        key = (part.name, tuple(part.at), part.dtype)
        if key not in self._checksums:
            raise WeightSyncError(
                f"parameter '{part.name}' of the engine was not sent as {part.dtype} in this update; a verified sync "
                "must send the engine's dtype",
                code="sync.verify-dtype",
            )
        return self._checksums[key]

    def _parts(self, start: Sequence[int], values: Tensor) -> Iterator[tuple[int | None, Sequence[int], Tensor]]:
        """Split a slice into its matrices: number, offset and values."""
        if values.dim() == 2:
            yield None, start, values
            return
        first, *corner = start
        yield from ((first + index, corner, part) for index, part in enumerate(values))

    def _open(self, matrix: MatrixId, dtype: torch.dtype) -> None:
        self._incoming[matrix] = memory = self.storage.incoming(matrix, dtype)
        self._missing[matrix] = prod(memory.shape)
        self.nbytes += memory.nbytes
        self.peak_bytes = max(self.peak_bytes, self.nbytes)

    def _close(self, matrix: MatrixId) -> None:
        """Record the checksums of a complete matrix, then quantize it."""
        weights, name = self._incoming.pop(matrix), matrix[0]
        dtype = str(weights.dtype).removeprefix("torch.")
        for piece in self._pieces[matrix]:
            part = ParamRectangle(name, piece.at[-2:], piece.shape, piece.start, piece.shape, dtype)
            self._checksums[name, tuple(piece.at), dtype] = part.checksum(weights)
        self._finite[matrix] = self.storage.store(matrix, weights)
        self.nbytes -= weights.nbytes


def check_blocks(config: ModelConfig, tp: int) -> None:
    """Check that no block of a Hugging Face matrix spans two ranks or two parts of a fused parameter.

    Raises:
        ModelError: names the parameter, and the numbers of ranks that work.
    """
    problem = _split_block(config, tp)
    if problem is None:
        return
    heads = config.num_attention_heads
    works = [str(n) for n in range(1, heads + 1) if heads % n == 0 and _split_block(config, n) is None]
    remedy = f"tensor_model_parallel_size={' or '.join(works)} works" if works else "set it to null"
    raise ModelError(
        f"{QUANTIZATION_KEY}={FP8} with tensor_model_parallel_size={tp}: {problem}, within a block of "
        f"{FP8_BLOCK} x {FP8_BLOCK} weights; {remedy}",
        code="rollout.fp8-blocks",
    )


def _split_block(config: ModelConfig, tp: int) -> str | None:
    """Describe the first block that spans ranks or parts of a fused parameter; None = no block does."""
    try:
        patterns = WeightMap(config).patterns(ParallelLayout(), tp)
    except ValueError as error:
        return str(error)
    for pattern in patterns:
        for rank, pieces in enumerate(pattern.targets if pattern.linear else ()):
            for piece in pieces:
                for offset in (*piece.start, *piece.at):
                    if offset % FP8_BLOCK:
                        return f"the part of '{piece.hf_name}' on rank {rank} begins at {offset}"
    return None
