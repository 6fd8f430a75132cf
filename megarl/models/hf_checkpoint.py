"""Reads Hugging Face weights straight into local shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megarl.errors import ModelError
from megarl.models.hf_config import ModelConfig
from megarl.models.hf_folder import check_model_folder
from megarl.models.partition import LocalParam, Piece


class HFReader:
    """Reads rectangles of the tensors of a model folder.

    The folder is checked first (:func:`megarl.models.hf_folder.check_model_folder`), so a wrong one is refused before
    any weight is read. Shards are memory-mapped: only the bytes of the rectangles asked for are read.

    Raises:
        ModelError: the folder is not whole; names the missing shard or tensor, or the wrong shape.
    """

    def __init__(self, path: str | Path) -> None:
        self.folder = check_model_folder(path)
        self._open: dict[Path, Any] = {}

    @property
    def config(self) -> ModelConfig:
        """The folder's model."""
        return self.folder.config

    def __contains__(self, hf_name: str) -> bool:
        return hf_name in self.folder.tensors

    def read(self, piece: Piece) -> Tensor:
        """The elements of a rectangle, in the dtype of the file.

        Raises:
            ModelError: the tensor is not in the folder, or is smaller than the rectangle.
        """
        entry = self.folder.tensors.get(piece.hf_name)
        if entry is None:
            raise ModelError(f"model folder {self.folder.path} lacks tensor '{piece.hf_name}'")
        if len(entry.shape) != len(piece.stop) or any(b > n for b, n in zip(piece.stop, entry.shape, strict=True)):
            raise ModelError(
                f"{entry.file}: tensor '{piece.hf_name}' has shape {list(entry.shape)}, "
                f"expected at least {list(piece.stop)}"
            )
        try:
            if entry.file not in self._open:
                self._open[entry.file] = safe_open(str(entry.file), framework="pt", device="cpu")
            view = self._open[entry.file].get_slice(entry.stored_as or piece.hf_name)
            return view[tuple(slice(a, b) for a, b in zip(piece.start, piece.stop, strict=True))]
        except SafetensorError as error:
            raise ModelError(f"{entry.file}: cannot read tensor '{piece.hf_name}': {error}") from None


def load_local(
    reader: HFReader,
    params: Iterable[LocalParam],
    dtype: torch.dtype,
    optional: Collection[str] = (),
    float32: Callable[[str], bool] = lambda hf_name: False,
) -> Iterator[tuple[str, Tensor]]:
    """Reads one rank's parameters; nothing that belongs to another rank is read.

    Args:
        reader: the model folder.
        params: what the rank holds, from :meth:`WeightMap.megatron_params` or :meth:`WeightMap.rollout_params`.
        dtype: dtype of the tensors returned.
        optional: Hugging Face tensors that may be absent (``score.weight`` of a critic made from a language model);
            a parameter made of them is then left out.
        float32: tells by Hugging Face name which tensors are float32 instead (:meth:`WeightMap.is_float32`).

    Yields:
        Name and tensor on the CPU, vocabulary padding filled with zeros.

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
            region(tensor, piece.at, piece.local_shape).copy_(reader.read(piece).view(piece.local_shape))
        yield param.name, tensor


def region(tensor: Tensor, at: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """View of the rectangle of extent ``shape`` that begins at offset ``at`` of ``tensor``."""
    return tensor[tuple(slice(a, a + n) for a, n in zip(at, shape, strict=True))]
