"""Llama 2 and 3: no biases; Llama 3.1 and later scale the rotary frequencies (``rope_type: llama3``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.models import declaration as d
from megarl.models.model_config import Traits
from megarl.models.registry import refuse_settings, register_family


@register_family("LlamaForCausalLM", "LlamaForSequenceClassification", "LlamaForTokenClassification")
class Llama:
    """Llama 2, 3, 3.1, 3.2 (text), 3.3."""

    name = "llama"
    layer = (d.INPUT_NORM, d.ATTENTION_OUTPUT, d.QKV_WEIGHT, d.MLP_NORM, d.GATE_UP, d.DOWN)

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """No biases or norms in the attention."""
        refuse_settings(raw, hidden_act="silu", attention_bias=False, mlp_bias=False)
        return Traits()
