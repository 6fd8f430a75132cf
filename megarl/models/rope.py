"""Frequencies of rotary position embeddings (https://arxiv.org/abs/2104.09864) with linear, Llama 3 and YaRN scaling.

All computation is in float32 and in transformers' order of operations: an extra rounding is visible at large positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megarl.models.model_config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Compute the radians per position of each rotated pair, float32 ``[rotated dimensions / 2]``.

    ``linear`` scaling divides all frequencies by ``factor``. ``llama3`` divides low frequencies, and partly medium
    ones, as in https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py (``apply_scaling``).
    ``yarn`` does the same with a ramp over the pairs (https://arxiv.org/abs/2309.00071).
    """
    width = config.rotary_dim
    wavelengths: Tensor = config.rope_theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    scaling = config.rope_scaling
    if scaling is None:
        return 1.0 / wavelengths
    match scaling["rope_type"]:
        case "linear":
            return (1.0 / wavelengths) / float(scaling["factor"])
        case "llama3":
            factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
            frequencies = 1.0 / wavelengths
            turns = float(scaling["original_max_position_embeddings"]) / (2 * math.pi / frequencies)
            keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
            return (1.0 - keep) * frequencies / factor + keep * frequencies
        case _:
            return _yarn(wavelengths, config.rope_theta, scaling)


def position_rows(config: ModelConfig) -> Tensor | None:
    """Return which position rotates each pair of dimensions, ``[rotated dimensions / 2]`` int64.

    0 is time, 1 height, 2 width (:func:`megarl.base.image_tokens.multimodal_positions`). None for models of text only.
    """
    if config.vision is None:
        return None
    time, height, width = config.vision.sections
    if not config.vision.interleaved:
        return torch.tensor([0] * time + [1] * height + [2] * width)
    rows = torch.zeros(time + height + width, dtype=torch.int64)
    rows[1 : 3 * height : 3], rows[2 : 3 * width : 3] = 1, 2
    return rows


def window_frequencies(config: ModelConfig) -> Tensor | None:
    """Compute the frequencies of layers with sliding-window attention, without scaling; None = those of all layers.

    The shape is that of :func:`inverse_frequencies`.
    """
    if config.window is None or config.window.rope_theta is None:
        return None
    return inverse_frequencies(replace(config, rope_theta=config.window.rope_theta, rope_scaling=None))


def attention_factor(config: ModelConfig) -> float:
    """Return the factor on the rotated dimensions of queries and keys: 1, except that ``yarn`` sharpens attention.

    Dimensions that do not rotate have no factor, so it is no part of :func:`softmax_scale`.
    """
    scaling = config.rope_scaling
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor, scale, all_dim = scaling["factor"], scaling.get("mscale"), scaling.get("mscale_all_dim")
    if scale and all_dim:
        return _sharpening(factor, scale) / _sharpening(factor, all_dim)
    return _sharpening(factor, 1.0)


def softmax_scale(config: ModelConfig) -> float:
    """Scale of the query-key products, in addition to :func:`attention_factor`."""
    scale: float = config.head_dim**-0.5 if config.score_scale is None else config.score_scale
    scaling = config.rope_scaling
    if config.latent is not None and scaling is not None and scaling.get("mscale_all_dim"):
        scale *= _sharpening(scaling["factor"], scaling["mscale_all_dim"]) ** 2
    return scale


def _sharpening(factor: float, strength: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0


def _yarn(wavelengths: Tensor, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    pairs, length = len(wavelengths), scaling["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        """Fractional index of the pair that makes ``times`` turns over the original length."""
        return 2 * pairs * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = pair_that_turns(scaling.get("beta_fast") or 32)
    last = pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first if last != first else 0.001
    keep = 1 - ((torch.arange(pairs, dtype=torch.float32) - first) / width).clamp(0, 1)
    frequencies: Tensor = 1.0 / (scaling["factor"] * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep
    return frequencies
