"""Llama, and families with plain attention like it: Mistral, OLMo, Gemma 3 and gpt-oss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.base.errors import ModelError
from megarl.models import declaration as d
from megarl.models.model_config import ClampedGate, Experts, SlidingWindow, Traits
from megarl.models.registry import (
    count,
    flag,
    number,
    refuse_settings,
    refuse_sliding_window,
    register_family,
    require_fields,
    window_layers,
    window_theta,
)

_ATTENTION = (d.INPUT_NORM, d.ATTENTION_OUTPUT, d.QKV_WEIGHT, d.MLP_NORM)
_OLMO_NORMS: dict[str, Any] = {
    "qk_norm": True,
    "qk_norm_over_heads": True,
    "input_norms": False,
    "output_norms": True,
    "rms_norm_eps": 1e-5,
}
_OLMO3_THETA = 500000.0


@register_family("LlamaForCausalLM", "LlamaForSequenceClassification", "LlamaForTokenClassification")
class Llama:
    """Llama 2, 3, 3.1, 3.2 (text), 3.3."""

    name = "llama"
    layer = (*_ATTENTION, d.GATE_UP, d.DOWN)

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """No biases or norms in the attention."""
        refuse_settings(raw, hidden_act="silu", attention_bias=False, mlp_bias=False)
        return Traits()


@register_family("MistralForCausalLM", "MistralForSequenceClassification", "MistralForTokenClassification")
class Mistral:
    """Mistral 7B, Nemo, Small (text); sliding-window attention in the first version only."""

    name = "mistral"
    layer = (*_ATTENTION, d.GATE_UP, d.DOWN)

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """No biases or norms in the attention; the default window of a file without one is 4096."""
        refuse_settings(raw, hidden_act="silu")
        refuse_sliding_window(raw, default=4096)
        return Traits()


@register_family("MixtralForCausalLM", "MixtralForSequenceClassification", "MixtralForTokenClassification")
class Mixtral:
    """Mixtral 8x7B and 8x22B: experts with a softmax router in each layer."""

    name = "mixtral"
    layer = (*_ATTENTION, *d.experts_of("block_sparse_moe", gate="w1", up="w3", down="w2"))

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Experts in every layer, as wide as ``intermediate_size``."""
        refuse_settings(raw, hidden_act="silu")
        refuse_sliding_window(raw)
        return Traits(experts=_experts(raw, "num_local_experts", 8, 2), rope_theta=1e6, rms_norm_eps=1e-5)


_OLMO = (
    d.ATTENTION_OUTPUT,
    d.QKV_WEIGHT,
    d.Q_NORM_OVER_HEADS,
    d.K_NORM_OVER_HEADS,
    d.ATTENTION_OUTPUT_NORM,
    d.GATE_UP,
    d.DOWN,
    d.MLP_OUTPUT_NORM,
)


