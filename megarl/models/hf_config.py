"""Read a Hugging Face ``config.json`` into a family-neutral :class:`ModelConfig`, and check layouts against it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megarl.base.errors import ConfigError, ModelError
from megarl.base.json_text import read_json_object
from megarl.models.layout import ParallelLayout, check_pipeline
from megarl.models.model_config import (
    LANGUAGE_MODELS,
    Experts,
    ModelConfig,
    SlidingWindow,
    Traits,
    decoder_settings,
)
from megarl.models.registry import (
    Family,
    count,
    family_of,
    flag,
    known_architectures,
    known_families,
    number,
    refuse_other_kinds,
    rope_section,
    rotary_factor,
    under_all_names,
)
from megarl.models.tower_class import engine_sizes

QUANTIZATION = "quantization_config"
"""Field of ``config.json`` of a quantized checkpoint."""

ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""Kinds of rotary scaling with their required numbers."""
_ROPE_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow")
_ROPE_STRENGTHS = ("mscale", "mscale_all_dim")
_ORIGINAL = "original_max_position_embeddings"


def read_model_config(path: str | Path, *, may_be_bare: bool = False) -> ModelConfig:
    """Read ``config.json`` of a model folder.

    Args:
        may_be_bare: accept a model without any head, such as ``Qwen2Model``, as a language model.

    Raises:
        ModelError: the folder or the file is missing or malformed, the architecture has no weight map, or the file
            requests a variant that megarl does not compute.
    """
    raw = _read_json(Path(path))
    try:
        return parse_model_config(raw, may_be_bare=may_be_bare)
    except ModelError as error:
        raise ModelError(f"model folder {path}: {error.text}", code=error.code) from None


def parse_model_config(raw: Mapping[str, Any], *, may_be_bare: bool = False) -> ModelConfig:
    """Translate a parsed ``config.json`` into a :class:`ModelConfig`; errors as in :func:`read_model_config`."""
    architectures = raw.get("architectures")
    if not (isinstance(architectures, list) and architectures and isinstance(architectures[0], str)):
        raise ModelError(
            f"config.json: architectures={architectures!r}, expected a list with a class of transformers, such as "
            f"LlamaForCausalLM; families with a weight map: {', '.join(known_families())}",
            code="model.no-architecture",
        )
    base = architectures[0].removesuffix("Model").removesuffix("Text")
    causal = next((base + kind for kind in LANGUAGE_MODELS if base + kind in known_architectures()), "")
    is_bare = may_be_bare and architectures[0].endswith("Model") and causal
    architecture = causal if is_bare else architectures[0]
    refuse_other_kinds(architecture, raw)
    family, whole, raw = family_of(architecture), raw, decoder_settings(raw)
    traits = family.traits(under_all_names(raw))
    _check_combination(traits)
    quantized = _quantization(raw, family)
    heads, experts = count(raw, "num_attention_heads"), traits.experts
    # A model without dense MLPs may lack their width.
    width = experts.ffn_hidden_size if experts is not None and all(experts.layers) else None
    theta, scaling = _rope(raw, traits)
    of_file = {
        "rope_theta": theta,
        "rms_norm_eps": number(raw, "rms_norm_eps", traits.rms_norm_eps),
        "tie_word_embeddings": flag(raw, "tie_word_embeddings", traits.tie_word_embeddings),
        "experts": _checked(traits.experts),
        "window": _limiting(traits.window, raw),
        "linear": traits.linear if traits.linear is not None and any(traits.linear.layers) else None,
    }
    config = ModelConfig(
        **vars(traits) | of_file,
        architecture=architecture,
        family=family.name,
        num_layers=count(raw, "num_hidden_layers"),
        hidden_size=count(raw, "hidden_size"),
        ffn_hidden_size=count(raw, "intermediate_size", width),
        num_attention_heads=heads,
        num_key_value_heads=heads if traits.latent else _key_value_heads(raw, heads),
        head_dim=traits.latent.nope_dim + traits.latent.rope_dim if traits.latent else _head_dim(raw, heads),
        vocab_size=count(raw, "vocab_size"),
        max_position_embeddings=count(raw, "max_position_embeddings"),
        rope_scaling=scaling,
        raw={name: value for name, value in whole.items() if name != QUANTIZATION},
        quantized=quantized,
    )
    _check_rotary_width(config)
    if config.vision is not None and 2 * sum(config.vision.sections) != config.rotary_dim:
        text = f"config.json: mrope_section={list(config.vision.sections)} has {sum(config.vision.sections)} pairs"
        raise ModelError(f"{text} of the {config.rotary_dim} rotary dimensions of a head", code="model.rotary-width")
    return config


