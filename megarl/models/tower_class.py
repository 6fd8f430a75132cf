"""transformers' class of a vision tower, and the tower's size."""

from __future__ import annotations

import importlib
import json
from functools import lru_cache
from typing import Any

from megarl.models.model_config import Vision


def tower_class(vision: Vision) -> Any:
    """Import the class of a vision tower."""
    module, name = vision.tower.split(".")
    return getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)


def tower_parameters(vision: Vision) -> int:
    """Count the parameters of a vision tower, without allocating them."""
    return _parameters(vision, json.dumps(vision.settings, sort_keys=True))


@lru_cache(maxsize=64)
def _parameters(vision: Vision, settings: str) -> int:
    import torch

    kind = tower_class(vision)
    with torch.device("meta"):
        tower = kind(kind.config_class(**json.loads(settings)))
    return sum(parameter.numel() for parameter in tower.parameters())
