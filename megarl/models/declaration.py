"""How a model family declares its parameters: data, from which both directions of every weight conversion follow.

A :class:`Declaration` names one parameter three times: in Megatron, in the rollout engine (fused, SGLang's names),
and as the Hugging Face tensors it is made of. Names may hold ``{layer}``, the global number of the decoder layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from megarl.models.hf_config import ModelConfig


class Split(Enum):
    """How a parameter is divided over tensor-parallel ranks."""

    REPLICATED = "every rank holds the whole"
    COLUMN = "dimension 0 of each Hugging Face tensor is divided; a rank stacks its shards one under the other"
    GROUPED = "as COLUMN in the engine; in Megatron a rank stacks q, k, v of each of its key-value groups in turn"
    ROW = "dimension 1 is divided"
    VOCAB = "dimension 0 is padded, then divided"


class Home(Enum):
    """Which pipeline stages hold a parameter."""

    FIRST = "first stage"
    LAYER = "the stage of its decoder layer"
    LAST = "last stage"


class HFTensor(NamedTuple):
    """One Hugging Face tensor: its name, and its shape as names that :func:`dimension_sizes` resolves."""

    name: str
    dims: tuple[str, ...]


class Declaration(NamedTuple):
    """One parameter: its names, the Hugging Face tensors it is made of, how it is split and where it lives.

    ``rollout`` is None where the engine has no such parameter. ``tied_copy`` marks a second copy of a tensor that
    another declaration owns: present only where the owner lives on another pipeline stage, and never exported.
    """

    megatron: str
    rollout: str | None
    hf: tuple[HFTensor, ...]
    split: Split
    home: Home = Home.LAYER
    tied_copy: bool = False


def dimension_sizes(config: ModelConfig) -> Mapping[str, int]:
    """Number of elements behind each dimension name that a declaration may use."""
    return {
        "hidden": config.hidden_size,
        "q": config.num_attention_heads * config.head_dim,
        "kv": config.num_key_value_heads * config.head_dim,
        "head": config.head_dim,
        "ffn": config.ffn_hidden_size,
        "vocab": config.vocab_size,
        "one": 1,
    }


_HF_LAYER = "model.layers.{layer}."
_MEGATRON_LAYER = "decoder.layers.{layer}."


def _layer(
    megatron: str, rollout: str, hf: Mapping[str, tuple[str, ...]], split: Split = Split.REPLICATED
) -> Declaration:
    tensors = tuple(HFTensor(_HF_LAYER + name, dims) for name, dims in hf.items())
    return Declaration(_MEGATRON_LAYER + megatron, _HF_LAYER + rollout, tensors, split)


INPUT_NORM = _layer("input_layernorm.weight", "input_layernorm.weight", {"input_layernorm.weight": ("hidden",)})
QKV_WEIGHT = _layer(
    "self_attention.linear_qkv.weight",
    "self_attn.qkv_proj.weight",
    {
        "self_attn.q_proj.weight": ("q", "hidden"),
        "self_attn.k_proj.weight": ("kv", "hidden"),
        "self_attn.v_proj.weight": ("kv", "hidden"),
    },
    Split.GROUPED,
)
QKV_BIAS = _layer(
    "self_attention.linear_qkv.bias",
    "self_attn.qkv_proj.bias",
    {"self_attn.q_proj.bias": ("q",), "self_attn.k_proj.bias": ("kv",), "self_attn.v_proj.bias": ("kv",)},
    Split.GROUPED,
)
Q_NORM = _layer("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", {"self_attn.q_norm.weight": ("head",)})
K_NORM = _layer("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", {"self_attn.k_norm.weight": ("head",)})
ATTENTION_OUTPUT = _layer(
    "self_attention.linear_proj.weight",
    "self_attn.o_proj.weight",
    {"self_attn.o_proj.weight": ("hidden", "q")},
    Split.ROW,
)
MLP_NORM = _layer(
    "pre_mlp_layernorm.weight",
    "post_attention_layernorm.weight",
    {"post_attention_layernorm.weight": ("hidden",)},
)
GATE_UP = _layer(
    "mlp.linear_fc1.weight",
    "mlp.gate_up_proj.weight",
    {"mlp.gate_proj.weight": ("ffn", "hidden"), "mlp.up_proj.weight": ("ffn", "hidden")},
    Split.COLUMN,
)
DOWN = _layer("mlp.linear_fc2.weight", "mlp.down_proj.weight", {"mlp.down_proj.weight": ("hidden", "ffn")}, Split.ROW)

_EMBEDDING_TENSOR = HFTensor("model.embed_tokens.weight", ("vocab", "hidden"))
EMBEDDING = Declaration(
    "embedding.word_embeddings.weight",
    "model.embed_tokens.weight",
    (_EMBEDDING_TENSOR,),
    Split.VOCAB,
    Home.FIRST,
)
FINAL_NORM = Declaration(
    "decoder.final_layernorm.weight",
    "model.norm.weight",
    (HFTensor("model.norm.weight", ("hidden",)),),
    Split.REPLICATED,
    Home.LAST,
)
LM_HEAD = Declaration(
    "output_layer.weight",
    "lm_head.weight",
    (HFTensor("lm_head.weight", ("vocab", "hidden")),),
    Split.VOCAB,
    Home.LAST,
)
TIED_LM_HEAD = Declaration("output_layer.weight", None, (_EMBEDDING_TENSOR,), Split.VOCAB, Home.LAST, tied_copy=True)
VALUE_HEAD = Declaration(
    "output_layer.weight", None, (HFTensor("score.weight", ("one", "hidden")),), Split.REPLICATED, Home.LAST
)
