"""Qwen2, Qwen2.5 and Qwen3, dense and with experts in the layers selected by the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.models import declaration as d
from megarl.models.model_config import Experts, Traits
from megarl.models.registry import count, entries, flag, refuse_settings, register_family

_QWEN2 = (d.INPUT_NORM, d.ATTENTION_OUTPUT, d.QKV_WEIGHT, d.QKV_BIAS, d.MLP_NORM, d.GATE_UP, d.DOWN)
_QWEN3 = (d.INPUT_NORM, d.ATTENTION_OUTPUT, d.QKV_WEIGHT, d.Q_NORM, d.K_NORM, d.MLP_NORM, d.GATE_UP, d.DOWN)
_EXPERTS = d.experts_of("mlp", gate="gate_proj", up="up_proj", down="down_proj")


@register_family("Qwen2ForCausalLM", "Qwen2ForSequenceClassification", "Qwen2ForTokenClassification")
class Qwen2:
    """Qwen2 and Qwen2.5 (dense): biases on q, k and v."""

    name = "qwen2"
    layer = _QWEN2

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Biases on q, k, v always; the published architecture has no setting for them."""
        refuse_settings(raw, hidden_act="silu", use_sliding_window=False)
        return Traits(qkv_bias=True)


@register_family("Qwen3ForCausalLM", "Qwen3ForSequenceClassification", "Qwen3ForTokenClassification")
class Qwen3:
    """Qwen3 (dense): no biases, an RMS norm on each head's q and k, and an independent head width."""

    name = "qwen3"
    layer = _QWEN3

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Norms on q and k always."""
        refuse_settings(raw, hidden_act="silu", use_sliding_window=False, attention_bias=False)
        return Traits(qk_norm=True)


@register_family("Qwen2MoeForCausalLM", "Qwen2MoeForSequenceClassification", "Qwen2MoeForTokenClassification")
class Qwen2Moe:
    """Qwen1.5-MoE and Qwen2-57B-A14B: routed experts and a gated shared expert."""

    name = "qwen2_moe"
    layer = (*_QWEN2, *_EXPERTS, *d.shared_experts_of("mlp.shared_expert"), d.SHARED_EXPERT_GATE)

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Biases on q, k, v; a gated shared expert."""
        refuse_settings(raw, hidden_act="silu", use_sliding_window=False, qkv_bias=True)
        shared = count(raw, "shared_expert_intermediate_size", 5632)
        experts = qwen_experts(
            raw, default_per_token=4, default_ffn=1408, shared_ffn_hidden_size=shared, shared_gate=True
        )
        return Traits(qkv_bias=True, experts=experts)


@register_family("Qwen3MoeForCausalLM", "Qwen3MoeForSequenceClassification", "Qwen3MoeForTokenClassification")
class Qwen3Moe:
    """Qwen3-30B-A3B and Qwen3-235B-A22B."""

    name = "qwen3_moe"
    layer = (*_QWEN3, *_EXPERTS)

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Norms on q and k; no shared expert."""
        refuse_settings(raw, hidden_act="silu", use_sliding_window=False, attention_bias=False)
        return Traits(qk_norm=True, experts=qwen_experts(raw, default_per_token=8, default_ffn=768))


def qwen_experts(
    raw: Mapping[str, Any], default_per_token: int, default_ffn: int, normalize: bool = False, **shared: Any
) -> Experts:
    """Read experts with a softmax router in the layers that ``decoder_sparse_step`` and ``mlp_only_layers`` select.

    Args:
        default_per_token: default of ``num_experts_per_tok``.
        default_ffn: default of ``moe_intermediate_size``.
        normalize: default of ``norm_topk_prob``.
        **shared: fields of the shared expert.
    """
    step, dense = count(raw, "decoder_sparse_step", 1), entries(raw, "mlp_only_layers", int)
    return Experts(
        count=count(raw, "num_experts"),
        per_token=count(raw, "num_experts_per_tok", default_per_token),
        ffn_hidden_size=count(raw, "moe_intermediate_size", default_ffn),
        layers=tuple((n + 1) % step == 0 and n not in dense for n in range(count(raw, "num_hidden_layers"))),
        normalize=flag(raw, "norm_topk_prob", normalize),
        **shared,
    )
