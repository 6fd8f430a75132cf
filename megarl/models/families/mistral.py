"""Mistral: Llama's layers; sliding-window attention in the first version only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.models import declaration as d
from megarl.models.model_config import Traits
from megarl.models.registry import refuse_settings, refuse_sliding_window, register_family


@register_family("MistralForCausalLM", "MistralForSequenceClassification", "MistralForTokenClassification")
class Mistral:
    """Mistral 7B, Nemo, Small (text)."""

    name = "mistral"
    layer = (d.INPUT_NORM, d.ATTENTION_OUTPUT, d.QKV_WEIGHT, d.MLP_NORM, d.GATE_UP, d.DOWN)

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """No biases or norms in the attention; the default window of a file without one is 4096."""
        refuse_settings(raw, hidden_act="silu")
        refuse_sliding_window(raw, default=4096)
        return Traits()
