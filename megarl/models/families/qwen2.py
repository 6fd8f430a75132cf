"""Qwen2 and Qwen2.5: biases on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.models import declaration as d
from megarl.models.model_config import Traits
from megarl.models.registry import refuse_settings, register_family


@register_family("Qwen2ForCausalLM", "Qwen2ForSequenceClassification", "Qwen2ForTokenClassification")
class Qwen2:
    """Qwen2 and Qwen2.5 (dense)."""

    name = "qwen2"
    layer = (d.INPUT_NORM, d.ATTENTION_OUTPUT, d.QKV_WEIGHT, d.QKV_BIAS, d.MLP_NORM, d.GATE_UP, d.DOWN)

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Biases on q, k, v always; the published architecture has no setting for them."""
        refuse_settings(raw, hidden_act="silu", use_sliding_window=False)
        return Traits(qkv_bias=True)