def check_layout(config: ModelConfig, layout: ParallelLayout, field: str, *, of_engine: bool = False) -> None:
    """Check that a parallel layout fits a model.

    Args:
        field: the layout's config group, such as ``actor_rollout_ref.actor.megatron``.
        of_engine: it is a rollout engine's layout.

    Raises:
        ConfigError: a parallel size does not divide the model; names the key, its value and the valid choices.
    """
    divided_by_tp = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
    }
    if config.linear is not None:
        divided_by_tp["linear_num_key_heads"] = config.linear.key_heads
        if layout.cp > 1:
            raise ConfigError(
                f"{field}.context_parallel_size={layout.cp} is not supported for {config.architecture}: its gated "
                "delta net layers pass a state from token to token, and no rank has a whole sequence; set it to 1 and "
                "use tensor_model_parallel_size",
                code="layout.cp-linear-attention",
            )
    if config.experts is None or not all(config.experts.layers):
        divided_by_tp["intermediate_size"] = config.ffn_hidden_size
    if config.experts is not None and config.experts.shared_ffn_hidden_size:
        divided_by_tp["width of the shared experts"] = config.experts.shared_ffn_hidden_size
    if of_engine and config.vision is not None and config.trains_tower:
        divided_by_tp |= engine_sizes(config.vision)
    for name, size in divided_by_tp.items():
        if layout.tp < 1 or size % layout.tp:
            choices = _divisors(config.num_key_value_heads, lambda n: not any(v % n for v in divided_by_tp.values()))
            raise ConfigError(
                f"{field}.tensor_model_parallel_size={layout.tp} must divide the model's {name}={size}; "
                f"valid for this model: {choices}",
                code="layout.tp-heads",
            )
    check_pipeline(config.num_layers, layout, field)
    _check_experts(config, layout, field)
    if config.experts is not None and config.experts.biases and layout.expert_tp != 1 and not of_engine:
        raise ConfigError(
            f"{field}.expert_tensor_parallel_size={layout.expert_tp} (by default tensor_model_parallel_size) is not "
            f"supported for {config.architecture}: each of these ranks would add the biases of its experts; set "
            f"{field}.expert_tensor_parallel_size=1",
            code="layout.etp-expert-biases",
        )
    _check_trained_tower(config, layout, field)


def _check_trained_tower(config: ModelConfig, layout: ParallelLayout, field: str) -> None:
    """Check that the layers which add features of a trained vision tower are in the first chunk of the pipeline."""
    if config.vision is None or not config.trains_tower:
        return
    layers = len(layout.layers(config.num_layers, 0, 0))
    if layers < config.vision.deepstack:
        raise ConfigError(
            f"{field}: the first chunk of {layout.describe()} has {layers} decoder layers; the vision tower adds "
            f"features after each of the first {config.vision.deepstack}, and its gradient stays within the chunk. Set "
            f"{field}.num_layers_in_first_pipeline_stage, fewer stages, or freeze the tower",
            code="layout.tower-features",
        )


def _check_experts(config: ModelConfig, layout: ParallelLayout, field: str) -> None:
    """Check expert parallelism: expert and expert-tensor parallel sizes against the experts and the stage's ranks."""
    ep, etp = f"{field}.expert_model_parallel_size", f"{field}.expert_tensor_parallel_size"
    experts, ranks = config.experts, layout.ranks_per_stage
    if experts is None:
        for key, size, plain in ((ep, layout.ep, (1,)), (etp, layout.etp, (0, 1, layout.tp))):
            if size not in plain:
                text = f"{key}={size}, but {config.architecture} has no experts; valid for this model: 1"
                raise ConfigError(text, code="layout.ep-without-experts")
        return
    if layout.expert_tp < 1 or experts.ffn_hidden_size % layout.expert_tp or ranks % layout.expert_tp:
        raise ConfigError(
            f"{etp}={layout.expert_tp} must divide the width of an expert, {experts.ffn_hidden_size}, and the {ranks} "
            f"ranks of a pipeline stage (tensor x context x data parallel); valid for this model: "
            f"{_divisors(ranks, lambda n: not experts.ffn_hidden_size % n)}",
            code="layout.etp-expert-width",
        )
    groups = ranks // layout.expert_tp
    if layout.ep < 1 or experts.count % layout.ep or groups % layout.ep:
        raise ConfigError(
            f"{ep}={layout.ep} must divide the model's {experts.count} experts and the {groups} groups of "
            f"{layout.expert_tp} ranks of a pipeline stage (expert_tensor_parallel_size={layout.expert_tp}); valid for "
            f"this model: {_divisors(groups, lambda n: not experts.count % n)}",
            code="layout.ep-experts",
        )


def _divisors(number: int, accept: Callable[[int], bool]) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0 and accept(n))


