"""GLM-4.5 and 4.6: DeepSeek-V3's experts, plain attention, and rotary embeddings on a part of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.models import declaration as d
from megarl.models.families.deepseek import sigmoid_experts
from megarl.models.model_config import Traits
from megarl.models.registry import flag, refuse_settings, register_family, rotary_factor


@register_family("Glm4MoeForCausalLM", "Glm4MoeForSequenceClassification")
class Glm4Moe:
    """GLM-4.5, 4.5-Air and 4.6: dense first layers, then experts with a sigmoid router and shared experts.

    The multi-token prediction layer (``num_nextn_predict_layers``) is not trained. transformers has no class with a
    scalar head; megarl writes critics and reward models under the usual name, and reads them.
    """

    name = "glm4_moe"
    layer = (
        d.INPUT_NORM,
        d.ATTENTION_OUTPUT,
        d.QKV_WEIGHT,
        d.QKV_BIAS._replace(when=d.with_qkv_bias),
        d.Q_NORM._replace(when=d.with_qk_norm),
        d.K_NORM._replace(when=d.with_qk_norm),
        d.MLP_NORM,
        d.GATE_UP,
        d.DOWN,
        *d.experts_of("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
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
            experts=sigmoid_experts(raw, dense=1, scaling=1.0, groups=1, groups_per_token=1),
        )
