"""Qwen3 (dense): no biases, an RMS norm on each head's q and k, and an independent head width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.models import declaration as d
from megarl.models.model_config import Traits
from megarl.models.registry import refuse_settings, register_family


@register_family("Qwen3ForCausalLM", "Qwen3ForSequenceClassification", "Qwen3ForTokenClassification")
class Qwen3:
    """Qwen3 (dense)."""

    name = "qwen3"
    layer = (d.INPUT_NORM, d.ATTENTION_OUTPUT, d.QKV_WEIGHT, d.Q_NORM, d.K_NORM, d.MLP_NORM, d.GATE_UP, d.DOWN)

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Norms on q and k always."""
        refuse_settings(raw, hidden_act="silu", use_sliding_window=False, attention_bias=False)
        return Traits(qk_norm=True)