def _read_json(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ModelError(
            f"model folder {folder} does not exist; expected a folder with config.json and *.safetensors. A run "
            "downloads a model only with hub.enable=true; `hf download NAME --local-dir FOLDER` also downloads one",
            code="model.folder-missing",
        )
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"model folder {folder} has no config.json", code="model.no-config-json")
    return read_json_object(file, ModelError)


def _key_value_heads(raw: Mapping[str, Any], heads: int) -> int:
    kv_heads = count(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        text = f"config.json: num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}"
        raise ModelError(text, code="model.kv-heads")
    return kv_heads


def _head_dim(raw: Mapping[str, Any], heads: int) -> int:
    hidden = count(raw, "hidden_size")
    if raw.get("head_dim") is None and hidden % heads:
        text = f"config.json: num_attention_heads={heads} does not divide hidden_size={hidden}"
        raise ModelError(text, code="model.head-dim")
    return count(raw, "head_dim", hidden // heads)


def _quantization(raw: Mapping[str, Any], family: Family) -> str:
    """Read the format of a quantized checkpoint: MXFP4 of experts stacked matrix by matrix, or empty; reject others."""
    quantization = raw.get(QUANTIZATION)
    if quantization is None:
        return ""
    stacked = [declared.hf for declared in family.layer if declared.hf[0].stacked]
    supported = "mxfp4" if stacked and all(len(tensors) == 1 for tensors in stacked) else None
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    if supported is None or method != supported:
        raise ModelError(
            f"config.json: {QUANTIZATION} has quant_method={method!r}, which is not supported"
            f"{f', only {supported!r}' if supported else ''}; convert the checkpoint to bfloat16",
            code="model.unsupported-quantization",
        )
    return supported


def _check_combination(traits: Traits) -> None:
    """Reject traits, of a custom family for example, that the layers do not compute together."""
    latent = {
        "window": traits.window is not None,
        "qk_norm_over_heads": traits.qk_norm_over_heads,
        "score_scale": traits.score_scale is not None,
        "output_gate": traits.output_gate,
        "output_bias": traits.output_bias,
        "sinks": traits.sinks,
        "linear": traits.linear is not None,
    }
    together, experts = [name for name, is_set in latent.items() if is_set], traits.experts
    if traits.latent is not None and together:
        text = f"latent attention with {' and '.join(together)} is not supported"
        raise ModelError(text, code="model.unsupported-combination")
    if traits.linear is not None and traits.window is not None:
        text = "gated delta net layers with sliding-window attention are not supported"
        raise ModelError(text, code="model.unsupported-combination")
    if traits.output_bias or (experts is not None and experts.biases):
        # Megatron has biases on q, k and v, or on all linear layers.
        plain = experts is not None and experts.biases and all(experts.layers) and not experts.shared_ffn_hidden_size
        if not (plain and traits.output_bias and traits.qkv_bias):
            raise ModelError(
                "output_bias and biases of experts are supported only together, with qkv_bias, experts in all layers "
                "and no shared experts",
                code="model.unsupported-combination",
            )
    if experts is not None and traits.activation != "silu":
        text = f"experts with activation={traits.activation!r} are not supported, only 'silu'"
        raise ModelError(text, code="model.unsupported-combination")


def _checked(experts: Experts | None) -> Experts | None:
    """Check that the groups contain enough experts per token; return None if no layer has experts."""
    if experts is None or not any(experts.layers):
        return None
    if experts.count % experts.groups or experts.groups_per_token > experts.groups:
        raise ModelError(
            f"config.json: topk_group={experts.groups_per_token} of n_group={experts.groups} groups of "
            f"{experts.count} experts: n_group must divide the experts, and topk_group not exceed it",
            code="model.expert-groups",
        )
    if experts.groups > 1 and experts.count // experts.groups < experts.group_best:
        raise ModelError(
            f"config.json: n_group={experts.groups} makes groups of {experts.count // experts.groups} of the "
            f"{experts.count} experts, and a group is ranked by its {experts.group_best} best",
            code="model.expert-groups",
        )
    reachable = experts.count // experts.groups * experts.groups_per_token
    if experts.per_token > reachable:
        text = (
            f"config.json: num_experts_per_tok={experts.per_token} exceeds the {reachable} experts of a token's groups"
        )
        raise ModelError(text, code="model.experts-per-token")
    return experts


def _check_rotary_width(config: ModelConfig) -> None:
    """Check that rotary embeddings rotate pairs of a head's dimensions: an even number, from 2 to all."""
    width = config.rotary_dim
    if width % 2 == 0 and 2 <= width <= config.head_dim:
        return
    origin = f"head_dim={config.head_dim} times partial_rotary_factor={config.rotary_factor:g}"
    raise ModelError(
        f"config.json: the rotary width of a head is {width} ({'qk_rope_head_dim' if config.latent else origin}); "
        f"rotary embeddings rotate pairs of dimensions, so it must be even, from 2 to {config.head_dim}",
        code="model.rotary-width",
    )


def _limiting(window: SlidingWindow | None, raw: Mapping[str, Any]) -> SlidingWindow | None:
    """Check that the window has an entry per layer; return None if no layer has it."""
    if window is None or not any(window.layers):
        return None
    layers = count(raw, "num_hidden_layers")
    if len(window.layers) != layers:
        text = f"config.json: layer_types has {len(window.layers)} entries for num_hidden_layers={layers}"
        raise ModelError(text, code="model.layer-types-count")
    return window


def _rope(raw: Mapping[str, Any], traits: Traits) -> tuple[float, dict[str, Any] | None]:
    """Read rotary base and scaling: ``rope_parameters`` in transformers 5, two fields in earlier versions.

    Models with sliding-window attention have a section per kind of layers in transformers 5.
    """
    by_kind = traits.window is not None and traits.window.rope_theta is not None
    parameters = dict(rope_section(raw, by_kind=by_kind))
    theta = number(
        raw if parameters.get("rope_theta") is None else parameters, "rope_theta", traits.rope_theta, above=1
    )
    parameters.pop("rope_theta", None)
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    if traits.vision is not None:  # the family reads the sections
        kind = "default" if kind == "mrope" else kind
        parameters.pop("mrope_section", None)
        parameters.pop("mrope_interleaved", None)
    effective = {**parameters, "rope_type": kind, "rope_theta": theta, "partial_rotary_factor": traits.rotary_factor}
    _check_sections(raw, effective, by_kind)
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        text = f"config.json: rope_type={kind!r} is not supported, only {', '.join(ROPE_TYPES)}"
        raise ModelError(text, code="model.unsupported-rope")
    parameters.pop("partial_rotary_factor", None)
    factor = rotary_factor(raw, traits.rotary_factor)
    if factor != traits.rotary_factor:
        text = f"config.json: partial_rotary_factor={factor} is not supported, only {traits.rotary_factor}"
        raise ModelError(text, code="model.unsupported-setting")
    _check_rope_numbers(parameters)
    missing = [name for name in ROPE_TYPES[kind] if parameters.get(name) is None]
    if missing:
        text = f"config.json: rope_type={kind!r} needs a number for {', '.join(missing)}"
        raise ModelError(text, code="model.field-missing")
    if kind == "default":
        return theta, None
    if kind != "linear":
        # a top-level original length takes precedence over a single section, as in transformers
        length = count(parameters, _ORIGINAL, count(raw, "max_position_embeddings"))
        parameters[_ORIGINAL] = length if by_kind else count(raw, _ORIGINAL, length)
    return theta, {"rope_type": kind, **parameters}


def _check_sections(raw: Mapping[str, Any], effective: Mapping[str, Any], by_kind: bool) -> None:
    """Refuse rotary parameters in ``rope_parameters`` that transformers ignores.

    Args:
        effective: the rotary parameters as transformers reads them.
        by_kind: the architecture has a section for each kind of layers.
    """
    new = raw.get("rope_parameters") or {}
    if by_kind:
        if False in (new.get("truncate"), effective.get("truncate")):
            text = "config.json: truncate=False is not supported with rope_parameters per kind of layers"
            raise ModelError(text, code="model.unsupported-rope")
        return
    sections = [name for name, value in new.items() if isinstance(value, Mapping)]
    if sections:
        raise ModelError(
            f"config.json: rope_parameters has a section {sections[0]!r}, but all layers of this architecture have the "
            "same rotary embeddings; write its fields into rope_parameters itself",
            code="model.rope-sections",
        )
    ignored = {
        name: value for name, value in new.items() if name != "type" and value not in (None, effective.get(name))
    }
    if ignored.get("rope_type") == "default":
        del ignored["rope_type"]  # the plain kind says nothing that a scaling beside it contradicts
    if raw.get("rope_scaling") and ignored:
        raise ModelError(
            "config.json has rope_parameters and rope_scaling, of which transformers reads rope_scaling only, without "
            f"{', '.join(f'{name}={value!r}' for name, value in ignored.items())}; write all fields into "
            "rope_parameters, and remove rope_scaling",
            code="model.rope-conflict",
        )


def _check_rope_numbers(parameters: Mapping[str, Any]) -> None:
    """Check the types of the rotary parameters that are present; null is absent, and zero a valid strength."""
    for name in (*_ROPE_NUMBERS, *_ROPE_STRENGTHS):
        if parameters.get(name) is not None and (parameters[name] != 0 or name in _ROPE_NUMBERS):
            number(parameters, name)
    flag(parameters, "truncate")