@register_family("Olmo2ForCausalLM", "Olmo2ForSequenceClassification")
class Olmo2:
    """OLMo 2 (https://arxiv.org/abs/2501.00656)."""

    name = "olmo2"
    layer = _OLMO

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Norms on outputs, not on inputs."""
        refuse_settings(raw, hidden_act="silu", attention_bias=False)
        return Traits(**_OLMO_NORMS)


@register_family("Olmo3ForCausalLM", "Olmo3ForSequenceClassification")
class Olmo3:
    """OLMo 3: OLMo 2 with sliding-window attention in three of four layers."""

    name = "olmo3"
    layer = _OLMO

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """The layers with full attention may have a rotary scaling; those with a window have none."""
        refuse_settings(raw, hidden_act="silu", attention_bias=False)
        if not raw.get("rope_parameters"):
            # transformers 4 has this base in all layers, transformers 5 only in those with full attention
            refuse_settings(raw, rope_theta=_OLMO3_THETA)
        layers, theta = window_layers(raw, every=4), window_theta(raw, _OLMO3_THETA)
        window = SlidingWindow(count(raw, "sliding_window", 4096), layers, theta)
        return Traits(**_OLMO_NORMS, rope_theta=_OLMO3_THETA, window=window)


@register_family("OlmoeForCausalLM")
class Olmoe:
    """OLMoE (https://arxiv.org/abs/2409.02060): norms before attention and experts, a softmax router."""

    name = "olmoe"
    layer = (
        d.INPUT_NORM,
        d.ATTENTION_OUTPUT,
        d.QKV_WEIGHT,
        d.Q_NORM_OVER_HEADS,
        d.K_NORM_OVER_HEADS,
        d.MLP_NORM,
        *d.experts_of("mlp"),
    )

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Experts in all layers; ``intermediate_size`` is the width of one."""
        refuse_settings(raw, hidden_act="silu", attention_bias=False, clip_qkv=None)
        experts = _experts(raw, "num_experts", normalize=flag(raw, "norm_topk_prob"))
        return Traits(qk_norm=True, qk_norm_over_heads=True, rms_norm_eps=1e-5, experts=experts)


@register_family("Gemma3ForCausalLM", "Gemma3TextForSequenceClassification")
class Gemma3:
    """Gemma 3 270M and 1B, and the text models of the larger ones as separate folders."""

    name = "gemma3"
    layer = (
        d.INPUT_NORM,
        d.ATTENTION_OUTPUT,
        d.QKV_WEIGHT,
        d.Q_NORM,
        d.K_NORM,
        d.ATTENTION_OUTPUT_NORM,
        d.MLP_INPUT_NORM,
        d.GATE_UP,
        d.DOWN,
        d.MLP_OUTPUT_NORM,
    )

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """The layers with full attention may have a rotary scaling; those with a window have another base."""
        refuse_settings(raw, hidden_activation="gelu_pytorch_tanh", attention_bias=False)
        refuse_settings(raw, attn_logit_softcapping=None, final_logit_softcapping=None)
        refuse_settings(raw, use_bidirectional_attention=False)
        require_fields(raw, "head_dim")
        layers = window_layers(raw, every=count(raw, "sliding_window_pattern", 6))
        theta = window_theta(raw, number(raw, "rope_local_base_freq", 10000.0))
        return Traits(
            qk_norm=True,
            output_norms=True,
            zero_centered_norms=True,
            activation="gelu_tanh",
            embedding_scale=count(raw, "hidden_size") ** 0.5,
            score_scale=count(raw, "query_pre_attn_scalar", 256) ** -0.5,
            tie_word_embeddings=True,
            rope_theta=1e6,
            window=SlidingWindow(count(raw, "sliding_window", 4096), layers, theta),
            text_suffix="Text",
        )


@register_family("GptOssForCausalLM", "GptOssForSequenceClassification", "GptOssForTokenClassification")
class GptOss:
    """gpt-oss-20b and gpt-oss-120b (https://arxiv.org/abs/2508.10925), in bfloat16 or with experts in MXFP4."""

    name = "gpt_oss"
    layer = (
        d.INPUT_NORM,
        d.SINKS,
        d.ATTENTION_OUTPUT,
        d.ATTENTION_OUTPUT_BIAS,
        d.QKV_WEIGHT,
        d.QKV_BIAS,
        d.MLP_NORM,
        *d.stacked_experts_of("mlp"),
    )

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Experts in every layer, as wide as ``intermediate_size``; all layers have the same rotary embeddings."""
        refuse_settings(raw, hidden_act="silu", attention_bias=True)
        require_fields(raw, "head_dim", "rms_norm_eps")
        if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
            text = "config.json: rope_parameters is missing; gpt-oss has rope_type 'yarn' or 'default'"
            raise ModelError(text, code="model.field-missing")
        clamped = ClampedGate(number(raw, "swiglu_alpha", 1.702), number(raw, "swiglu_limit", 7.0))
        return Traits(
            qkv_bias=True,
            output_bias=True,
            sinks=True,
            rope_theta=150000.0,
            window=SlidingWindow(count(raw, "sliding_window", 128), window_layers(raw, every=2), None),
            experts=_experts(raw, "num_local_experts", 128, 4, biases=True, clamped=clamped),
        )


def _experts(
    raw: Mapping[str, Any], field: str, default: int | None = None, per_token: int | None = None, **more: Any
) -> Experts:
    """Experts in every layer, as wide as ``intermediate_size``; ``field`` has their number."""
    return Experts(
        count=count(raw, field, default),
        per_token=count(raw, "num_experts_per_tok", per_token),
        ffn_hidden_size=count(raw, "intermediate_size"),
        layers=(True,) * count(raw, "num_hidden_layers"),
        **more,
    )
