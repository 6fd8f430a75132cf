"""Registry of model families by Hugging Face architecture name, and helpers that read their ``config.json``.

The helpers take the content of the file as ``raw``, or a section of it; ``file`` is another file's name, for the error.
Published architectures that megarl cannot compute are listed with the parts that it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from megarl.base.errors import ModelError
from megarl.base.registry import Registry
from megarl.models.declaration import Declaration
from megarl.models.model_config import Traits

MULTIMODAL_FIELDS = ("vision_config", "audio_config", "thinker_config", "visual")
"""Fields of ``config.json`` that only models with images or sound have."""
_T = TypeVar("_T")
_CONFIG = "config.json"
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
"""Kinds of attention in ``layer_types`` and ``rope_parameters`` of ``config.json``."""
FAMILIES: Registry[Family] = Registry("architectures", defaults="megarl.models.families", error=ModelError)
SYNONYMS = (("num_experts", "num_local_experts", "n_routed_experts"), ("num_nextn_predict_layers", "num_mtp_layers"))
"""Names of one setting in releases of transformers and in families."""
_MAMBA = "Mamba (state-space) layers"
_INDEXER = "sparse attention with an indexer"
MISSING_PARTS: Mapping[str, str] = {
    "Cohere": "LayerNorm with attention and MLP in parallel",
    "Cohere2": "LayerNorm with attention and MLP in parallel",
    "DeepseekV32": _INDEXER,
    "DeepseekV4": _INDEXER,
    "FalconH1": _MAMBA,
    "Gemma2": "soft caps on attention scores and logits",
    "Gemma3n": "per-layer embeddings",
    "Glm4": "rotary embeddings of adjacent elements in plain attention",
    "GlmMoeDsa": _INDEXER,
    "Jamba": _MAMBA,
    "KimiLinear": "Kimi delta attention (linear attention)",
    "Llama4": "chunked attention, and layers without rotary embeddings",
    "Mamba2": _MAMBA,
    "MiniMax": "lightning attention (linear attention)",
    "NemotronH": _MAMBA,
    "OlmoHybrid": "gated delta net layers with learning rates up to 2, and norms after attention",
    "Phi3": "fused projections in the checkpoint (qkv_proj, gate_up_proj)",
    "SmolLM3": "layers without rotary embeddings",
}
"""Parts by the architecture's name without its head; a family in ``external_lib`` takes precedence."""


class Family(Protocol):
    """A model family; its module contains declarations only."""

    name: str
    layer: tuple[Declaration, ...]
    """Parameters of a decoder layer, in Megatron's order; a declaration's ``when`` selects its layers."""

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Read the traits from a ``config.json``.

        Raises:
            ModelError: the file requests a variant that has no weight map.
        """


def register_family(*architectures: str) -> Callable[[type], type]:
    """Return a class decorator that registers a family under names of the ``architectures`` field of ``config.json``.

    A later registration replaces an earlier one.
    """

    def register(family: type) -> type:
        for architecture in architectures:
            FAMILIES[architecture] = family()
        return family

    return register


def known_architectures() -> list[str]:
    """List the architectures that have a weight map, sorted."""
    return list(FAMILIES)


def known_families() -> list[str]:
    """List the model families that have a weight map, sorted."""
    return sorted({family.name for family in FAMILIES.values()})


def family_of(architecture: str) -> Family:
    """Return the family of an architecture.

    Raises:
        ModelError: no family has this architecture; the message lists the known families.
    """
    if architecture not in FAMILIES:
        raise ModelError(
            f"architecture '{architecture}' has no weight map; families with one: {', '.join(known_families())}; "
            "declare a custom family in a file and name it in external_lib (docs/how_to/add_a_model.md)",
            code="model.no-weight-map",
        )
    return FAMILIES[architecture]


def refuse_other_kinds(architecture: str, raw: Mapping[str, Any]) -> None:
    """Reject models with layers that megarl lacks, unknown multimodal (VLM, audio) and encoder-decoder models.

    A family that declares the architecture, such as one in ``external_lib``, is accepted.

    Raises:
        ModelError: the model is not a known decoder, or has parts that megarl does not compute; names them.
    """
    if architecture in FAMILIES:
        return
    parts, missing = [field for field in MULTIMODAL_FIELDS if raw.get(field)], missing_parts(architecture)
    lacks = f"has {missing}, which megarl does not compute" if missing else ""
    if raw.get("is_encoder_decoder"):
        kind = "an encoder-decoder model"
    elif parts or architecture.endswith("ForConditionalGeneration"):
        kind = f"a multimodal model{f' ({parts[0]})' if parts else ''}"
    elif lacks:
        raise ModelError(
            f"architecture '{architecture}' {lacks}; families with a weight map: {', '.join(known_families())}; "
            "declare a custom family in a file and name it in external_lib (docs/how_to/add_a_model.md)",
            code="model.no-weight-map",
        )
    else:
        return
    raise ModelError(
        f"architecture '{architecture}' is {kind}, for which megarl has no weight map; name a model of one of the "
        f"families {', '.join(known_families())}{lacks and f'. Its decoder also {lacks}'}",
        code="model.not-text-decoder",
    )


def refuse_settings(raw: Mapping[str, Any], **supported: Any) -> None:
    """Reject settings that change the computation in a way that the family does not declare.

    Args:
        **supported: the only supported value of each field; an absent or null field passes.

    Raises:
        ModelError: a field has another value.
    """
    for field, value in supported.items():
        if raw.get(field) not in (None, value):
            text = f"config.json: {field}={raw[field]!r} is not supported, only {value!r}"
            raise ModelError(text, code="model.unsupported-setting")


def require_fields(raw: Mapping[str, Any], *names: str) -> None:
    """Reject a ``config.json`` that lacks one of the fields; raises ModelError."""
    for name in names:
        if raw.get(name) is None:
            raise ModelError(f"config.json: {name} is missing", code="model.field-missing")


def under_all_names(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``config.json`` with each of :data:`SYNONYMS` under all its names.

    Raises:
        ModelError: two names of one setting have different values.
    """
    fields = dict(raw)
    for names in SYNONYMS:
        values = {name: raw[name] for name in names if raw.get(name) is not None}
        if any(value != next(iter(values.values())) for value in values.values()):
            named = " and ".join(f"{name}={value!r}" for name, value in values.items())
            text = f"config.json: {named} are names of one setting with different values; remove the wrong one"
            raise ModelError(text, code="model.synonyms-differ")
        if values:
            fields |= dict.fromkeys(names, next(iter(values.values())))
    return fields


