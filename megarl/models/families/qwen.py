"""Qwen2 and Qwen3, dense and with experts; Qwen2.5-VL and Qwen3-VL; Qwen3-Next; Qwen3.5 with images or of text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.base.errors import ModelError
from megarl.models import declaration as d
from megarl.models.model_config import Experts, LinearAttention, Traits, Vision
from megarl.models.registry import (
    count,
    entries,
    flag,
    json_object,
    linear_layers,
    position_sections,
    refuse_settings,
    register_family,
    require_fields,
    rope_section,
    rotary_factor,
)

_QWEN2 = (d.INPUT_NORM, d.ATTENTION_OUTPUT, d.QKV_WEIGHT, d.QKV_BIAS, d.MLP_NORM, d.GATE_UP, d.DOWN)
_QWEN3 = (d.INPUT_NORM, d.ATTENTION_OUTPUT, d.QKV_WEIGHT, d.Q_NORM, d.K_NORM, d.MLP_NORM, d.GATE_UP, d.DOWN)
_EXPERTS = d.experts_of("mlp")
_SHARED_EXPERT = (*d.shared_experts_of("mlp.shared_expert"), d.SHARED_EXPERT_GATE)
_ATTENTION = (d.ATTENTION_OUTPUT, d.GATED_QKV_WEIGHT, d.Q_NORM, d.K_NORM)
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


@register_family(
    "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLForSequenceClassification", "Qwen2_5_VLForTokenClassification"
)
class Qwen25VL:
    """Qwen2.5-VL: the decoder of Qwen2 with images.

    transformers has no classes with a scalar head; megarl writes critics and reward models under the usual names, and
    reads them.
    """

    name = "qwen2_5_vl"
    layer = _QWEN2

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Biases on q, k, v always; contiguous sections of positions."""
        refuse_settings(raw, hidden_act="silu", use_sliding_window=False)
        vision = _vision(raw, "qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel", image_token=151655)
        return Traits(qkv_bias=True, rope_theta=1000000.0, rms_norm_eps=1e-5, vision=vision)


@register_family("Qwen3VLForConditionalGeneration", "Qwen3VLForSequenceClassification", "Qwen3VLForTokenClassification")
class Qwen3VL:
    """Qwen3-VL: the decoder of Qwen3 with images, whose features also enter after the first layers.

    transformers has no classes with a scalar head; megarl writes critics and reward models under the usual names, and
    reads them.
    """

    name = "qwen3_vl"
    layer: tuple[d.Declaration, ...] = _QWEN3
    tower = "qwen3_vl.Qwen3VLVisionModel"

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Norms on q and k; alternating sections of positions."""
        refuse_settings(raw, hidden_act="silu", attention_bias=False)
        vision = _vision(raw, self.tower, image_token=151655, interleaved=(24, 20, 20))
        layers = entries(vision.settings, "deepstack_visual_indexes", int) or (8, 16, 24)
        return Traits(qk_norm=True, rope_theta=500000.0, vision=replace(vision, deepstack=len(layers)))


@register_family("Qwen2MoeForCausalLM", "Qwen2MoeForSequenceClassification", "Qwen2MoeForTokenClassification")
class Qwen2Moe:
    """Qwen1.5-MoE and Qwen2-57B-A14B: routed experts and a gated shared expert."""

    name = "qwen2_moe"
    layer = (*_QWEN2, *_EXPERTS, *_SHARED_EXPERT)

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Biases on q, k, v; a gated shared expert."""
        refuse_settings(raw, hidden_act="silu", use_sliding_window=False, qkv_bias=True)
        return Traits(qkv_bias=True, experts=_experts(raw, 4, 1408, shared=5632))


@register_family("Qwen3MoeForCausalLM", "Qwen3MoeForSequenceClassification", "Qwen3MoeForTokenClassification")
class Qwen3Moe:
    """Qwen3-30B-A3B and Qwen3-235B-A22B."""

    name = "qwen3_moe"
    layer = (*_QWEN3, *_EXPERTS)

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Norms on q and k; no shared expert."""
        refuse_settings(raw, hidden_act="silu", use_sliding_window=False, attention_bias=False)
        return Traits(qk_norm=True, experts=_experts(raw, 8, 768))


@register_family(
    "Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeForSequenceClassification", "Qwen3VLMoeForTokenClassification"
)
class Qwen3VLMoe(Qwen3VL):
    """Qwen3-VL-30B-A3B and Qwen3-VL-235B-A22B: the decoder of Qwen3 with experts. For critics, see :class:`Qwen3VL`."""

    name = "qwen3_vl_moe"
    layer = (*_QWEN3, *d.experts_of("mlp", stacked=True))
    tower = "qwen3_vl_moe.Qwen3VLMoeVisionModel"

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Weights of a token's experts always sum to 1."""
        refuse_settings(raw, norm_topk_prob=True)
        return replace(super().traits(raw), experts=_experts(raw, 4, 1408, normalize=True))


