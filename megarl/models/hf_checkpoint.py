"""Read Hugging Face weights directly into local shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megarl.base.errors import ModelError
from megarl.models.hf_folder import BLOCK, ModelFolder, TensorEntry, check_model_folder
from megarl.models.model_config import ModelConfig
from megarl.models.number_formats import dequantize_mxfp4
from megarl.models.partition import LocalParam, Piece


class HFReader:
    """Reads rectangles of a model folder's tensors; a path is checked first (:func:`check_model_folder`).

    Shards are memory-mapped: only the bytes of the requested rectangles are read.

    Raises:
        ModelError: the folder is incomplete; names the missing shard or tensor, or the wrong shape.
    """

    def __init__(self, path: str | Path | ModelFolder) -> None:
        self.folder = path if isinstance(path, ModelFolder) else check_model_folder(path)
        self._open: dict[Path, Any] = {}

    @property
    def config(self) -> ModelConfig:
        """Config of the model."""
        return self.folder.config

    def __contains__(self, hf_name: str) -> bool:
        return hf_name in self.folder.tensors

    def read(self, piece: Piece) -> Tensor:
        """Read the elements of a rectangle, in the dtype of the file.

        Raises:
            ModelError: the tensor is not in the folder, or is smaller than the rectangle.
        """
        entry = self.folder.tensors.get(piece.hf_name)
        if entry is None:
            text = f"model folder {self.folder.path} lacks tensor '{piece.hf_name}'"
            raise ModelError(text, code="model.missing-tensor")
        if len(entry.shape) != len(piece.stop) or any(b > n for b, n in zip(piece.stop, entry.shape, strict=True)):
            raise ModelError(
                f"{entry.file}: tensor '{piece.hf_name}' has shape {list(entry.shape)}, "
                f"expected at least {list(piece.stop)}",
                code="model.tensor-shape",
            )
        try:
            if entry.scales is not None:
                return self._dequantized(entry, entry.scales, piece)
            ranges = [slice(a, b) for a, b in zip(piece.start, piece.stop, strict=True)]
            if entry.expert is not None:
                expert = slice(entry.expert, entry.expert + 1)
                ranges[0] = slice(entry.first_row + piece.start[0], entry.first_row + piece.stop[0])
                where = reversed(ranges) if entry.is_reversed else ranges
                stored: Tensor = self._slice(entry.file, entry.stored_as)[(expert, *where)][0]
                return stored.permute(*reversed(range(stored.dim()))) if entry.is_reversed else stored
            values: Tensor = self._slice(entry.file, entry.stored_as or piece.hf_name)[tuple(ranges)]
            return values
        except SafetensorError as error:
            text = f"{entry.file}: cannot read tensor '{piece.hf_name}': {error}"
            raise ModelError(text, code="model.unreadable-file") from None

    def _dequantized(self, entry: TensorEntry, scales_entry: TensorEntry, piece: Piece) -> Tensor:
        """Read a rectangle of an expert's matrix in MXFP4: all blocks with its columns, without the other columns."""
        assert entry.expert is not None
        (first_row, first), (last_row, last) = piece.start, piece.stop
        rows, columns = slice(first_row, last_row), slice(first // BLOCK, -(-last // BLOCK))
        where = (slice(entry.expert, entry.expert + 1), rows, columns)
        blocks = self._slice(entry.file, entry.stored_as)[where][0]
        scales = self._slice(scales_entry.file, scales_entry.stored_as)[where][0]
        before = first // BLOCK * BLOCK
        return dequantize_mxfp4(blocks, scales)[:, first - before : last - before]

    def _slice(self, file: Path, name: str) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(str(file), framework="pt", device="cpu")
        return self._open[file].get_slice(name)


def load_local(
    reader: HFReader,
    params: Iterable[LocalParam],
    dtype: torch.dtype,
    optional: Collection[str] = (),
    float32: Callable[[str], bool] = lambda hf_name: False,
) -> Iterator[tuple[str, Tensor]]:
    """Read the parameters of one rank, and only those.

    Args:
        params: from :meth:`WeightMap.megatron_params` or :meth:`WeightMap.rollout_params`.
        optional: Hugging Face tensors that may be absent (``score.weight`` of a critic initialized from a language
            model); their parameters are then skipped.
        float32: whether a Hugging Face tensor is float32 instead of ``dtype`` (:meth:`WeightMap.is_float32`).

    Yields:
        Name and tensor on the CPU, with zeros as vocabulary padding.

    Raises:
        ModelError: a tensor that is not optional is missing or too small.
    """
    for param in params:
        absent = [p.hf_name for p in param.pieces if p.hf_name not in reader]
        if absent and all(name in optional for name in absent):
            continue
        exact = any(float32(piece.hf_name) for piece in param.pieces)
        tensor = torch.zeros(param.shape, dtype=torch.float32 if exact else dtype)
        for piece in param.pieces:
            region(tensor, piece.at, piece.local_shape).copy_(reader.read(piece).reshape(piece.local_shape))
        yield param.name, tensor


def region(tensor: Tensor, at: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """View the rectangle of extent ``shape`` at offset ``at`` of ``tensor``."""
    return tensor[tuple(slice(a, a + n) for a, n in zip(at, shape, strict=True))]
