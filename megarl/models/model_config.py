"""The family-neutral model configuration: sizes, attention, experts, latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

VALUE_MODELS = ("ForSequenceClassification", "ForTokenClassification")
"""Suffixes of the architecture names of models with a scalar head; the second kind has a bias on it."""
LANGUAGE_MODELS = ("ForCausalLM", "ForConditionalGeneration")
"""Suffixes of the architecture names of language models; the second kind sees images."""
TEXT_SECTION = "text_config"
"""Section of ``config.json`` with the fields of the decoder in a model that sees images."""


@dataclass(frozen=True)
class ClampedGate:
    """Clamped gated activation of experts (gpt-oss): ``(up + 1) * gate * sigmoid(alpha * gate)``.

    ``gate`` is limited from above, ``up`` on both sides. The rows of both alternate in their projection, gate first.
    """

    alpha: float
    limit: float


@dataclass(frozen=True)
class Experts:
    """Mixture-of-experts layers: sizes and routing of tokens to experts.

    A token's scores are ``softmax`` or ``sigmoid`` of the router's logits. The token goes to the ``per_token`` experts
    with the highest scores among its ``groups_per_token`` best groups of experts. A correction bias, if there is one,
    enters the choice only. The scores of the chosen experts, optionally normalised to sum to 1 and multiplied by
    ``scaling``, weigh their outputs.
    """

    count: int
    """Routed experts of a layer."""
    per_token: int
    """Experts per token (top-k)."""
    ffn_hidden_size: int
    """Inner width of one expert."""
    layers: tuple[bool, ...]
    """For each decoder layer whether it has experts; the others are dense."""
    shared_ffn_hidden_size: int = 0
    """Total inner width of the shared experts, which every token goes to; 0 = no shared experts."""
    shared_gate: bool = False
    """A sigmoid gate scales the shared experts' output."""
    score: str = "softmax"
    """``softmax`` or ``sigmoid``."""
    normalize: bool = True
    """The weights of the chosen experts sum to 1 (before ``scaling``)."""
    scaling: float = 1.0
    """Factor on the weights."""
    groups: int = 1
    """Groups of neighbouring experts."""
    groups_per_token: int = 1
    """Groups from which a token's experts are chosen."""
    group_best: int = 1
    """Number of best scores that are summed to rank a group."""
    correction_bias: bool = False
    """A bias per expert enters the choice of experts, not their weights."""
    biases: bool = False
    """The projections of router and routed experts have biases."""
    clamped: ClampedGate | None = None
    """The routed experts' activation; None = ``silu`` of the first half of the rows, times the second half."""


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: keys and values, and optionally queries, are projected from narrow latents.

    The first ``nope_dim`` elements of a head carry no position; the last ``rope_dim`` are rotated. The rotated part of
    the keys is shared by all heads. Described in https://arxiv.org/abs/2405.04434.
    """

    q_lora_rank: int
    """Width of the latent of queries; 0 = queries are projected directly."""
    kv_lora_rank: int
    """Width of the latent of keys and values."""
    nope_dim: int
    rope_dim: int
    v_dim: int
    """Width of a value head."""
    interleaved: bool
    """Rotated pairs are adjacent elements, not half a head apart."""
    norm_eps: float = 1e-6
    """Epsilon of the norms on the latents."""


@dataclass(frozen=True)
class SlidingWindow:
    """Sliding-window attention: in some layers a token attends only to itself and the tokens shortly before it.

    These layers have plain rotary embeddings of their own base, or those of the layers with full attention.
    """

    size: int
    """Tokens that a token attends to, itself included."""
    layers: tuple[bool, ...]
    """For each decoder layer whether it has the window; the others have full attention."""
    rope_theta: float | None
    """Rotary base of the layers with the window; None = the rotary embeddings of the other layers, scaled like them."""


@dataclass(frozen=True)
class LinearAttention:
    """Gated delta net layers (https://arxiv.org/abs/2412.06464), in place of attention in some layers.

    A causal convolution mixes each channel of queries, keys and values over a few tokens. Each value head has a state
    of ``key_dim`` times ``value_dim``, which every token decays, corrects at its key, and reads at its query.
    """

    layers: tuple[bool, ...]
    """For each decoder layer whether it is a gated delta net; the others have full attention."""
    key_heads: int
    """Heads of queries and of keys."""
    value_heads: int
    """A multiple of ``key_heads``: neighbouring value heads share a query and a key."""
    key_dim: int
    """Width of a head's query and key."""
    value_dim: int
    """Width of a head's value."""
    conv_width: int
    """Tokens that the convolution mixes, the current one included."""
    grouped: bool
    """The checkpoint's input projections order their rows by key head, not by kind (query, key, value, gate)."""

    @property
    def values_per_key(self) -> int:
        """Value heads that share a key."""
        return self.value_heads // self.key_heads

    @property
    def mixed_width(self) -> int:
        """Channels of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class Vision:
    """Images in prompts: a vision tower turns each into features, which replace embeddings of its tokens.

    Rotary embeddings have positions in time, height and width (:func:`megarl.base.image_tokens.multimodal_positions`),
    and each pair of dimensions rotates by one of them.
    """

    image_token: int
    """Token of the vocabulary that stands for an image in the chat template."""
    video_token: int
    """The one that stands for a video; a policy may draw both tokens like any other."""
    tower: str
    """transformers' class of the tower, after the name of its module, such as ``qwen2_5_vl``."""
    prefix: str
    """Start of the names of the tower's tensors; without the nesting of :data:`~megarl.models.hf_folder.NESTED`."""
    sections: tuple[int, int, int]
    """Number of pairs of dimensions that rotate by time, height and width."""
    nested: bool = False
    """Exported files have the names of :data:`~megarl.models.hf_folder.NESTED`."""
    interleaved: bool = False
    """The three kinds of pairs alternate as long as there are pairs of all, and do not follow one another."""
    deepstack: int = 0
    """Number of decoder layers, from the first on, after which further features of the tower are added."""
    trained: bool = False
    """The tower's parameters belong to the model and are trained; otherwise they are frozen, and exports copy them."""
    settings: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The section of ``config.json`` that describes the tower."""


@dataclass(frozen=True)
class Traits:
    """Properties of a family that its ``config.json`` declares beyond the common sizes."""

    qkv_bias: bool = False
    """Biases on q, k and v."""
    qk_norm: bool = False
    """A norm on each head's q and k."""
    qk_norm_over_heads: bool = False
    """The norms on q and k have one statistic over all heads, and a weight for each element of each head."""
    input_norms: bool = True
    """Norms on the inputs of attention and MLP."""
    output_norms: bool = False
    """Norms on the outputs of attention and MLP, before they are added to the residual."""
    zero_centered_norms: bool = False
    """All norms multiply by 1 plus their weights."""
    activation: str = "silu"
    """Activation of the gate in MLPs: ``silu`` or ``gelu_tanh``."""
    embedding_scale: float = 1.0
    """Factor on the embeddings of tokens, rounded to their dtype."""
    score_scale: float | None = None
    """Scale of the query-key products; None = ``head_dim ** -0.5``."""
    tie_word_embeddings: bool = False
    """The output layer is the embedding itself. For this and the next two, a family has the default of its files."""
    rope_theta: float = 10000.0
    """Rotary base."""
    rms_norm_eps: float = 1e-6
    text_suffix: str = ""
    """Addition to the names of transformers' other classes than the language model, such as ``Text``."""
    rotary_factor: float = 1.0
    """Share of a head's dimensions, from the first on, that rotary embeddings rotate; not for latent attention."""
    window: SlidingWindow | None = None
    """None if all layers have full attention."""
    linear: LinearAttention | None = None
    """None without gated delta net layers."""
    output_gate: bool = False
    """Full attention multiplies its output by the sigmoid of a gate, which is projected with the queries."""
    output_bias: bool = False
    """A bias on the output projection of attention."""
    sinks: bool = False
    """Attention sinks: each head has a trained logit in the denominator of its softmax."""
    experts: Experts | None = None
    """None for a dense model."""
    latent: Latent | None = None
    """None for plain multi-head attention."""
    vision: Vision | None = None
    """None for a model of text only."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Traits):
    """Shape of a decoder-only model, with the traits of its family; counts and widths in elements."""

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
    """Width of one head's query and key; not always ``hidden_size / num_attention_heads``."""
    vocab_size: int
    """Rows of the embedding, without padding."""
    max_position_embeddings: int
    rope_scaling: dict[str, Any] | None
    """Parameters of the rotary scaling, its kind under ``rope_type``; None for plain rotary embeddings."""
    raw: dict[str, Any] = field(repr=False, compare=False)
    """The complete ``config.json``, written back unchanged on export."""
    quantized: str = field(default="", compare=False)
    """Format of quantized weights in the folder, such as ``mxfp4``, which are read in bfloat16; empty without them."""

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of ``config.json``, those of the decoder's section at the top level."""
        return decoder_settings(self.raw)

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that rotary embeddings rotate."""
        return self.latent.rope_dim if self.latent is not None else int(self.head_dim * self.rotary_factor)

    def has_experts(self, layer: int) -> bool:
        """Return whether a decoder layer, by its global number, has experts instead of a dense MLP."""
        return self.experts is not None and self.experts.layers[layer]

    def has_window(self, layer: int) -> bool:
        """Return whether a decoder layer, by its global number, has sliding-window attention."""
        return self.window is not None and self.window.layers[layer]

    def is_linear(self, layer: int) -> bool:
        """Return whether a decoder layer, by its global number, is a gated delta net."""
        return self.linear is not None and self.linear.layers[layer]

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Global numbers of the layers with attention, whose keys and values grow with the sequence."""
        return tuple(layer for layer in range(self.num_layers) if not self.is_linear(layer))

    @property
    def base_architecture(self) -> str:
        """The architecture's name without its head, such as ``Qwen2``."""
        for kind in (*LANGUAGE_MODELS, *VALUE_MODELS):
            if self.architecture.endswith(kind):
                name = self.architecture.removesuffix(kind)
                return name if kind in LANGUAGE_MODELS else name.removesuffix(self.text_suffix)
        return self.architecture

    @property
    def language_architecture(self) -> str:
        """The architecture's name as a language model, such as ``Qwen2ForCausalLM``."""
        return self.base_architecture + LANGUAGE_MODELS[self.vision is not None]

    def architecture_with(self, head: str) -> str:
        """Return the name of the architecture with a scalar head, one of :data:`VALUE_MODELS`, or ``Model``."""
        return f"{self.base_architecture}{self.text_suffix}{head}"

    @property
    def is_value_model(self) -> bool:
        """Whether the model has a scalar head (``score.weight``) instead of the output layer."""
        return self.architecture.endswith(VALUE_MODELS)

    @property
    def has_head_bias(self) -> bool:
        """Whether the scalar head has a bias (``score.bias``), as in transformers' token classification models."""
        return self.architecture.endswith(VALUE_MODELS[1]) and bool(self.raw.get("token_classification_bias", True))

    @property
    def pad_token_id(self) -> int | None:
        """The padding token of ``config.json``; None if it has none."""
        token = self.settings.get("pad_token_id")
        return token if type(token) is int and token >= 0 else None

    @property
    def trains_tower(self) -> bool:
        """Whether there is a vision tower, and it is part of the trained model."""
        return self.vision is not None and self.vision.trained

    def with_trained_tower(self, trained: bool = True) -> ModelConfig:
        """Return the same model with a trained vision tower, or a frozen one; unchanged for a model of text only."""
        return self if self.vision is None else replace(self, vision=replace(self.vision, trained=trained))

    def as_reward_model(self, pad_token_id: int | None = None) -> ModelConfig:
        """Return the same decoder with a scalar head, as transformers' sequence classification with one label.

        A model that already has a scalar head is returned unchanged.

        Args:
            pad_token_id: padding token for a ``config.json`` without one; transformers needs one to score several
                sequences at once.
        """
        if self.is_value_model:
            return self
        architecture = self.architecture_with(VALUE_MODELS[0])
        raw = {**self.raw, "architectures": [architecture]}
        if self.pad_token_id is None:
            raw["pad_token_id"] = pad_token_id
        return replace(self, architecture=architecture, raw=raw)


def decoder_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``config.json``, those of :data:`TEXT_SECTION` at the top level.

    A field at the top level takes precedence if it describes the whole model: ``tie_word_embeddings``. Null in the
    section is absent: releases of transformers write it there for fields of the whole model, such as image tokens.
    """
    section = {name: value for name, value in (raw.get(TEXT_SECTION) or {}).items() if value is not None}
    whole = {name: raw[name] for name in ("architectures", "tie_word_embeddings") if name in raw}
    return {**raw, **section, **whole}
