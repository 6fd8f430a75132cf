"""Check `megatron.override_transformer_config` against the installed Megatron-Core's ``TransformerConfig``.

The fields are read from the source: importing Megatron takes seconds and needs GPU libraries, and a misspelt name
should be an error at once.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megarl.config.problems import format_value

_SOURCES = (
    ("model_parallel_config.py", "ModelParallelConfig"),
    ("transformer/transformer_config.py", "TransformerConfig"),
)
_ENUMS, _BACKENDS = "transformer/enums.py", "AttnBackend"
_PLAIN = {"int": int, "float": float, "bool": bool, "str": str}
_LISTS = ("List", "list", "Tuple", "tuple", "Sequence")

_WEIGHTS = "weights are read from the model's folder"
_PACKING = "micro-batches differ in their numbers of tokens"

_MODEL_FIELDS = """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels qk_layernorm add_qkv_bias
    add_bias_linear normalization layernorm_epsilon gated_linear_unit activation_func softmax_scale num_moe_experts
    moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate moe_router_topk
    moe_router_pre_softmax moe_router_dtype moe_grouped_gemm moe_router_load_balancing_type moe_aux_loss_coeff
    moe_expert_capacity_factor multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim
    v_head_dim rope_type rotary_base rotary_percent rotary_interleaved rotary_scaling_factor
    original_max_position_embeddings max_position_embeddings mscale mscale_all_dim beta_fast beta_slow
    cache_mla_latents use_te_activation_func
"""
_SECTION_KEYS = """
    tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size context_parallel_size
    expert_model_parallel_size expert_tensor_parallel_size sequence_parallel num_layers_in_first_pipeline_stage
    num_layers_in_last_pipeline_stage recompute_granularity recompute_method recompute_num_layers recompute_modules
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
"""
_EQUAL = "dropout is off: log-probs must be equal in every pass"

OWNED: dict[str, str] = {
    **dict.fromkeys(_MODEL_FIELDS.split(), "the model's config.json sets it"),
    **{name: f"is the key {name} of this section" for name in _SECTION_KEYS.split()},
    "pipeline_model_parallel_layout": "is num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage",
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), "is the key dtype of this section"),
    **dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), _WEIGHTS),
    "calculate_per_token_loss": "losses are divided by counts over the whole mini-batch",
    "variable_seq_lengths": _PACKING,
    "moe_token_dispatcher_type": "the token dispatcher is all-to-all",
    "cuda_graph_scope": _PACKING,
    "hidden_dropout": _EQUAL,
    "attention_dropout": _EQUAL,
}
"""Fields that megarl sets from another source, by name, with that source."""

OPEN = frozenset(
    {
        "attention_softmax_in_fp32",
        "batch_p2p_comm",
        "deallocate_pipeline_outputs",
        "gradient_accumulation_fusion",
        "masked_softmax_fusion",
        "persist_layer_norm",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "apply_rope_fusion",
    }
)
"""Fields with a default of megarl that the user may override."""


def override_problems(overrides: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Fields that cannot be set, each with the reason."""
    fields = transformer_fields() if overrides else {}
    for name, value in overrides.items():
        if name in OWNED:
            yield name, f"cannot be set: {OWNED[name]}"
        elif fields and name not in fields:
            near = difflib.get_close_matches(name, [field for field in fields if field not in OWNED], n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            yield name, f"the installed Megatron-Core's TransformerConfig has no such field{hint}"
        elif fields and not _fits(fields[name], value):
            yield name, f"must be {_describe(fields[name])}, not {format_value(value)}"


@cache
def transformer_fields() -> dict[str, ast.expr]:
    """The fields with their annotations; empty without Megatron-Core."""
    fields: dict[str, ast.expr] = {}
    for file, name in _SOURCES:
        fields |= {
            node.target.id: node.annotation
            for node in _class_body(file, name)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
    return fields


@cache
def attention_backends() -> tuple[str, ...]:
    """Names of Megatron's attention backends."""
    body = (node for node in _class_body(_ENUMS, _BACKENDS) if isinstance(node, ast.Assign))
    return tuple(target.id for node in body for target in node.targets if isinstance(target, ast.Name))


def _class_body(file: str, name: str) -> list[ast.stmt]:
    spec = importlib.util.find_spec("megatron")
    folders = (spec.submodule_search_locations or []) if spec else []
    for source in (Path(folder) / "core" / file for folder in folders):
        if source.is_file():
            tree = ast.parse(source.read_text())
            return next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return []


def _fits(annotation: ast.expr, value: Any) -> bool:
    """Whether a value has an annotated type; a type that no override can express fits no value."""
    if isinstance(annotation, ast.Constant):
        return value is None and annotation.value is None
    if isinstance(annotation, ast.BinOp):
        return _fits(annotation.left, value) or _fits(annotation.right, value)
    if isinstance(annotation, ast.Name):
        return _fits_name(annotation.id, value)
    if not isinstance(annotation, ast.Subscript) or not isinstance(annotation.value, ast.Name):
        return False
    inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    kind = annotation.value.id
    if kind == "Literal":
        return value in [choice.value for choice in inner if isinstance(choice, ast.Constant)]
    if kind in ("Optional", "Union"):
        return (kind == "Optional" and value is None) or any(_fits(option, value) for option in inner)
    return kind in _LISTS and isinstance(value, list) and all(any(_fits(option, v) for option in inner) for v in value)


def _fits_name(name: str, value: Any) -> bool:
    if name == _BACKENDS:
        return value in attention_backends()
    type_ = _PLAIN.get(name)
    if type_ is None or (isinstance(value, bool) and type_ is not bool):
        return False
    return isinstance(value, (int, float) if type_ is float else type_)


def _describe(annotation: ast.expr) -> str:
    text = ast.unparse(annotation)
    return f"one of {', '.join(attention_backends())}" if text == _BACKENDS else text
