"""gpt-oss: attention sinks, sliding windows in every second layer, and experts with biases and a clamped activation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.base.errors import ModelError
from megarl.models import declaration as d
from megarl.models.model_config import ClampedGate, Experts, SlidingWindow, Traits
from megarl.models.registry import count, number, refuse_settings, register_family, window_layers


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
        for field in ("head_dim", "rms_norm_eps"):
            if raw.get(field) is None:
                raise ModelError(f"config.json: {field} is missing", code="model.field-missing")
        if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
            text = "config.json: rope_parameters is missing; gpt-oss has rope_type 'yarn' or 'default'"
            raise ModelError(text, code="model.field-missing")
        alpha, limit = number(raw, "swiglu_alpha", 1.702), number(raw, "swiglu_limit", 7.0)
        experts = Experts(
            count=count(raw, "num_local_experts", 128),
            per_token=count(raw, "num_experts_per_tok", 4),
            ffn_hidden_size=count(raw, "intermediate_size"),
            layers=(True,) * count(raw, "num_hidden_layers"),
            biases=True,
            clamped=ClampedGate(alpha, limit),
        )
        return Traits(
            qkv_bias=True,
            output_bias=True,
            sinks=True,
            rope_theta=150000.0,
            window=SlidingWindow(count(raw, "sliding_window", 128), window_layers(raw, every=2), None),
            experts=experts,
        )
