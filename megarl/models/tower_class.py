"""transformers' class of a vision tower, the shapes of its tensors, and its compute cost."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from megarl.base.errors import ModelError
from megarl.models.model_config import Vision


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


def tower_flops(vision: Vision, tokens: float) -> float:
    """Count the floating-point operations of a tower's forward pass over one image of ``tokens`` tokens.

    Two per weight and patch, in the mergers per weight and token; and per pair of patches, in Qwen2.5-VL mostly of the
    same window, two products with ``hidden_size`` elements. Position embeddings, norms and softmax are not counted.
    """
    config = tower_class(vision).config_class(**vision.settings)
    patches_per_token = config.spatial_merge_size**2
    patches = patches_per_token * tokens
    weights = sum(
        math.prod(shape) / (patches_per_token if "merger" in name else 1)
        for name, shape in tower_shapes(vision).items()
        if len(shape) > 1 and not name.endswith("pos_embed.weight")
    )
    full = len(getattr(config, "fullatt_block_indexes", range(config.depth)))
    attended = full * patches
    if full < config.depth:
        attended += (config.depth - full) * min(patches, (config.window_size // config.patch_size) ** 2)
    return float(patches * (2 * weights + 4 * config.hidden_size * attended))


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
