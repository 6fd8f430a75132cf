"""Checkpoints of low-rank adapters: opened as the model with the adapters merged, and written in peft's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.base.errors import CheckpointError
from megarl.base.json_text import parse_json
from megarl.convert.source import CheckpointSource, StoredAdapters
from megarl.convert.stored import Files, Scratch, TensorView
from megarl.models import WeightMap
from megarl.models.adapters import AdapterMap, LoraOptions, magnitude_name
from megarl.models.hf_folder import ModelIdentity, identify_model
from megarl.models.peft_folder import AdapterFolder


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
    """Return a checkpoint of adapters as the model with the adapters merged.

    Args:
        source: the checkpoint, without tensors.
        views: every A, B and M, and a scalar head.
        options: options of the adapters.

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
    tensors = {name: _merged(name, adapters, base, views) for name in weights.hf_shapes()}
    return replace(source, tensors=tensors, adapters=StoredAdapters(adapters, views, base.path))


def _merged(name: str, adapters: AdapterMap, base: CheckpointSource, views: Mapping[str, TensorView]) -> TensorView:
    if name in views:
        return views[name]
    weight = base.tensors.get(name)
    if weight is None:
        raise CheckpointError(f"the base model {base.path} lacks '{name}'", code="convert.adapter-misfit")
    if name not in adapters.targets:
        return weight
    a, b = (views[f"{name.removesuffix('.weight')}.lora_{part}.weight"] for part in "AB")
    m = views.get(magnitude_name(name))
    regions = (*weight.regions, *a.regions, *b.regions, *(m.regions if m else ()))
    return MergedView(name, weight.shape, weight.dtype, regions, weight, a, b, m, adapters.options.scale)


def base_of_role(path: Path, document: Mapping[str, Any], model: Path | None) -> Path:
    """Return the folder of the base model of a role's checkpoint.

    Args:
        document: contents of its ``state.json``.
        model: folder given by the user; None = the folder that the run had.

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


def options_of_folder(folder: AdapterFolder) -> LoraOptions:
    """Read the options of adapters in peft's format.

    Raises:
        ConfigError: a setting is not supported.
    """
    folder.check_supported()
    config = folder.config
    layers = [name.removesuffix(".lora_A.weight") for name in folder.tensors if name.endswith(".lora_A.weight")]
    return LoraOptions(
        rank=config["r"],
        alpha=float(config["lora_alpha"]),
        targets=tuple(layers),
        rank_stabilized=config["use_rslora"],
        kind=folder.kind,
    )


def options_of_role(document: Mapping[str, Any]) -> LoraOptions:
    """Read the options of the adapters of a role's checkpoint, from its ``state.json``."""
    stored = document["lora"]
    return LoraOptions(**{**stored, "targets": tuple(stored["targets"]), "excludes": tuple(stored["excludes"])})


def read_document(path: Path) -> Mapping[str, Any]:
    """Read a ``state.json``, which has been checked."""
    document: Mapping[str, Any] = parse_json(path.read_text(encoding="utf-8"))
    return document
