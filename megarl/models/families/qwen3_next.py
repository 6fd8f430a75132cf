"""Qwen3-Next and the text models of Qwen3.5: gated delta nets, and gated full attention in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.base.errors import ModelError
from megarl.models import declaration as d
from megarl.models.families.qwen import qwen_experts
from megarl.models.model_config import Experts, LinearAttention, Traits
from megarl.models.registry import count, linear_layers, refuse_settings, register_family, rotary_factor

_ATTENTION = (
    d.ATTENTION_OUTPUT._replace(when=d.in_attention_layers),
    d.GATED_QKV_WEIGHT,
    d.Q_NORM._replace(when=d.in_attention_layers),
    d.K_NORM._replace(when=d.in_attention_layers),
)
_BY_HEAD = d.gated_delta_net(
    {"in_proj_qkvz.weight": ("linear_qkvz", "hidden")},
    {"in_proj_ba.weight": ("linear_ba", "hidden")},
    d.Split.SECTIONS_BY_HEAD,
)
_BY_KIND = d.gated_delta_net(
    {"in_proj_qkv.weight": ("linear_qkv", "hidden"), "in_proj_z.weight": ("linear_z", "hidden")},
    {"in_proj_b.weight": ("linear_b", "hidden"), "in_proj_a.weight": ("linear_a", "hidden")},
    d.Split.SECTIONS,
)
_EXPERTS = (
    *d.experts_of("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    *d.shared_experts_of("mlp.shared_expert"),
    d.SHARED_EXPERT_GATE,
)


@register_family("Qwen3NextForCausalLM", "Qwen3NextForSequenceClassification", "Qwen3NextForTokenClassification")
class Qwen3Next:
    """Qwen3-Next-80B-A3B; ``num_experts=0`` or ``mlp_only_layers`` make dense layers.

    The multi-token prediction layer (``mtp``) is not trained (:mod:`megarl.models.multi_token`).
    """

    name = "qwen3_next"
    layer = (d.INPUT_NORM, *_ATTENTION, *_BY_HEAD, d.MLP_NORM, d.GATE_UP, d.DOWN, *_EXPERTS)

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Projections of gated delta nets grouped by key head."""
        experts = None
        if raw.get("num_experts") != 0:
            experts = qwen_experts(raw, 10, 512, normalize=True, **_shared(raw))
        return _traits(raw, experts, grouped=True)


@register_family("Qwen3_5ForCausalLM", "Qwen3_5TextForSequenceClassification")
class Qwen35:
    """The dense text models of Qwen3.5, as separate folders; images are not read.

    The multi-token prediction layer (``mtp``) is not trained (:mod:`megarl.models.multi_token`).
    """

    name = "qwen3_5"
    layer = (d.INPUT_NORM, *_ATTENTION, *_BY_KIND, d.MLP_NORM, d.GATE_UP, d.DOWN)

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Projections of gated delta nets one kind after the other."""
        return _traits(raw, None, grouped=False, text_suffix="Text")


@register_family("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForSequenceClassification")
class Qwen35Moe:
    """The text models of Qwen3.5 with experts in all layers, as separate folders; images are not read.

    transformers has no class with a scalar head; megarl writes critics and reward models under the usual name, and
    reads them.
    """

    name = "qwen3_5_moe"
    layer = (d.INPUT_NORM, *_ATTENTION, *_BY_KIND, d.MLP_NORM, *_EXPERTS)

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Weights of a token's experts always sum to 1."""
        refuse_settings(raw, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
        return _traits(raw, qwen_experts(raw, 8, 512, normalize=True, **_shared(raw)), grouped=False)


def _shared(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"shared_ffn_hidden_size": count(raw, "shared_expert_intermediate_size", 512), "shared_gate": True}


def _traits(raw: Mapping[str, Any], experts: Experts | None, *, grouped: bool, text_suffix: str = "") -> Traits:
    refuse_settings(raw, hidden_act="silu", attention_bias=False)
    if raw.get("head_dim") is None:
        raise ModelError("config.json: head_dim is missing", code="model.field-missing")
    keys, values = count(raw, "linear_num_key_heads", 16), count(raw, "linear_num_value_heads", 32)
    if values % keys:
        text = f"config.json: linear_num_key_heads={keys} does not divide linear_num_value_heads={values}"
        raise ModelError(text, code="model.linear-heads")
    linear = LinearAttention(
        layers=linear_layers(raw, every=count(raw, "full_attention_interval", 4)),
        key_heads=keys,
        value_heads=values,
        key_dim=count(raw, "linear_key_head_dim", 128),
        value_dim=count(raw, "linear_value_head_dim", 128),
        conv_width=count(raw, "linear_conv_kernel_dim", 4, least=2),
        grouped=grouped,
    )
    return Traits(
        qk_norm=True,
        zero_centered_norms=True,
        output_gate=True,
        rotary_factor=rotary_factor(raw, default=0.25),
        experts=experts,
        linear=linear,
        text_suffix=text_suffix,
    )
