"""OLMo 2, OLMo 3 and OLMoE: norms on outputs of attention and MLP, and over all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.models import declaration as d
from megarl.models.model_config import Experts, SlidingWindow, Traits
from megarl.models.registry import count, flag, refuse_settings, register_family, window_layers, window_theta

_LAYER = (
    d.ATTENTION_OUTPUT,
    d.QKV_WEIGHT,
    d.Q_NORM_OVER_HEADS,
    d.K_NORM_OVER_HEADS,
    d.ATTENTION_OUTPUT_NORM,
    d.GATE_UP,
    d.DOWN,
    d.MLP_OUTPUT_NORM,
)

_OLMO3_THETA = 500000.0


@register_family("Olmo2ForCausalLM", "Olmo2ForSequenceClassification")
class Olmo2:
    """OLMo 2 (https://arxiv.org/abs/2501.00656)."""

    name = "olmo2"
    layer = _LAYER

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Norms on outputs, not on inputs."""
        refuse_settings(raw, hidden_act="silu", attention_bias=False)
        return Traits(qk_norm=True, qk_norm_over_heads=True, input_norms=False, output_norms=True, rms_norm_eps=1e-5)


@register_family("Olmo3ForCausalLM", "Olmo3ForSequenceClassification")
class Olmo3:
    """OLMo 3: OLMo 2 with sliding-window attention in three of four layers."""

    name = "olmo3"
    layer = _LAYER

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """The layers with full attention may have a rotary scaling; those with a window have none."""
        refuse_settings(raw, hidden_act="silu", attention_bias=False)
        if not raw.get("rope_parameters"):
            # transformers 4 has this base in all layers, transformers 5 only in those with full attention
            refuse_settings(raw, rope_theta=_OLMO3_THETA)
        return Traits(
            qk_norm=True,
            qk_norm_over_heads=True,
            input_norms=False,
            output_norms=True,
            rope_theta=_OLMO3_THETA,
            rms_norm_eps=1e-5,
            window=SlidingWindow(
                count(raw, "sliding_window", 4096), window_layers(raw, every=4), window_theta(raw, _OLMO3_THETA)
            ),
        )


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
        *d.experts_of("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    )

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Experts in all layers; ``intermediate_size`` is the width of one."""
        refuse_settings(raw, hidden_act="silu", attention_bias=False, clip_qkv=None)
        experts = Experts(
            count=count(raw, "num_experts"),
            per_token=count(raw, "num_experts_per_tok"),
            ffn_hidden_size=count(raw, "intermediate_size"),
            layers=(True,) * count(raw, "num_hidden_layers"),
            normalize=flag(raw, "norm_topk_prob"),
        )
        return Traits(qk_norm=True, qk_norm_over_heads=True, rms_norm_eps=1e-5, experts=experts)
