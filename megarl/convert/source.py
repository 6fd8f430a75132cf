"""An opened checkpoint of any format: its model, and the location of each Hugging Face tensor.

Experts that a file stacks, and weights with low-rank adapters to merge, are views of several stored tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megarl.base.checkpoint_files import INDEX
from megarl.base.errors import CheckpointError
from megarl.convert.stored import Chunk, Files, Scratch, StoredTensor, TensorView, ViewRegion
from megarl.models import ModelConfig, WeightMap, hf_folder
from megarl.models.adapters import AdapterMap, LoraOptions, magnitude_name
from megarl.models.hf_folder import ModelIdentity, StackedPart, file_shapes, identify_model, is_tower
from megarl.models.number_formats import dequantize_mxfp4
from megarl.models.peft_folder import AdapterFolder

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
    views: Mapping[str, TensorView]  # every A, B and M, and the weights trained in full
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
    carried: Mapping[str, TensorView] = field(default_factory=dict)  # by Hugging Face name; not trained
    initial: Path | None = None  # initial model folder, if the checkpoint names it; it may not exist here

    @property
    def has_value_head(self) -> bool:
        """Whether the model has a scalar head."""
        return SCORE[0] in self.tensors

    @property
    def tower(self) -> dict[str, TensorView]:
        """The tensors of the vision tower, trained or carried; empty for a model of text."""
        views = {**self.tensors, **self.carried}
        return {name: view for name, view in views.items() if is_tower(self.config, name)}

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


_Value = TypeVar("_Value")


@dataclass(frozen=True)
class ExpertView(TensorView):
    """An expert's tensor within a file's tensor, whose other dimensions are in reverse order."""

    stored: StoredTensor
    expert: int
    first_row: int  # in the file's tensor

    def read(self, first: int, last: int, dtype: torch.dtype, files: Files, scratch: Scratch) -> Tensor:
        """Read rows and transpose them."""
        out = scratch.tensor("rows", (last - first, *self.shape[1:]), dtype)
        entry = scratch.tensor("expert", (1, *reversed(out.shape)), dtype)
        self.stored.read((self.expert, *(0,) * (out.dim() - 1), self.first_row + first), entry, files, scratch)
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
    """A file's tensor of all experts; a row is an expert, whose tensors are side by side."""

    experts: tuple[TensorView, ...]

    def read(self, first: int, last: int, dtype: torch.dtype, files: Files, scratch: Scratch) -> Tensor:
        """Read the matrices of some experts and stack them."""
        out = scratch.tensor("stacked", (last - first, *self.shape[1:]), dtype)
        count = len(self.experts) // self.shape[0]
        for number, view in enumerate(self.experts[first * count : last * count]):
            values = view.read(0, view.shape[0], dtype, files, scratch)
            columns = out[number // count].tensor_split(count, -1)[number % count]
            columns.copy_(values.permute(*reversed(range(values.dim()))))
        return out


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


@dataclass(frozen=True)
class MergedView(TensorView):
    """A weight with its adapter merged, computed in float32 and rounded once."""

    base: TensorView  # the weight
    a: TensorView  # A, [rank, columns]
    b: TensorView  # B, [rows, rank]
    m: TensorView | None  # magnitudes of the rows, [rows]; None without DoRA
    scale: float  # factor of the adapter

    def read(self, first: int, last: int, dtype: torch.dtype, files: Files, scratch: Scratch) -> Tensor:
        """Return rows ``[first, last)``; see :meth:`TensorView.read`."""
        weight = self.base.read(first, last, torch.float32, files, scratch).clone()
        a = self.a.read(0, self.a.shape[0], torch.float32, files, scratch).clone()
        b = self.b.read(first, last, torch.float32, files, scratch)
        weight.addmm_(b, a, alpha=self.scale)
        if self.m is not None:
            m = self.m.read(first, last, torch.float32, files, scratch)
            # The norm is rounded as in training.
            norms = torch.linalg.vector_norm(weight, dim=1).to(self.m.dtype).float()
            weight *= (m / norms)[:, None]
        return weight.to(dtype)


def with_base(
    source: CheckpointSource, base: CheckpointSource, views: Mapping[str, TensorView], options: LoraOptions
) -> CheckpointSource:
    """Return a checkpoint of adapters, still without tensors, as the model with the adapters merged.

    Args:
        views: every A, B and M, and the weights trained in full.

    Raises:
        CheckpointError: the adapters are not those of the options, or of another model.
    """
    has_head = any(name.startswith("score.") for name in views)
    weights = WeightMap(source.config, value_head=has_head)
    adapters = AdapterMap(weights, options)
    shapes = adapters.hf_shapes()
    for name in sorted(shapes.keys() | views.keys()):
        if name not in views or views[name].shape != shapes.get(name):
            text = f"{source.path}: '{name}' does not fit the base model {base.path}"
            raise CheckpointError(text, code="convert.adapter-misfit")
    frozen = {**base.tensors, **base.tower}
    tensors = {}
    for name in weights.hf_shapes():
        if name not in views and name not in frozen:
            raise CheckpointError(f"the base model {base.path} lacks '{name}'", code="convert.adapter-misfit")
        tensors[name] = views[name] if name in views else _merged(frozen[name], adapters, views)
    return replace(source, tensors=tensors, adapters=StoredAdapters(adapters, views, base.path))


def _merged(weight: TensorView, adapters: AdapterMap, views: Mapping[str, TensorView]) -> TensorView:
    name = weight.name
    if name not in adapters.targets:
        return weight
    a, b = (views[f"{name.removesuffix('.weight')}.lora_{part}.weight"] for part in "AB")
    m = views.get(magnitude_name(name))
    regions = (*weight.regions, *a.regions, *b.regions, *(m.regions if m else ()))
    return MergedView(name, weight.shape, weight.dtype, regions, weight, a, b, m, adapters.options.scale)


def base_of_role(path: Path, document: Mapping[str, Any], model: Path | None) -> Path:
    """Return the base model's folder for a role's checkpoint: the user's ``model``, or the one that the run had.

    Raises:
        CheckpointError: the folder does not exist, or has another model.
    """
    stored = ModelIdentity(**document["base"])
    folder = Path(stored.path) if model is None else model
    if not folder.is_dir():
        raise CheckpointError(
            f"{path} has adapters only; their base model {folder} does not exist here; pass its folder: --model FOLDER",
            code="convert.base-model-missing",
        )
    part = identify_model(folder).difference(stored)
    if part is not None:
        text = f"{path} has adapters of {stored.path}; {folder} is another model: its {part} differ"
        raise CheckpointError(text, code="convert.other-base-model")
    return folder


def options_of_folder(folder: AdapterFolder, model: ModelConfig) -> LoraOptions:
    """Read the options of adapters in peft's format.

    Raises:
        ConfigError: a setting is not supported.
    """
    folder.check_supported()
    config = folder.config
    layers = [name.removesuffix(".lora_A.weight") for name in folder.tensors if name.endswith(".lora_A.weight")]
    in_full = [name for name in folder.tensors if is_tower(model, name) and ".lora_" not in name]
    return LoraOptions(
        rank=config["r"],
        alpha=float(config["lora_alpha"]),
        targets=tuple(layers),
        rank_stabilized=config["use_rslora"],
        kind=folder.kind,
        adapt_vision_tower=any(is_tower(model, layer) for layer in layers),
        freeze_vision_model=all("merger" in name for name in in_full),
        freeze_vision_projection=not any("merger" in name for name in in_full),
    )


def options_of_role(document: Mapping[str, Any]) -> LoraOptions:
    """Read the options of the adapters of a role's checkpoint, from its ``state.json``."""
    stored = document["lora"]
    return LoraOptions(**{**stored, "targets": tuple(stored["targets"]), "excludes": tuple(stored["excludes"])})
