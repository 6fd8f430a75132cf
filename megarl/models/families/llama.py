"""Llama 2 and 3, Mistral and Mixtral: no biases; Llama 3.1 and later scale the rotary frequencies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.models import declaration as d
from megarl.models.model_config import Experts, Traits
from megarl.models.registry import count, refuse_settings, refuse_sliding_window, register_family

_ATTENTION = (d.INPUT_NORM, d.ATTENTION_OUTPUT, d.QKV_WEIGHT, d.MLP_NORM)


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
        experts = Experts(
            count=count(raw, "num_local_experts", 8),
            per_token=count(raw, "num_experts_per_tok", 2),
            ffn_hidden_size=count(raw, "intermediate_size"),
            layers=(True,) * count(raw, "num_hidden_layers"),
        )
        return Traits(experts=experts, rope_theta=1e6, rms_norm_eps=1e-5)
