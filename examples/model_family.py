"""A custom model family, dots.llm1; docs/how_to/add_a_model.md explains each part.

megarl sft model.path=/models/dots.llm1.base model.external_lib=examples/model_family.py \
  data.train_files=/data/train.parquet trainer.experiment_name=dots
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.base.errors import ModelError
from megarl.models import declaration as d
from megarl.models.model_config import Experts, Traits
from megarl.models.registry import count, flag, number, refuse_settings, register_family


@register_family("Dots1ForCausalLM")
class Dots1:
    """dots.llm1: norms on q and k, a sigmoid router with correction bias, and shared experts."""

    name = "dots1"
    layer = (
        d.INPUT_NORM,
        d.ATTENTION_OUTPUT,
        d.QKV_WEIGHT,
        d.Q_NORM,
        d.K_NORM,
        d.MLP_NORM,
        d.GATE_UP,
        d.DOWN,
        *d.experts_of("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        *d.shared_experts_of("mlp.shared_experts"),
        d.CORRECTION_BIAS,
    )

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Return the architecture's traits: dense first layers, then experts."""
        refuse_settings(raw, hidden_act="silu", attention_bias=False)
        if "sliding_attention" in (raw.get("layer_types") or []):
            text = "config.json: layer_types has 'sliding_attention', only 'full_attention' is supported"
            raise ModelError(text, code="model.unsupported-setting")
        width, dense = count(raw, "moe_intermediate_size"), count(raw, "first_k_dense_replace", 0, least=0)
        experts = Experts(
            count=count(raw, "n_routed_experts"),
            per_token=count(raw, "num_experts_per_tok"),
            ffn_hidden_size=width,
            layers=tuple(layer >= dense for layer in range(count(raw, "num_hidden_layers"))),
            shared_ffn_hidden_size=width * count(raw, "n_shared_experts"),
            score="sigmoid",
            normalize=flag(raw, "norm_topk_prob"),
            scaling=number(raw, "routed_scaling_factor", 1.0),
            groups=count(raw, "n_group", 1),
            groups_per_token=count(raw, "topk_group", 1),
            group_best=2,
            correction_bias=True,
        )
        return Traits(qk_norm=True, experts=experts)
