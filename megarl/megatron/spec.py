"""Which layers the decoder is built of: Transformer Engine's where it is installed, else Megatron's with torch's."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megarl.megatron.layers import PackedAttention, RMSNorm, SwiGLU
from megarl.megatron.mla import latent_attention_spec
from megarl.megatron.moe import expert_layer_spec
from megarl.megatron.versions import submodules_of
from megarl.models import ModelConfig


def decoder_spec(model: ModelConfig, layers: Iterable[int], *, fused: bool) -> TransformerBlockSubmodules:
    """Specification of one chunk of the decoder, for ``GPTModel``.

    Args:
        model: the model.
        layers: global numbers of the chunk's layers.
        fused: build it of Transformer Engine's layers.
    """
    kinds = {has_experts: _layer(model, has_experts, fused) for has_experts in {model.has_experts(n) for n in layers}}
    norm = importlib.import_module("megatron.core.extensions.transformer_engine").TENorm if fused else RMSNorm
    return TransformerBlockSubmodules(layer_specs=[kinds[model.has_experts(n)] for n in layers], layer_norm=norm)


def _layer(model: ModelConfig, has_experts: bool, fused: bool) -> ModuleSpec:
    layer = _fused_layer(model, has_experts) if fused else _torch_layer(model)
    if has_experts:
        assert model.experts is not None
        layer.submodules.mlp = expert_layer_spec(model.experts, fused=fused)
    return layer


def _torch_layer(model: ModelConfig) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(qk_layernorm=model.qk_norm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    submodules_of(layer.submodules.mlp).activation_func = SwiGLU
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if model.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if model.latent is not None:
        layer.submodules.self_attention = latent_attention_spec(
            model, layer.submodules.self_attention, attention.linear_qkv
        )
    return layer


def _fused_layer(model: ModelConfig, has_experts: bool) -> ModuleSpec:
    layer = get_gpt_layer_with_transformer_engine_spec(
        qk_layernorm=model.qk_norm,
        num_experts=model.experts.count if has_experts and model.experts is not None else None,
        moe_grouped_gemm=has_experts,
    )
    if model.latent is not None:
        engine = importlib.import_module("megatron.core.extensions.transformer_engine")
        layer.submodules.input_layernorm = engine.TENorm
        layer.submodules.self_attention = latent_attention_spec(
            model, layer.submodules.self_attention, engine.TEColumnParallelLinear
        )
    return layer
