"""transformers' class of a vision tower, and its parameters: shapes, and declarations of a trained one."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from megarl.base.errors import ModelError
from megarl.models.declaration import Declaration, EngineSplit, HFTensor, PipelineStage, Split
from megarl.models.model_config import Vision
from megarl.models.registry import count

TOWER = "vision_tower."
"""Start of the names that the parameters of a trained tower have in Megatron."""
_WIDTH_MULTIPLE, _POSITIONS_MULTIPLE = 8, 64
"""SGLang pads the width of Qwen2.5-VL's MLP, and the number of learned positions, to a multiple of these."""
_ENGINE_SPLITS = {
    "attn.qkv": EngineSplit(Split.SECTIONS),
    "attn.proj.weight": EngineSplit(Split.ROW),
    "mlp.gate_proj": EngineSplit(Split.COLUMN, _WIDTH_MULTIPLE),
    "mlp.up_proj": EngineSplit(Split.COLUMN, _WIDTH_MULTIPLE),
    "mlp.down_proj.weight": EngineSplit(Split.ROW, _WIDTH_MULTIPLE),
    "linear_fc1": EngineSplit(Split.COLUMN),
    "linear_fc2.weight": EngineSplit(Split.ROW),
    "merger.mlp.0": EngineSplit(Split.COLUMN),
    "merger.mlp.2.weight": EngineSplit(Split.ROW),
    "pos_embed": EngineSplit(Split.COLUMN, _POSITIONS_MULTIPLE),
}
"""SGLang's split of a tower's parameters over its tensor-parallel ranks, by a part of the name; others are whole."""


def tower_class(vision: Vision) -> Any:
    """Import the class of a vision tower."""
    module, name = vision.tower.split(".")
    return getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)


def tower_parameters(vision: Vision) -> int:
    """Count the parameters of a vision tower, without allocating them."""
    return sum(map(math.prod, tower_shapes(vision).values()))


def tower_shapes(vision: Vision) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a vision tower's parameters by name in a model folder, without allocating them."""
    return _shapes(vision, json.dumps(vision.settings, sort_keys=True))


def tower_declarations(vision: Vision) -> tuple[Declaration, ...]:
    """Declare the parameters of a trained tower: whole on each rank of the first stage, split in the engine."""
    result = []
    for name, shape in tower_shapes(vision).items() if vision.trained else ():
        megatron, tensors = TOWER + name.removeprefix(vision.prefix), (HFTensor(name, shape),)
        split, stage = engine_split(name), PipelineStage.FIRST
        result.append(Declaration(megatron, name, tensors, Split.REPLICATED, stage, engine_split=split))
    return tuple(result)


def engine_split(name: str) -> EngineSplit | None:
    """Return SGLang's split of a tower's parameter over its ranks; None = each rank has the whole parameter."""
    return next((split for part, split in _ENGINE_SPLITS.items() if part in name), None)


def engine_sizes(vision: Vision) -> dict[str, int]:
    """Return the sizes of a tower that SGLang's ranks divide, with SGLang's padding, by their names in the config.

    Raises:
        ModelError: the config lacks one.
    """
    width_multiple = _WIDTH_MULTIPLE if vision.tower.startswith("qwen2_5_vl.") else 1
    multiples = {"num_heads": 1, "intermediate_size": width_multiple}
    if "num_position_embeddings" in vision.settings:
        multiples["num_position_embeddings"] = _POSITIONS_MULTIPLE
    sizes = {name: count(vision.settings, name) for name in multiples}
    return {f"vision_config.{name}": -(-sizes[name] // multiple) * multiple for name, multiple in multiples.items()}


def check_tower_shapes(folder: Path | str, vision: Vision, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a model folder has every tensor of the vision tower.

    Args:
        shapes: of the folder's tensors, by the weight map's names.

    Raises:
        ModelError: a tensor is missing or has another shape; names it.
    """
    for name, shape in tower_shapes(vision).items():
        found = shapes.get(name)
        if found != shape:
            problem = "is missing" if found is None else f"has shape {list(found)}"
            text = f"model folder {folder}: tensor '{name}' of the vision tower {problem}, expected {list(shape)}"
            raise ModelError(f"{text}; copy the weights of the original model there", code="model.vision-tower")


@lru_cache(maxsize=64)
def _shapes(vision: Vision, settings: str) -> dict[str, tuple[int, ...]]:
    import torch

    kind = tower_class(vision)
    with torch.device("meta"):
        tower = kind(kind.config_class(**json.loads(settings)))
    return {vision.prefix + name: tuple(parameter.shape) for name, parameter in tower.named_parameters()}
