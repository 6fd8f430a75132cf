"""DeepSeek-V2 and V3: latent attention, shared experts, group-limited expert choice; GLM-4.5 with V3's experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.base.errors import ModelError
from megarl.models import declaration as d
from megarl.models.model_config import Experts, Latent, Traits
from megarl.models.registry import count, flag, number, refuse_settings, register_family, rotary_factor

_LAYER = (
    d.INPUT_NORM,
    *d.LATENT_ATTENTION,
    d.MLP_NORM,
    d.GATE_UP,
    d.DOWN,
    *d.experts_of("mlp"),
    *d.shared_experts_of("mlp.shared_experts"),
)


@register_family("DeepseekV2ForCausalLM", "DeepseekV2ForSequenceClassification")
class DeepseekV2:
    """DeepSeek-V2 and V2-Lite: a softmax router; a group of experts ranks by its best expert."""

    name = "deepseek_v2"
    layer = _LAYER

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Groups only with ``topk_method=group_limited_greedy``; weights are never normalised."""
        refuse_settings(raw, hidden_act="silu", attention_bias=False, mlp_bias=False, norm_topk_prob=False)
        refuse_settings(raw, scoring_func="softmax", moe_layer_freq=1)
        method = raw.get("topk_method") or "greedy"
        if method not in ("greedy", "group_limited_greedy"):
            text = f"config.json: topk_method={method!r}, expected 'greedy' or 'group_limited_greedy'"
            raise ModelError(text, code="model.unsupported-setting")
        grouped = method == "group_limited_greedy"
        experts = _experts(
            raw,
            dense=0,
            normalize=False,
            scaling=number(raw, "routed_scaling_factor", 1.0),
            groups=count(raw, "n_group") if grouped else 1,
            groups_per_token=count(raw, "topk_group") if grouped else 1,
        )
        return Traits(experts=experts, latent=_latent(raw, interleaved=True))


@register_family("DeepseekV3ForCausalLM", "DeepseekV3ForSequenceClassification", "DeepseekV3ForTokenClassification")
class DeepseekV3:
    """DeepSeek-V3 and R1: a sigmoid router with a correction bias; a group ranks by its two best experts."""

    name = "deepseek_v3"
    layer = (*_LAYER, d.CORRECTION_BIAS)

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Groups always, possibly a single one."""
        refuse_settings(raw, hidden_act="silu", attention_bias=False, scoring_func="sigmoid")
        refuse_settings(raw, topk_method="noaux_tc", moe_layer_freq=1)
        experts = _sigmoid_experts(raw, dense=3, scaling=2.5, groups=8, groups_per_token=4)
        return Traits(experts=experts, latent=_latent(raw, interleaved=flag(raw, "rope_interleave", True)))


def _sigmoid_experts(
    raw: Mapping[str, Any], *, dense: int, scaling: float, groups: int, groups_per_token: int
) -> Experts:
    """Experts with a sigmoid router and a correction bias; the arguments are defaults of the fields."""
    return _experts(
        raw,
        dense,
        score="sigmoid",
        normalize=flag(raw, "norm_topk_prob", True),
        scaling=number(raw, "routed_scaling_factor", scaling),
        groups=count(raw, "n_group", groups),
        groups_per_token=count(raw, "topk_group", groups_per_token),
        group_best=2,
        correction_bias=True,
    )


def _experts(raw: Mapping[str, Any], dense: int, **routing: Any) -> Experts:
    ffn, dense = count(raw, "moe_intermediate_size"), count(raw, "first_k_dense_replace", dense, least=0)
    return Experts(
        count=count(raw, "n_routed_experts"),
        per_token=count(raw, "num_experts_per_tok"),
        ffn_hidden_size=ffn,
        layers=tuple(n >= dense for n in range(count(raw, "num_hidden_layers"))),
        shared_ffn_hidden_size=ffn * count(raw, "n_shared_experts"),
        **routing,
    )


def _latent(raw: Mapping[str, Any], interleaved: bool) -> Latent:
    return Latent(
        q_lora_rank=0 if raw.get("q_lora_rank", 1536) is None else count(raw, "q_lora_rank", 1536),
        kv_lora_rank=count(raw, "kv_lora_rank"),
        nope_dim=count(raw, "qk_nope_head_dim"),
        rope_dim=count(raw, "qk_rope_head_dim"),
        v_dim=count(raw, "v_head_dim"),
        interleaved=interleaved,
    )


@register_family("Glm4MoeForCausalLM", "Glm4MoeForSequenceClassification")
class Glm4Moe:
    """GLM-4.5, 4.5-Air and 4.6: dense first layers, then experts with a sigmoid router and shared experts.

    transformers has no class with a scalar head; megarl writes critics and reward models under the usual name, and
    reads them.
    """

    name = "glm4_moe"
    layer = (
        d.INPUT_NORM,
        d.ATTENTION_OUTPUT,
        d.QKV_WEIGHT,
        d.QKV_BIAS,
        d.Q_NORM,
        d.K_NORM,
        d.MLP_NORM,
        d.GATE_UP,
        d.DOWN,
        *d.experts_of("mlp"),
        *d.shared_experts_of("mlp.shared_experts"),
        d.CORRECTION_BIAS,
    )

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Biases on q, k, v, and norms on q and k, are options of the config."""
        refuse_settings(raw, hidden_act="silu")
        return Traits(
            qkv_bias=flag(raw, "attention_bias"),
            qk_norm=flag(raw, "use_qk_norm"),
            rms_norm_eps=1e-5,
            rotary_factor=rotary_factor(raw, default=0.5),
            experts=_sigmoid_experts(raw, dense=1, scaling=1.0, groups=1, groups_per_token=1),
        )
