"""Parameter declarations of model families: data that defines both directions of every weight conversion.

A :class:`Declaration` names one parameter in Megatron, in the rollout engine (fused, SGLang's names), and as Hugging
Face tensors. Names may contain ``{layer}``, the global number of the decoder layer, and ``{expert}``, the number of a
routed expert within its layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import NamedTuple

from megarl.models.model_config import ModelConfig

FP8_BLOCK = 128
"""Rows and columns of a block of weights that share a scale in blockwise FP8 (:mod:`megarl.models.number_formats`)."""
When = Callable[[ModelConfig, int], bool]
"""Selects the decoder layers of a model that have a parameter."""
_UNQUANTIZED_ROWS = frozenset({"experts", "one", "linear_ba", "linear_b", "linear_a"})
"""Rows of small matrices in the engine's dtype: routers, shared experts' gates, delta nets' decays."""


class Split(Enum):
    """Split of a parameter over tensor-parallel ranks (of an expert: expert-tensor-parallel ranks)."""

    REPLICATED = "every rank holds the complete parameter"
    COLUMN = "dimension 0 of each Hugging Face tensor is divided; a rank stacks its shards along it"
    GROUPED = "as COLUMN in the engine; in Megatron a rank stacks q, k, v of each of its key-value groups"
    GATED = "as GROUPED, but each head's q is followed by its gate; Megatron stacks a group's q, gates, k, v"
    SECTIONS = "dimension 0 has sections of heads (`head_sections`); a rank stacks its heads of each section"
    SECTIONS_BY_HEAD = "dimension 0 has all sections of each head; as COLUMN in the engine, as SECTIONS in Megatron"
    ROW = "dimension 1 is divided"
    FIRST = "as REPLICATED in Megatron; in the engine the first rank holds it, and the others hold zeros"
    VOCAB = "dimension 0 is padded, then divided"


class PipelineStage(Enum):
    """Pipeline stage that holds a parameter."""

    FIRST = "first stage"
    LAYER = "the stage of its decoder layer"
    LAST = "last stage"


class HFTensor(NamedTuple):
    """A Hugging Face tensor: its name, and its shape as dimension names or sizes.

    :func:`megarl.models.weight_map.dimension_sizes` lists the names.

    ``stacked`` names the tensor of the file that has this one for every expert of a layer, the expert as dimension 0
    and the other dimensions in reverse order; tensors of a declaration are side by side there. It is empty if the file
    has this tensor itself.
    """

    name: str
    dims: tuple[str | int, ...]
    stacked: str = ""