@register_family("Qwen3NextForCausalLM", "Qwen3NextForSequenceClassification", "Qwen3NextForTokenClassification")
class Qwen3Next:
    """Qwen3-Next-80B-A3B; ``num_experts=0`` or ``mlp_only_layers`` make dense layers."""

    name = "qwen3_next"
    layer = (d.INPUT_NORM, *_ATTENTION, *_BY_HEAD, d.MLP_NORM, d.GATE_UP, d.DOWN, *_EXPERTS, *_SHARED_EXPERT)

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Projections of gated delta nets grouped by key head."""
        experts = _experts(raw, 10, 512, normalize=True, shared=512) if raw.get("num_experts") != 0 else None
        return _hybrid_traits(raw, experts, grouped=True)


@register_family("Qwen3_5ForCausalLM", "Qwen3_5TextForSequenceClassification")
class Qwen35:
    """The dense text models of Qwen3.5, as separate folders; images are not read."""

    name = "qwen3_5"
    layer = (d.INPUT_NORM, *_ATTENTION, *_BY_KIND, d.MLP_NORM, d.GATE_UP, d.DOWN)

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Projections of gated delta nets one kind after the other."""
        return _hybrid_traits(raw, None, grouped=False, text_suffix="Text")


@register_family("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForSequenceClassification")
class Qwen35Moe:
    """The text models of Qwen3.5 with experts in all layers, as separate folders; images are not read.

    transformers has no class with a scalar head; megarl writes critics and reward models under the usual name, and
    reads them.
    """

    name = "qwen3_5_moe"
    layer = (d.INPUT_NORM, *_ATTENTION, *_BY_KIND, d.MLP_NORM, *_EXPERTS, *_SHARED_EXPERT)

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Weights of a token's experts always sum to 1."""
        refuse_settings(raw, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
        return _hybrid_traits(raw, _experts(raw, 8, 512, normalize=True, shared=512), grouped=False)


@register_family("Qwen3_5ForConditionalGeneration", "Qwen3_5ForSequenceClassification", "Qwen3_5ForTokenClassification")
class Qwen35VL(Qwen35):
    """The dense models of Qwen3.5 as published: with images."""

    name = "qwen3_5_vl"

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Interleaved sections of positions; names in files are nested."""
        vision = _vision(raw, "qwen3_5.Qwen3_5VisionModel", image_token=248056, interleaved=(11, 11, 10))
        return replace(super().traits(raw), text_suffix="", vision=vision)


@register_family(
    "Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForSequenceClassification", "Qwen3_5MoeForTokenClassification"
)
class Qwen35MoeVL(Qwen35Moe):
    """The models of Qwen3.5 with experts as published: with images.

    Published files have transformers' tensors of all experts of a layer; exports have one per expert, as transformers
    writes them. For critics, see :class:`Qwen35Moe`.
    """

    name = "qwen3_5_moe_vl"

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Interleaved sections of positions; names in files are nested."""
        vision = _vision(raw, "qwen3_5_moe.Qwen3_5MoeVisionModel", image_token=248056, interleaved=(11, 11, 10))
        return replace(super().traits(raw), vision=vision)


def _vision(
    raw: Mapping[str, Any], tower: str, *, image_token: int, interleaved: tuple[int, int, int] | None = None
) -> Vision:
    """Read the traits of a model with images.

    Args:
        tower: transformers' class.
        image_token: default of ``image_token_id``; that of ``video_token_id`` is the next one.
        interleaved: default sections of positions that interleave, in files with nested names.
    """
    refuse_settings(rope_section(raw), mrope_interleaved=interleaved is not None)
    return Vision(
        image_token=count(raw, "image_token_id", image_token, least=0),
        video_token=count(raw, "video_token_id", image_token + 1, least=0),
        tower=tower,
        prefix="visual.",
        sections=position_sections(raw, interleaved),
        nested=interleaved is not None,
        interleaved=interleaved is not None,
        settings=dict(json_object(raw, "vision_config")),
    )


def _experts(
    raw: Mapping[str, Any], per_token: int, width: int, *, normalize: bool = False, shared: int | None = None
) -> Experts:
    """Experts with a softmax router in the layers that ``decoder_sparse_step`` and ``mlp_only_layers`` select.

    The arguments are the defaults of ``num_experts_per_tok``, ``moe_intermediate_size``, ``norm_topk_prob`` and
    ``shared_expert_intermediate_size``; None = no shared expert.
    """
    step, dense = count(raw, "decoder_sparse_step", 1), entries(raw, "mlp_only_layers", int)
    return Experts(
        count=count(raw, "num_experts"),
        per_token=count(raw, "num_experts_per_tok", per_token),
        ffn_hidden_size=count(raw, "moe_intermediate_size", width),
        layers=tuple((n + 1) % step == 0 and n not in dense for n in range(count(raw, "num_hidden_layers"))),
        normalize=flag(raw, "norm_topk_prob", normalize),
        shared_ffn_hidden_size=0 if shared is None else count(raw, "shared_expert_intermediate_size", shared),
        shared_gate=shared is not None,
    )


def _hybrid_traits(raw: Mapping[str, Any], experts: Experts | None, *, grouped: bool, text_suffix: str = "") -> Traits:
    refuse_settings(raw, hidden_act="silu", attention_bias=False)
    require_fields(raw, "head_dim")
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
