"""The family-neutral view of a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError, ModelError
from megarl.models.layout import ParallelLayout
from megarl.models.registry import family_of, known_architectures, refuse_settings

ROPE_TYPES = ("default", "llama3")


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only model; counts and widths in elements."""

    architecture: str
    """Name in ``architectures``, such as ``Qwen2ForCausalLM``."""
    family: str
    """Name of the family that declares its parameters, such as ``qwen2``."""
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Width of one head; not always ``hidden_size / num_attention_heads``."""
    vocab_size: int
    """Rows of the embedding, before any padding."""
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    """None for plain rotary embeddings, else the scaling's parameters with its kind under ``rope_type``."""
    rms_norm_eps: float
    tie_word_embeddings: bool
    """The output layer is the embedding itself."""
    qkv_bias: bool
    qk_norm: bool
    raw: dict[str, Any] = field(repr=False, compare=False)
    """The whole ``config.json``, written back unchanged on export."""

    @property
    def is_value_model(self) -> bool:
        """Whether the folder holds a scalar head (``score.weight``) in place of the output layer."""
        return self.architecture.endswith("ForSequenceClassification")


def read_model_config(path: str | Path) -> ModelConfig:
    """Reads ``config.json`` of a model folder.

    Args:
        path: the folder.

    Raises:
        ModelError: the folder or the file is missing or malformed, the architecture has no weight map, or the file
            asks for something that megarl does not compute.
    """
    raw = _read_json(Path(path))
    try:
        return parse_model_config(raw)
    except ModelError as error:
        raise ModelError(f"model folder {path}: {error}") from None


def parse_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The neutral view of an already parsed ``config.json``; raises as :func:`read_model_config` does."""
    architectures = raw.get("architectures")
    if not (isinstance(architectures, list) and architectures and isinstance(architectures[0], str)):
        raise ModelError(
            f"config.json: architectures={architectures!r}, expected a list with one of: "
            f"{', '.join(known_architectures())}"
        )
    family = family_of(architectures[0])
    traits = family.traits(raw)
    refuse_settings(raw, quantization_config=None)
    heads = _count(raw, "num_attention_heads")
    kv_heads = _count(raw, "num_key_value_heads", heads)
    hidden = _count(raw, "hidden_size")
    if heads % kv_heads:
        raise ModelError(f"config.json: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}")
    if raw.get("head_dim") is None and hidden % heads:
        raise ModelError(f"config.json: num_attention_heads={heads} does not divide hidden_size={hidden}")
    theta, scaling = _rope(raw)
    return ModelConfig(
        architecture=architectures[0],
        family=family.name,
        num_layers=_count(raw, "num_hidden_layers"),
        hidden_size=hidden,
        ffn_hidden_size=_count(raw, "intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=_count(raw, "head_dim", hidden // heads),
        vocab_size=_count(raw, "vocab_size"),
        max_position_embeddings=_count(raw, "max_position_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=traits.qkv_bias,
        qk_norm=traits.qk_norm,
        raw=dict(raw),
    )


def check_layout(config: ModelConfig, layout: ParallelLayout, field: str) -> None:
    """Checks that a layout can hold a model.

    Args:
        config: the model.
        layout: the role's layout.
        field: the config group that the layout came from, such as ``actor_rollout_ref.actor.megatron``.

    Raises:
        ConfigError: a parallel size does not divide what it splits; names the key, its value and the valid choices.
    """
    divided_by_tp = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "intermediate_size": config.ffn_hidden_size,
    }
    choices = _divisors(config.num_key_value_heads, lambda n: not any(v % n for v in divided_by_tp.values()))
    for name, size in divided_by_tp.items():
        if layout.tp < 1 or size % layout.tp:
            raise ConfigError(
                f"{field}.tensor_model_parallel_size={layout.tp} must divide the model's {name}={size}; "
                f"valid for this model: {choices}"
            )
    if layout.pp < 1 or config.num_layers % layout.pp:
        problem = "exceeds" if layout.pp > config.num_layers else "does not divide"
        raise ConfigError(
            f"{field}.pipeline_model_parallel_size={layout.pp} {problem} the model's "
            f"num_hidden_layers={config.num_layers}; valid for this model: {_divisors(config.num_layers)}"
        )


def _divisors(number: int, accept: Callable[[int], bool] = lambda n: True) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0 and accept(n))


def _read_json(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist; expected a folder with config.json and *.safetensors")
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"model folder {folder} has no config.json")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{file} holds a {type(raw).__name__}, expected a JSON object")
    return raw


def _count(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {name}={value!r}, expected a positive integer")
    return value


def _rope(raw: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling; transformers 5 keeps both in ``rope_parameters``, earlier versions in two fields."""
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None)
    theta = raw.get("rope_theta", 10000.0) if theta is None else theta
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    if kind not in ROPE_TYPES:
        raise ModelError(f"config.json: rope_type={kind!r} is not supported, only {', '.join(ROPE_TYPES)}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0 or raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("config.json: partial_rotary_factor other than 1.0 is not supported")
    if kind == "default":
        return float(theta), None
    return float(theta), {"rope_type": kind, **parameters}