class EngineSplit(NamedTuple):
    """Split of a parameter over the engine's ranks, if it differs from the trainer's.

    Attributes:
        split: ``COLUMN``, ``ROW`` or ``SECTIONS``.
        multiple: the engine pads the divided dimension with zeros to a multiple of this.
    """

    split: Split
    multiple: int = 1

    @property
    def dimension(self) -> int:
        """The divided dimension."""
        return 1 if self.split is Split.ROW else 0

    def padded(self, size: int) -> int:
        """Return the size of the divided dimension with padding."""
        return -(-size // self.multiple) * self.multiple


class Declaration(NamedTuple):
    """One parameter: its names, its Hugging Face tensors, its tensor-parallel split and its pipeline stage.

    A Megatron name with ``{expert}`` declares one parameter per expert. Experts are divided over the expert-parallel
    ranks in contiguous blocks. The engine stacks all experts of a layer in one tensor with the expert as dimension 0.

    Attributes:
        rollout: name in the rollout engine; None if the engine has no such parameter.
        hf: the Hugging Face tensors.
        tied_copy: a second copy of a tensor of another declaration. It exists only if the original is on another
            pipeline stage, and is never exported.
        when: the decoder layers with the parameter; None = all.
        float32: float32 in every weight dtype and never trained; a file may store it in a narrower dtype.
        engine_split: split over the engine's ranks, if it is not ``split``.
    """

    megatron: str
    rollout: str | None
    hf: tuple[HFTensor, ...]
    split: Split
    stage: PipelineStage = PipelineStage.LAYER
    tied_copy: bool = False
    when: When | None = None
    float32: bool = False
    engine_split: EngineSplit | None = None

    @property
    def is_expert(self) -> bool:
        """Whether this is a parameter of a routed expert."""
        return "{expert}" in self.megatron

    @property
    def is_linear(self) -> bool:
        """Whether this is a matrix of attention, an MLP or an expert, which an engine may hold in FP8."""
        in_layer = self.stage is PipelineStage.LAYER and self.rollout is not None
        return in_layer and all(len(t.dims) == 2 and t.dims[0] not in _UNQUANTIZED_ROWS for t in self.hf)


in_expert_layers: When = ModelConfig.has_experts
in_linear_layers: When = ModelConfig.is_linear


def in_dense_layers(config: ModelConfig, layer: int) -> bool:
    """Select layers without experts (for ``when``)."""
    return not config.has_experts(layer)


def in_attention_layers(config: ModelConfig, layer: int) -> bool:
    """Select layers with attention (for ``when``)."""
    return not config.is_linear(layer)


def with_qkv_bias(config: ModelConfig, layer: int) -> bool:
    """Select models with biases on q, k and v (for ``when``)."""
    return config.qkv_bias


def with_qk_norm(config: ModelConfig, layer: int) -> bool:
    """Select layers with attention in models with norms on q and k (for ``when``)."""
    return config.qk_norm and not config.is_linear(layer)


def with_query_latent(config: ModelConfig, layer: int) -> bool:
    """Select models with queries from a latent (for ``when``)."""
    return config.latent is not None and config.latent.q_lora_rank > 0


def without_query_latent(config: ModelConfig, layer: int) -> bool:
    """Select models with directly projected queries (for ``when``)."""
    return not with_query_latent(config, layer)


_HF_LAYER = "model.layers.{layer}."
LAYER_PREFIX = "decoder.layers.{layer}."
"""Start of the Megatron names of a layer's parameters."""


def layer_parameter(
    megatron: str,
    rollout: str,
    hf: Mapping[str, tuple[str, ...]] | tuple[str, ...],
    split: Split = Split.REPLICATED,
    when: When | None = None,
    float32: bool = False,
    stacked: str = "",
) -> Declaration:
    """Declare a parameter of a decoder layer by its names within the layer.

    Args:
        megatron: name after ``decoder.layers.{layer}.``.
        rollout: the engine's name after ``model.layers.{layer}.``.
        hf: the Hugging Face tensors: names after ``model.layers.{layer}.`` with dimension names; or the dimension names
            of a single tensor with the engine's name.
        stacked: the file's tensor of all experts after ``model.layers.{layer}.``, see :class:`HFTensor`.
    """
    named = {rollout: hf} if isinstance(hf, tuple) else hf
    tensors = tuple(HFTensor(_HF_LAYER + name, dims, stacked and _HF_LAYER + stacked) for name, dims in named.items())
    megatron, rollout = LAYER_PREFIX + megatron, _HF_LAYER + rollout
    return Declaration(megatron, rollout, tensors, split, when=when, float32=float32)


def experts_of(
    block: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj", *, stacked: bool = False
) -> tuple[Declaration, ...]:
    """Declare router and routed experts of a layer.

    Args:
        block: the Hugging Face module of ``gate`` and ``experts``, such as ``mlp``.
        gate: Hugging Face name of an expert's gate projection, likewise ``up`` and ``down``.
        stacked: files have ``gate_up_proj`` and ``down_proj`` of all experts, see :class:`HFTensor`.
    """
    router = layer_parameter("mlp.router.weight", f"{block}.gate.weight", ("experts", "hidden"), when=in_expert_layers)
    expert = f"{block}.experts.{{expert}}."
    gate_up = layer_parameter(
        "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        f"{block}.experts.w13_weight",
        {f"{expert}{gate}.weight": ("expert_ffn", "hidden"), f"{expert}{up}.weight": ("expert_ffn", "hidden")},
        Split.COLUMN,
        when=in_expert_layers,
        stacked=f"{block}.experts.gate_up_proj" if stacked else "",
    )
    output = layer_parameter(
        "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        f"{block}.experts.w2_weight",
        {f"{expert}{down}.weight": ("hidden", "expert_ffn")},
        Split.ROW,
        when=in_expert_layers,
        stacked=f"{block}.experts.down_proj" if stacked else "",
    )
    return router, gate_up, output


def stacked_experts_of(block: str) -> tuple[Declaration, ...]:
    """Declare router and routed experts with biases, whose file has one tensor for all experts of a layer.

    Gate and up projections are one matrix with alternating rows, see
    :class:`~megarl.models.model_config.ClampedGate`. ``block`` is the Hugging Face module, such as ``mlp``.
    """

    def parameter(layer: str, engine: str, module: str, part: str, dims: tuple[str, ...], split: Split) -> Declaration:
        return layer_parameter(
            f"mlp.experts.local_experts.{{expert}}.{layer}.{part}",
            f"{block}.experts.{engine}_weight{'_bias' if part == 'bias' else ''}",
            {f"{block}.experts.{{expert}}.{module}.{part}": dims},
            split,
            in_expert_layers,
            stacked=f"{block}.experts.{module}{'_bias' if part == 'bias' else ''}",
        )

    router = {"weight": ("experts", "hidden"), "bias": ("experts",)}
    routers = [
        layer_parameter(f"mlp.router.{part}", f"{block}.router.{part}", dims, when=in_expert_layers)
        for part, dims in router.items()
    ]
    return (
        *routers,
        parameter("linear_fc1", "w13", "gate_up_proj", "weight", ("expert_gate_up", "hidden"), Split.COLUMN),
        parameter("linear_fc1", "w13", "gate_up_proj", "bias", ("expert_gate_up",), Split.COLUMN),
        parameter("linear_fc2", "w2", "down_proj", "weight", ("hidden", "expert_ffn"), Split.ROW),
        parameter("linear_fc2", "w2", "down_proj", "bias", ("hidden",), Split.FIRST),
    )


def shared_experts_of(block: str) -> tuple[Declaration, Declaration]:
    """Declare the shared experts of a layer as one MLP; ``block`` is the Hugging Face module."""
    shape = ("shared_ffn", "hidden")
    gate_up = layer_parameter(
        "mlp.shared_experts.linear_fc1.weight",
        f"{block}.gate_up_proj.weight",
        {f"{block}.gate_proj.weight": shape, f"{block}.up_proj.weight": shape},
        Split.COLUMN,
        when=in_expert_layers,
    )
    output = layer_parameter(
        "mlp.shared_experts.linear_fc2.weight",
        f"{block}.down_proj.weight",
        ("hidden", "shared_ffn"),
        Split.ROW,
        when=in_expert_layers,
    )
    return gate_up, output


def _attention_weight(
    megatron: str, hf: str, dims: tuple[str, ...], split: Split = Split.REPLICATED, when: When | None = None
) -> Declaration:
    return layer_parameter(f"self_attention.{megatron}.weight", f"self_attn.{hf}.weight", dims, split, when)


INPUT_NORM = layer_parameter("input_layernorm.weight", "input_layernorm.weight", ("hidden",))
QKV_WEIGHT, GATED_QKV_WEIGHT = (
    layer_parameter(
        "self_attention.linear_qkv.weight",
        "self_attn.qkv_proj.weight",
        {
            "self_attn.q_proj.weight": (queries, "hidden"),
            "self_attn.k_proj.weight": ("kv", "hidden"),
            "self_attn.v_proj.weight": ("kv", "hidden"),
        },
        split,
        in_attention_layers,
    )
    for queries, split in (("q", Split.GROUPED), ("q_and_gate", Split.GATED))
)
QKV_BIAS = layer_parameter(
    "self_attention.linear_qkv.bias",
    "self_attn.qkv_proj.bias",
    {"self_attn.q_proj.bias": ("q",), "self_attn.k_proj.bias": ("kv",), "self_attn.v_proj.bias": ("kv",)},
    Split.GROUPED,
    with_qkv_bias,
)
Q_NORM = _attention_weight("q_layernorm", "q_norm", ("head",), when=with_qk_norm)
K_NORM = _attention_weight("k_layernorm", "k_norm", ("head",), when=with_qk_norm)
Q_NORM_OVER_HEADS = _attention_weight("q_layernorm", "q_norm", ("q",))
K_NORM_OVER_HEADS = _attention_weight("k_layernorm", "k_norm", ("kv",))
ATTENTION_OUTPUT = _attention_weight("linear_proj", "o_proj", ("hidden", "q"), Split.ROW, in_attention_layers)
ATTENTION_OUTPUT_BIAS = layer_parameter("self_attention.linear_proj.bias", "self_attn.o_proj.bias", ("hidden",))
SINKS = layer_parameter("self_attention.core_attention.softmax_offset", "self_attn.sinks", ("heads",), Split.COLUMN)
MLP_NORM = layer_parameter("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", ("hidden",))
ATTENTION_OUTPUT_NORM = layer_parameter("self_attn_bda.norm.weight", "post_attention_layernorm.weight", ("hidden",))
MLP_INPUT_NORM = layer_parameter("pre_mlp_layernorm.weight", "pre_feedforward_layernorm.weight", ("hidden",))
MLP_OUTPUT_NORM = layer_parameter("mlp_bda.norm.weight", "post_feedforward_layernorm.weight", ("hidden",))
GATE_UP = layer_parameter(
    "mlp.linear_fc1.weight",
    "mlp.gate_up_proj.weight",
    {"mlp.gate_proj.weight": ("ffn", "hidden"), "mlp.up_proj.weight": ("ffn", "hidden")},
    Split.COLUMN,
    when=in_dense_layers,
)
DOWN = layer_parameter(
    "mlp.linear_fc2.weight", "mlp.down_proj.weight", ("hidden", "ffn"), Split.ROW, when=in_dense_layers
)
SHARED_EXPERT_GATE = layer_parameter(
    "mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", ("one", "hidden"), when=in_expert_layers
)
CORRECTION_BIAS = layer_parameter(
    "mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", ("experts",), when=in_expert_layers, float32=True
)

LATENT_ATTENTION = (
    _attention_weight("linear_q_proj", "q_proj", ("q", "hidden"), Split.COLUMN, without_query_latent),
    _attention_weight("linear_q_down_proj", "q_a_proj", ("q_latent", "hidden"), when=with_query_latent),
    _attention_weight("q_layernorm", "q_a_layernorm", ("q_latent",), when=with_query_latent),
    _attention_weight("linear_q_up_proj", "q_b_proj", ("q", "q_latent"), Split.COLUMN, with_query_latent),
    _attention_weight("linear_kv_down_proj", "kv_a_proj_with_mqa", ("kv_latent_and_rope", "hidden")),
    _attention_weight("kv_layernorm", "kv_a_layernorm", ("kv_latent",)),
    _attention_weight("linear_kv_up_proj", "kv_b_proj", ("kv_unpacked", "kv_latent"), Split.COLUMN),
    _attention_weight("linear_proj", "o_proj", ("hidden", "v"), Split.ROW),
)


def gated_delta_net(
    qkvz: Mapping[str, tuple[str, ...]], ba: Mapping[str, tuple[str, ...]], split: Split
) -> tuple[Declaration, ...]:
    """Declare the parameters of a gated delta net layer.

    Args:
        qkvz: the projections to queries, keys, values and output gates: names after ``linear_attn.`` with dimensions.
        ba: the projections to learning rates and decays, likewise.
        split: split of both.
    """

    def parameter(megatron: str, hf: Mapping[str, tuple[str, ...]], split: Split, rollout: str = "") -> Declaration:
        tensors = {f"linear_attn.{name}": dims for name, dims in hf.items()}
        engine = f"linear_attn.{rollout or next(iter(hf))}"
        return layer_parameter(f"self_attention.{megatron}", engine, tensors, split, in_linear_layers)

    weight, heads = "conv1d.weight", ("linear_heads",)
    return (
        parameter("in_proj_qkvz.weight", qkvz, split, "in_proj_qkvz.weight"),
        parameter("in_proj_ba.weight", ba, split, "in_proj_ba.weight"),
        parameter(weight, {weight: ("linear_qkv", "one", "conv")}, Split.SECTIONS),
        parameter("dt_bias", {"dt_bias": heads}, Split.COLUMN),
        parameter("A_log", {"A_log": heads}, Split.COLUMN),
        parameter("out_norm.weight", {"norm.weight": ("linear_head",)}, Split.REPLICATED),
        parameter("out_proj.weight", {"out_proj.weight": ("hidden", "linear_z")}, Split.ROW),
    )


_EMBEDDING_TENSOR = HFTensor("model.embed_tokens.weight", ("vocab", "hidden"))
EMBEDDING = Declaration(
    "embedding.word_embeddings.weight",
    "model.embed_tokens.weight",
    (_EMBEDDING_TENSOR,),
    Split.VOCAB,
    PipelineStage.FIRST,
)
FINAL_NORM = Declaration(
    "decoder.final_layernorm.weight",
    "model.norm.weight",
    (HFTensor("model.norm.weight", ("hidden",)),),
    Split.REPLICATED,
    PipelineStage.LAST,
)
LM_HEAD = Declaration(
    "output_layer.weight",
    "lm_head.weight",
    (HFTensor("lm_head.weight", ("vocab", "hidden")),),
    Split.VOCAB,
    PipelineStage.LAST,
)
TIED_LM_HEAD = Declaration(
    "output_layer.weight", None, (_EMBEDDING_TENSOR,), Split.VOCAB, PipelineStage.LAST, tied_copy=True
)
VALUE_HEAD = Declaration(
    "output_layer.weight", None, (HFTensor("score.weight", ("one", "hidden")),), Split.REPLICATED, PipelineStage.LAST
)
VALUE_HEAD_BIAS = Declaration(
    "output_layer.bias", None, (HFTensor("score.bias", ("one",)),), Split.REPLICATED, PipelineStage.LAST
)
