"""Gemma 3 (text): norms before and after attention and MLP, GeGLU, sliding-window attention, scaled embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.base.errors import ModelError
from megarl.models import declaration as d
from megarl.models.model_config import SlidingWindow, Traits
from megarl.models.registry import count, number, refuse_settings, register_family, window_layers, window_theta


@register_family("Gemma3ForCausalLM", "Gemma3TextForSequenceClassification")
class Gemma3:
    """Gemma 3 270M and 1B, and the text models of the larger ones as separate folders."""

    name = "gemma3"
    layer = (
        d.INPUT_NORM,
        d.ATTENTION_OUTPUT,
        d.QKV_WEIGHT,
        d.Q_NORM,
        d.K_NORM,
        d.ATTENTION_OUTPUT_NORM,
        d.MLP_INPUT_NORM,
        d.GATE_UP,
        d.DOWN,
        d.MLP_OUTPUT_NORM,
    )

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """The layers with full attention may have a rotary scaling; those with a window have another base."""
        refuse_settings(raw, hidden_activation="gelu_pytorch_tanh", attention_bias=False)
        refuse_settings(raw, attn_logit_softcapping=None, final_logit_softcapping=None)
        refuse_settings(raw, use_bidirectional_attention=False)
        if raw.get("head_dim") is None:
            raise ModelError("config.json: head_dim is missing", code="model.field-missing")
        layers = window_layers(raw, every=count(raw, "sliding_window_pattern", 6))
        theta = window_theta(raw, number(raw, "rope_local_base_freq", 10000.0))
        return Traits(
            qk_norm=True,
            output_norms=True,
            zero_centered_norms=True,
            activation="gelu_tanh",
            embedding_scale=count(raw, "hidden_size") ** 0.5,
            score_scale=count(raw, "query_pre_attn_scalar", 256) ** -0.5,
            tie_word_embeddings=True,
            rope_theta=1e6,
            window=SlidingWindow(count(raw, "sliding_window", 4096), layers, theta),
            text_suffix="Text",
        )
