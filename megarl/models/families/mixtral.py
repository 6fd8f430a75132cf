"""Mixtral: Mistral's attention, and experts with a softmax router in each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.models import declaration as d
from megarl.models.model_config import Experts, Traits
from megarl.models.registry import count, refuse_settings, refuse_sliding_window, register_family


@register_family("MixtralForCausalLM", "MixtralForSequenceClassification", "MixtralForTokenClassification")
class Mixtral:
    """Mixtral 8x7B and 8x22B."""

    name = "mixtral"
    layer = (
        d.INPUT_NORM,
        d.ATTENTION_OUTPUT,
        d.QKV_WEIGHT,
        d.MLP_NORM,
        *d.experts_of("block_sparse_moe", gate="w1", up="w3", down="w2"),
    )

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Experts in every layer, as wide as ``intermediate_size``."""
        refuse_settings(raw, hidden_act="silu")
        refuse_sliding_window(raw)
        experts = Experts(
            count=count(raw, "num_local_experts", 8),
            per_token=count(raw, "num_experts_per_tok", 2),
            ffn_hidden_size=count(raw, "intermediate_size"),
            layers=(True,) * count(raw, "num_hidden_layers"),
        )
        return Traits(experts=experts, rope_theta=1e6, rms_norm_eps=1e-5)
