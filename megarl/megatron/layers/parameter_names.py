"""Names of a chunk's parameters and modules in the weight map: global numbers of layers and experts."""

from __future__ import annotations

import re
from collections.abc import Callable

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import nn

from megarl.megatron.runtime.process_groups import Runtime
from megarl.models import ModelConfig, canonical_name

_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")


def first_expert(model: ModelConfig, runtime: Runtime) -> int:
    """Return the index of a rank's first expert among all experts of a layer; 0 without experts."""
    if model.experts is None:
        return 0
    layout = runtime.layout
    return layout.expert_coordinate(runtime.rank).ep * (model.experts.count // layout.ep)


def global_naming(chunk: GPTModel, first_expert: int = 0) -> Callable[[str], str]:
    """Return a function from a chunk's name of a parameter to its name in the weight map.

    Args:
        chunk: it numbers its layers, and the rank's experts, from 0.
        first_expert: index of the rank's first expert among all experts of a layer.
    """
    layers = [f"decoder.layers.{layer.layer_number - 1}" for layer in chunk.decoder.layers]

    def rename(name: str) -> str:
        if name.startswith("decoder.layers."):
            _, _, local, rest = name.split(".", 3)
            name = f"{layers[int(local)]}.{rest}"
        return _EXPERT.sub(lambda local: str(int(local[0]) + first_expert), canonical_name(name))

    return rename


def global_names(chunk: GPTModel, first_expert: int = 0) -> dict[str, nn.Parameter]:
    """Return the parameters of a chunk by weight-map name; arguments as of :func:`global_naming`."""
    rename = global_naming(chunk, first_expert)
    return {rename(name): param for name, param in chunk.named_parameters()}
