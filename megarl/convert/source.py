"""An opened checkpoint of any format: its model, and the location of each Hugging Face tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megarl.base.checkpoint_files import INDEX
from megarl.base.errors import CheckpointError
from megarl.convert.stored import Chunk, StoredTensor, TensorView, ViewRegion
from megarl.models import ModelConfig, hf_folder
from megarl.models.adapters import AdapterMap

HUGGING_FACE, MEGARL, TORCH_DIST, PEFT = "Hugging Face", "megarl", "torch_dist", "peft"
SCORE = (hf_folder.SCORE, hf_folder.SCORE_BIAS)
STATE_FILE, STATE_FORMAT = "state.json", 1  # file that describes a role checkpoint, and the version of its format
WEIGHT = "weight/"  # prefix of the weights in a role checkpoint
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Dtypes of weights, by their safetensors names."""


@dataclass(frozen=True)
class StoredAdapters:
    """Low-rank adapters of a checkpoint."""

    map: AdapterMap
    views: Mapping[str, TensorView]  # every A and B, and a scalar head
    base: Path


@dataclass(frozen=True)
class CheckpointSource:
    """An opened checkpoint; no tensor has been read."""

    path: Path
    kind: str  # Hugging Face, megarl, torch_dist or peft
    config: ModelConfig
    companions: Path  # folder with config, tokenizer and chat template
    tensors: Mapping[str, TensorView]  # by Hugging Face name, in checkpoint order; adapters are merged
    left_out: tuple[str, ...] = ()  # stored weights that the model does not have; they are not read
    state: tuple[str, ...] = ()  # stored values that are not weights: optimizer state, random states
    facts: Mapping[str, Any] = field(default_factory=dict)  # further facts of the format, for reports
    lacks: tuple[str, ...] = ()  # tensors that the config requires and the folder lacks: the head
    adapters: StoredAdapters | None = None  # the adapters, of a checkpoint that has only them
    carried: Mapping[str, TensorView] = field(default_factory=dict)  # multi-token prediction layers, not trained
    initial: Path | None = None  # initial model folder, if the checkpoint names it; it may not exist here

    @property
    def has_value_head(self) -> bool:
        """Whether the model has a scalar head."""
        return SCORE[0] in self.tensors

    def files(self) -> list[Path]:
        """Return every file with weights, sorted; also those of carried tensors."""
        views = (*self.tensors.values(), *self.carried.values())
        regions = (region for view in views for region in view.regions)
        return sorted({chunk.file for region in regions for chunk in region.stored.chunks})

    def check_files(self) -> None:
        """Check that every file with weights exists and is long enough.

        Raises:
            CheckpointError: a file is missing or truncated; the message names it.
        """
        ends: dict[Path, int] = {}
        for view in self.tensors.values():
            for region in view.regions:
                for chunk in region.stored.chunks:
                    if chunk.length is not None:
                        ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.length)
        for file, end in ends.items():
            if not file.is_file():
                raise CheckpointError(f"{file} is missing, which {INDEX} names", code="checkpoint.missing-file")
            if file.stat().st_size < end:
                text = f"{file} is truncated: {file.stat().st_size} bytes, expected at least {end}"
                raise CheckpointError(text, code="checkpoint.truncated-file")


def whole_view(name: str, stored: StoredTensor) -> TensorView:
    """Return a Hugging Face tensor that is stored unchanged."""
    region = ViewRegion((0,) * len(stored.shape), stored.shape, stored, (0,) * len(stored.shape))
    return TensorView(name, stored.shape, stored.dtype, (region,))


def stored_tensors(folder: Path, index: Metadata, names: Iterable[str]) -> dict[str, StoredTensor]:
    """Return the tensors of a torch distributed checkpoint; names of other values are ignored.

    Raises:
        CheckpointError: the index contradicts itself, or names files outside the folder.
    """
    result = {}
    locations: dict[tuple[str, tuple[int, ...]], Any] = {
        (key.fqn, tuple(key.offset or ())): location for key, location in index.storage_data.items()
    }
    for name in names:
        entry = index.state_dict_metadata.get(name)
        if isinstance(entry, TensorStorageMetadata):
            chunks = tuple(
                _chunk(folder, name, tuple(c.offsets), tuple(c.sizes), entry.properties.dtype, locations)
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
    locations: Mapping[Any, Any],
) -> Chunk:
    location = locations.get((name, start))
    if location is None and not any(start):
        location = locations.get((name, ()))
    if location is None:
        text = f"{folder / INDEX}: '{name}' at {list(start)} is in no file"
        raise CheckpointError(text, code="checkpoint.malformed-index")
    if Path(location.relative_path).name != location.relative_path:
        text = f"{folder / INDEX} names the file {location.relative_path!r}, which is outside the checkpoint"
        raise CheckpointError(text, code="checkpoint.file-outside")
    if getattr(location, "transform_descriptors", None):
        raise CheckpointError(
            f"{folder / location.relative_path}: '{name}' is stored as {location.transform_descriptors}, only plain "
            f"tensors can be read",
            code="checkpoint.transformed-tensor",
        )
    return Chunk(start, shape, folder / location.relative_path, location.offset, location.length, dtype)


def without_head_bias(config: ModelConfig) -> ModelConfig:
    """Return the config of the model with a scalar head without bias."""
    return replace(config, raw={**config.raw, "token_classification_bias": False})
