"""Which layers the decoder is built of: Transformer Engine's where it is installed, else Megatron's with torch's."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.megatron.layers import PackedAttention, RMSNorm, SwiGLU

logger = logging.getLogger(__name__)


def uses_transformer_engine(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Transformer Engine computes the layers: it needs CUDA, and packs sequences in half precision only."""
    chosen = (
        device.type == "cuda" and dtype is torch.bfloat16 and importlib.util.find_spec("transformer_engine") is not None
    )
    logger.info("decoder layers on %s in %s: %s", device, dtype, "Transformer Engine" if chosen else "torch")
    return chosen


def decoder_spec(config: TransformerConfig, transformer_engine: bool) -> Any:
    """Specification of this pipeline stage's decoder, for ``GPTModel``."""
    if transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    layer.submodules.mlp.submodules.activation_func = SwiGLU
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)