def count(raw: Mapping[str, Any], name: str, default: int | None = None, *, least: int = 1, file: str = _CONFIG) -> int:
    """Read an integer, at least ``least``.

    Args:
        default: value of an absent or null field; None = the field is required.

    Raises:
        ModelError: the field is missing, not an integer, or too small.
    """
    value = raw.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        expected = "a positive integer" if least == 1 else f"an integer >= {least}"
        raise _wrong(file, name, value, f"{expected}, less than 2**31" if isinstance(value, int) else expected)
    return value


def number(
    raw: Mapping[str, Any], name: str, default: float | None = None, *, above: float = 0.0, file: str = _CONFIG
) -> float:
    """Read a number.

    Args:
        default: value of an absent field; None = the field is required. Null is an error, as in transformers.
        above: the number is larger, and at most 1e30.

    Raises:
        ModelError: the field is missing, or is no such number.
    """
    value = raw.get(name, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not above < value <= 1e30:
        raise _wrong(file, name, value, f"a number > {above:g}")
    return float(value)


def flag(raw: Mapping[str, Any], name: str, default: bool = False, *, file: str = _CONFIG) -> bool:
    """Read true or false, ``default`` if absent; null is false, as in transformers.

    Raises:
        ModelError: the field has another value.
    """
    value = raw.get(name, default)
    if value is not None and not isinstance(value, bool):
        raise _wrong(file, name, value, "true or false")
    return bool(value)


def json_object(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Read an object; an absent or null one is empty, and another value raises ModelError."""
    value = raw.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise _wrong(_CONFIG, name, value, "an object")
    return value or {}


def entries(raw: Mapping[str, Any], name: str, kind: type[_T], file: str = _CONFIG) -> list[_T]:
    """Read a list whose entries have one type; an absent or null one is empty.

    Raises:
        ModelError: the field is no list, or an entry has another type.
    """
    value = raw.get(name)
    if value is not None and not (isinstance(value, list) and all(type(entry) is kind for entry in value)):
        raise _wrong(file, name, value, f"a list of {kind.__name__}")
    return value or []


def _wrong(file: str, name: str, value: Any, expected: str) -> ModelError:
    if value is None:
        return ModelError(f"{file}: {name} is missing or null, expected {expected}", code="model.field-missing")
    return ModelError(f"{file}: {name}={value!r:.80}, expected {expected}", code="model.field-value")


def rope_section(raw: Mapping[str, Any], *, by_kind: bool = False) -> Mapping[str, Any]:
    """Return the rotary parameters of the layers with full attention; empty if ``config.json`` has none.

    transformers 5 writes ``rope_parameters``, earlier versions ``rope_scaling``. In a file with both, transformers
    reads ``rope_scaling`` only, or updates the section of full attention with it.

    Args:
        by_kind: ``rope_parameters`` has a section for each kind of layers.
    """
    new, old = json_object(raw, "rope_parameters"), json_object(raw, "rope_scaling")
    if by_kind:
        return {**json_object(new, FULL), **old}
    return old or new


def window_layers(raw: Mapping[str, Any], every: int) -> tuple[bool, ...]:
    """Read from ``layer_types`` for each decoder layer whether it has sliding-window attention.

    Args:
        every: in a file without the field, each layer has a window except every such one.

    Raises:
        ModelError: a layer has another kind of attention.
    """
    return _layers_of_kind(raw, SLIDING, every)


def linear_layers(raw: Mapping[str, Any], every: int) -> tuple[bool, ...]:
    """Read from ``layer_types`` for each decoder layer whether it has linear attention, as :func:`window_layers` does.

    Raises:
        ModelError: a layer has another kind of attention, no layer has full attention, or a layer has no entry.
    """
    layers, number = _layers_of_kind(raw, LINEAR, every), count(raw, "num_hidden_layers")
    if len(layers) != number:
        text = f"config.json: layer_types has {len(layers)} entries for num_hidden_layers={number}"
        raise ModelError(text, code="model.layer-types-count")
    if all(layers):
        text = f"config.json: no layer of layer_types is {FULL!r}; models without attention are not supported"
        raise ModelError(text, code="model.no-full-attention")
    return layers


def _layers_of_kind(raw: Mapping[str, Any], special: str, every: int) -> tuple[bool, ...]:
    kinds = entries(raw, "layer_types", str)
    if raw.get("layer_types") is None:
        return tuple((layer + 1) % every != 0 for layer in range(count(raw, "num_hidden_layers")))
    unknown = sorted(set(kinds) - {FULL, special})
    if unknown:
        text = f"config.json: layer_types has {unknown[0]!r}, expected {FULL!r} or {special!r}"
        raise ModelError(text, code="model.layer-kind")
    return tuple(kind == special for kind in kinds)


def window_theta(raw: Mapping[str, Any], default: float) -> float:
    """Read the rotary base of layers with sliding-window attention.

    Args:
        default: value of a file without sections for both kinds of layers, or without the field.

    Raises:
        ModelError: these layers have a rotary scaling, or the file has one section for all layers.
    """
    parameters = json_object(raw, "rope_parameters")
    if not parameters:
        return default
    if FULL not in parameters or SLIDING not in parameters:
        text = f"config.json: rope_parameters needs the sections {FULL!r} and {SLIDING!r}"
        raise ModelError(text, code="model.rope-sections")
    window = json_object(parameters, SLIDING)
    kind = window.get("rope_type", "default")
    if kind != "default":
        text = f"config.json: rope_type={kind!r} of {SLIDING!r} is not supported, only 'default'"
        raise ModelError(text, code="model.unsupported-rope")
    return number(window, "rope_theta", default, above=1)


def rotary_factor(raw: Mapping[str, Any], default: float = 1.0) -> float:
    """Read ``partial_rotary_factor``, the share of a head's dimensions with rotary embeddings.

    The rotary section takes precedence over the top level, as in transformers.

    Args:
        default: value of an absent or null field.
    """
    sections = (rope_section(raw), raw)
    found = (number(s, "partial_rotary_factor") for s in sections if s.get("partial_rotary_factor") is not None)
    return next(found, default)


def position_sections(raw: Mapping[str, Any], default: tuple[int, int, int] | None = None) -> tuple[int, int, int]:
    """Read ``mrope_section``, the pairs of dimensions that rotate by time, height and width.

    Args:
        default: value of an absent field; None = the field is required.

    Raises:
        ModelError: it is missing, or not three positive numbers.
    """
    section: Sequence[int] = entries(rope_section(raw), "mrope_section", int) or default or ()
    if len(section) != 3 or min(section) < 1:
        raise _wrong(_CONFIG, "mrope_section", list(section) or None, "three positive numbers")
    return section[0], section[1], section[2]


def refuse_sliding_window(raw: Mapping[str, Any], default: int | None = None) -> None:
    """Reject a sliding window, by default ``default``, below the longest sequence (``max_position_embeddings``).

    Raises:
        ModelError: the window is shorter.
    """
    if raw.get("sliding_window", default) is None:
        return
    window, longest = count(raw, "sliding_window", default), count(raw, "max_position_embeddings")
    if window < longest:
        raise ModelError(
            f"config.json: sliding_window={window} is less than max_position_embeddings={longest}, and sliding-window "
            f"attention is not supported; if no sequence is longer than {window}, set max_position_embeddings to it: "
            "the model then computes the same",
            code="model.sliding-window",
        )


def missing_parts(architecture: str) -> str:
    """Return the parts that megarl lacks of an architecture, with any head or none; empty if it is not listed."""
    return MISSING_PARTS.get(architecture.partition("For")[0].removesuffix("Model"), "")
