"""transformers' class of a vision tower, and the shapes of its tensors."""

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
