"""OLMo 2 and OLMo 3: norms on outputs of attention and MLP, and over all heads of q and k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.base.errors import ModelError
from megarl.models import declaration as d
from megarl.models.model_config import SlidingWindow, Traits
from megarl.models.registry import count, refuse_settings, register_family, rope_section

_LAYER = (
    d.ATTENTION_OUTPUT,
    d.QKV_WEIGHT,
    d.Q_NORM_OVER_HEADS,
    d.K_NORM_OVER_HEADS,
    d.ATTENTION_OUTPUT_NORM,
    d.GATE_UP,
    d.DOWN,
    d.MLP_OUTPUT_NORM,
)
_FULL, _SLIDING = "full_attention", "sliding_attention"


@register_family("Olmo2ForCausalLM", "Olmo2ForSequenceClassification")
class Olmo2:
    """OLMo 2 (https://arxiv.org/abs/2501.00656)."""

    name = "olmo2"
    layer = _LAYER

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Norms on outputs, not on inputs."""
        refuse_settings(raw, hidden_act="silu", attention_bias=False)
        return Traits(qk_norm=True, qk_norm_over_heads=True, input_norms=False, output_norms=True)


@register_family("Olmo3ForCausalLM", "Olmo3ForSequenceClassification")
class Olmo3:
    """OLMo 3: OLMo 2 with sliding-window attention in three of four layers."""

    name = "olmo3"
    layer = _LAYER

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """The layers with full attention may have a rotary scaling; those with a window have none."""
        refuse_settings(raw, hidden_act="silu", attention_bias=False)
        return Traits(
            qk_norm=True,
            qk_norm_over_heads=True,
            input_norms=False,
            output_norms=True,
            rope_theta=500000.0,
            window=SlidingWindow(count(raw, "sliding_window", 4096), _window_layers(raw), _window_theta(raw)),
        )


def _window_layers(raw: Mapping[str, Any]) -> tuple[bool, ...]:
    kinds = raw.get("layer_types")
    if kinds is None:
        return tuple(layer % 4 != 3 for layer in range(count(raw, "num_hidden_layers")))
    unknown = sorted(set(kinds) - {_FULL, _SLIDING})
    if unknown:
        raise ModelError(f"config.json: layer_types has {unknown[0]!r}, expected {_FULL!r} or {_SLIDING!r}")
    return tuple(kind == _SLIDING for kind in kinds)


def _window_theta(raw: Mapping[str, Any]) -> float:
    """Read the rotary base of layers with a window: of its section, or of both kinds of layers."""
    parameters = raw.get("rope_parameters")
    if not parameters:
        return float(raw.get("rope_theta") or 500000.0)
    if _FULL not in parameters or _SLIDING not in parameters:
        raise ModelError(f"config.json: rope_parameters needs the sections {_FULL!r} and {_SLIDING!r}")
    section = rope_section(raw, _SLIDING)
    kind = section.get("rope_type", "default")
    if kind != "default":
        raise ModelError(f"config.json: rope_type={kind!r} of {_SLIDING!r} is not supported, only 'default'")
    return float(section.get("rope_theta") or 500000.0)
