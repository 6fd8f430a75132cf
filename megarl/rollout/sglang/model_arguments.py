"""Arguments of SGLang that a model needs: kernels of experts, and fields of the model's config in SGLang's form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megarl.base.errors import ConfigError
from megarl.base.json_text import parse_json
from megarl.models import ModelConfig

KEY = "rollout.engine_kwargs.sglang"
OVERRIDES = "json_model_override_args"
"""Argument of SGLang with fields that replace those of the model's config."""
KERNELS_ARGUMENT, EXPERT_KERNELS = "moe_runner_backend", "triton"
"""SGLang's argument that selects kernels of experts, and the kernels whose experts with biases are not transposed."""


def model_arguments(config: ModelConfig, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return SGLang's arguments with those that the model needs.

    Raises:
        ConfigError: the user's arguments select other kernels, or their overrides of the config are no JSON object.
    """
    result = dict(arguments)
    if config.experts is not None and config.experts.biases:
        chosen = arguments.get(KERNELS_ARGUMENT, EXPERT_KERNELS)
        if chosen != EXPERT_KERNELS:
            raise ConfigError(
                f"{KEY}.server_args.{KERNELS_ARGUMENT}={chosen!r} is not supported for {config.architecture}: SGLang "
                f"would store its experts in another form than weight syncs write; set {EXPERT_KERNELS!r} or remove it",
                code="sglang.expert-kernels",
            )
        result[KERNELS_ARGUMENT] = EXPERT_KERNELS
    if (positions := positions_of_full_attention(config)) is not None:
        result |= with_overrides(result, {"rope_parameters": positions})
    return result


def positions_of_full_attention(config: ModelConfig) -> dict[str, Any] | None:
    """Return the rotary embedding of OLMo 3's layers with full attention, if the config has one per kind of layer.

    SGLang reads one for all layers, and leaves its scaling out of layers with a window. From a config with one per kind
    of layer, as transformers 5 writes it, it would read neither base nor scaling.
    """
    positions = config.raw.get("rope_parameters")
    if config.architecture != "Olmo3ForCausalLM" or not positions or "full_attention" not in positions:
        return None
    return dict(positions["full_attention"])


def with_overrides(arguments: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the argument that replaces fields of the model's config, with the user's replacements.

    Raises:
        ConfigError: the user's replacements are no JSON object.
    """
    text = arguments.get(OVERRIDES) or "{}"
    try:
        overrides = dict(parse_json(text))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{KEY}.server_args.{OVERRIDES}={text!r}: expected a JSON object: {error}", code="sglang.config-overrides"
        ) from None
    return {OVERRIDES: json.dumps({**overrides, **fields})}
