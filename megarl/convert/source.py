"""A checkpoint to read, whatever its format: its model, and where each Hugging Face tensor lies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megarl.checkpoint_index import INDEX
from megarl.convert.stored import Chunk, Part, StoredTensor, TensorView
from megarl.errors import CheckpointError
from megarl.models import ModelConfig, hf_folder

HUGGING_FACE, MEGARL, TORCH_DIST = "Hugging Face", "megarl", "torch_dist"
SCORE = (hf_folder.SCORE, hf_folder.SCORE_BIAS)


@dataclass(frozen=True)
class Source:
    """An opened checkpoint. No tensor of it has been read."""

    path: Path
    kind: str
    """``Hugging Face``, ``megarl`` or ``torch_dist``."""
    config: ModelConfig
    companions: Path
    """Folder with its config, tokenizer and chat template."""
    tensors: Mapping[str, TensorView]
    """By Hugging Face name, in checkpoint order."""
    left_out: tuple[str, ...] = ()
    """Weights that the model has no place for, and that are not read."""
    state: tuple[str, ...] = ()
    """What else is stored and is not weights: an optimizer's state, random states."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the format says beyond the tensors, for people."""
    lacks: tuple[str, ...] = ()
    """What the model has by its config and the folder does not: its head."""

    @property
    def has_value_head(self) -> bool:
        """Whether there is a scalar head."""
        return SCORE[0] in self.tensors

    def files(self) -> list[Path]:
        """Every file that holds a weight, sorted."""
        parts = (part for view in self.tensors.values() for part in view.parts)
        return sorted({chunk.file for part in parts for chunk in part.stored.chunks})

    def check_files(self) -> None:
        """Makes sure that every file of weights is there and long enough.

        Raises:
            CheckpointError: names the one that is not.
        """
        ends: dict[Path, int] = {}
        for view in self.tensors.values():
            for part in view.parts:
                for chunk in part.stored.chunks:
                    if chunk.length is not None:
                        ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.length)
        for file, end in ends.items():
            if not file.is_file():
                raise CheckpointError(f"{file} is missing, which {INDEX} names")
            if file.stat().st_size < end:
                raise CheckpointError(f"{file} is truncated: {file.stat().st_size} bytes, expected at least {end}")


def whole(name: str, stored: StoredTensor) -> TensorView:
    """A Hugging Face tensor that is stored as it is."""
    part = Part((0,) * len(stored.shape), stored.shape, stored, (0,) * len(stored.shape))
    return TensorView(name, stored.shape, stored.dtype, (part,))


def stored_tensors(folder: Path, index: Metadata, wanted: Iterable[str]) -> dict[str, StoredTensor]:
    """Tensors of a torch distributed checkpoint.

    Args:
        folder: the checkpoint.
        index: its index.
        wanted: names; those that are not tensors are left out.

    Raises:
        CheckpointError: the index contradicts itself, or names files outside the folder.
    """
    result = {}
    places: dict[tuple[str, tuple[int, ...]], Any] = {
        (key.fqn, tuple(key.offset or ())): place for key, place in index.storage_data.items()
    }
    for name in wanted:
        entry = index.state_dict_metadata.get(name)
        if isinstance(entry, TensorStorageMetadata):
            chunks = tuple(
                _chunk(folder, name, tuple(c.offsets), tuple(c.sizes), entry.properties.dtype, places)
                for c in entry.chunks
            )
            result[name] = StoredTensor(name, tuple(entry.size), entry.properties.dtype, chunks)
    return result


def _chunk(
    folder: Path,
    name: str,
    start: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    places: Mapping[Any, Any],
) -> Chunk:
    place = places.get((name, start))
    if place is None and not any(start):
        place = places.get((name, ()))
    if place is None:
        raise CheckpointError(f"{folder / INDEX}: '{name}' at {list(start)} is in no file")
    if Path(place.relative_path).name != place.relative_path:
        raise CheckpointError(
            f"{folder / INDEX} names the file {place.relative_path!r}, which is outside the checkpoint"
        )
    if getattr(place, "transform_descriptors", None):
        raise CheckpointError(
            f"{folder / place.relative_path}: '{name}' is stored as {place.transform_descriptors}, only plain "
            f"tensors can be read"
        )
    return Chunk(start, shape, folder / place.relative_path, place.offset, place.length, dtype)


def without_head_bias(config: ModelConfig) -> ModelConfig:
    """A model whose scalar head has no bias."""
    return replace(config, raw={**config.raw, "token_classification_bias": False})
