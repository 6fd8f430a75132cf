"""Random valid configurations of every family, as files of old and new transformers write them.

A draw fixes every option of its family: kind of rotary scaling, rotary share, head size, window, biases, tie, experts
and so on. Sometimes one more field of transformers' configuration gets another value; megarl may refuse that by name.
"""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import transformers

VOCAB = 503  # a prime: no tensor-parallel size divides it
Fields = dict[str, Any]
ABSENT = object()
"""Choice of a file without the field."""

ROPES: tuple[Fields, ...] = (
    {},
    {"rope_type": "linear", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "attention_factor": 1.4},
    {"rope_type": "yarn", "factor": 2.0, "beta_fast": 8, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 24, "truncate": False},
)
OMITTED = 0.15
OMITTABLE = frozenset({
    "rms_norm_eps", "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq",
    "partial_rotary_factor", "norm_topk_prob", "routed_scaling_factor", "mlp_only_layers", "decoder_sparse_step",
    "attention_bias", "use_qk_norm", "swiglu_alpha", "swiglu_limit", "rope_interleave", "topk_method", "sliding_window",
    "query_pre_attn_scalar", "first_k_dense_replace", "layer_types", "q_lora_rank",
})  # fmt: skip
"""Fields whose default in transformers fits every size."""
SPELLINGS = ("new", "old", "added")
"""Rotary parameters as transformers 5 writes them, as earlier versions did, and the new with an old scaling added."""

COMMON: dict[str, tuple[Any, ...]] = {
    "hidden_size": (32, 48),
    "intermediate_size": (48,),
    "num_hidden_layers": (2, 3),
    "num_attention_heads": (4,),
    "num_key_value_heads": (1, 2, 4),
    "head_dim": (8, 16, 24),
    "max_position_embeddings": (128,),
    "rms_norm_eps": (1e-6, 1e-2),
    "tie_word_embeddings": (False, True),
    "rope": ROPES,
    "theta": (1e4, 5e5),
    "spelling": SPELLINGS,
}
EXPERTS: dict[str, tuple[Any, ...]] = {"num_experts_per_tok": (1, 2, 3), "moe_intermediate_size": (24,)}
SIGMOID_EXPERTS: dict[str, tuple[Any, ...]] = EXPERTS | {
    "n_routed_experts": (8,),
    "n_shared_experts": (1, 2),
    "first_k_dense_replace": (0, 1, 2),
    "routed_scaling_factor": (1.0, 2.5),
    "norm_topk_prob": (True, False),
    "n_group": (1, 2),
    "topk_group": (1,),
}
LATENTS: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (4,),
    "head_dim": (ABSENT,),
    "q_lora_rank": (None, 20),
    "kv_lora_rank": (12,),
    "qk_nope_head_dim": (8, 6),
    "qk_rope_head_dim": (4, 8),
    "v_head_dim": (6, 16),
}
SHARE: dict[str, tuple[Any, ...]] = {"partial_rotary_factor": (ABSENT, 0.25, 0.5, 1.0)}
SHARED_EXPERT: dict[str, tuple[Any, ...]] = {"num_experts": (4,), "shared_expert_intermediate_size": (40,)}
LINEAR: dict[str, tuple[Any, ...]] = SHARE | {
    "linear_num_key_heads": (2, 4),
    "linear_num_value_heads": (4, 8),
    "linear_key_head_dim": (8,),
    "linear_value_head_dim": (6, 8),
    "linear_conv_kernel_dim": (2, 4),
    "kinds": (("linear_attention", "full_attention"), ("full_attention", "linear_attention"), None),
    "full_attention_interval": (2,),
    # Queries and keys are normed after a convolution: larger weights amplify rounding, also in transformers.
    "initializer_range": (0.1,),
}
WINDOW: dict[str, tuple[Any, ...]] = {
    "sliding_window": (1, 3, 6, 100),
    "kinds": (("sliding_attention", "full_attention"), ("full_attention", "sliding_attention"), None),
}
FAMILIES: dict[str, dict[str, tuple[Any, ...]]] = {
    "llama": {},
    "mistral": {"sliding_window": (None, 128)},
    "qwen2": {"head_dim": (ABSENT,)},
    "qwen3": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "gemma3_text": WINDOW | {"query_pre_attn_scalar": (9, 64)},
    "gpt_oss": WINDOW
    | {"num_local_experts": (4,), "num_experts_per_tok": (1, 2), "swiglu_limit": (1.0, 7.0), "swiglu_alpha": (1.702, 1.2)},
    "mixtral": {"num_local_experts": (4,), "num_experts_per_tok": (1, 2)},
    "olmoe": {"num_experts": (4,), "num_experts_per_tok": (1, 2), "norm_topk_prob": (False, True), "head_dim": (ABSENT,)},
    "qwen2_moe": EXPERTS
    | SHARED_EXPERT
    | {"head_dim": (ABSENT,), "norm_topk_prob": (False, True), "mlp_only_layers": ([], [0]), "decoder_sparse_step": (1, 2)},
    "qwen3_moe": EXPERTS
    | {"num_experts": (4,), "norm_topk_prob": (False, True), "mlp_only_layers": ([], [1]), "decoder_sparse_step": (1, 2)},
    "glm4_moe": SIGMOID_EXPERTS | SHARE | {"attention_bias": (False, True), "use_qk_norm": (False, True)},
    "deepseek_v2": SIGMOID_EXPERTS
    | LATENTS
    | {"topk_method": ("greedy", "group_limited_greedy"), "norm_topk_prob": (False,), "num_experts_per_tok": (1, 2, 3)},
    "deepseek_v3": SIGMOID_EXPERTS | LATENTS | {"rope_interleave": (True, False)},
    "qwen3_next": LINEAR | EXPERTS | SHARED_EXPERT | {"num_experts": (4, 0), "mlp_only_layers": ([], [0])},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR | EXPERTS | SHARED_EXPERT,
}
"""Options of each family by transformers' ``model_type``, beyond the common ones."""


def draw(family: str, random: Random) -> Fields:
    """Draw a ``config.json``."""
    options = COMMON | FAMILIES[family]
    fields = {name: random.choice(values) for name, values in options.items()}
    kinds = fields.pop("kinds", None)
    if kinds is not None:
        fields["layer_types"] = [kinds[layer % 2] for layer in range(fields["num_hidden_layers"])]
    rope = {name: fields.pop(name, None) for name in ("rope", "theta", "spelling", "partial_rotary_factor")}
    by_kind = family in ("olmo3", "gemma3_text")
    fields |= rotary_fields(**rope, by_kind=by_kind, local="gemma3_text" == family)
    fields = {name: value for name, value in fields.items() if value is not ABSENT}
    config = transformers.CONFIG_MAPPING[family]
    name = config.__name__.removesuffix("Config").removesuffix("Text")
    initial = {"vocab_size": VOCAB, "initializer_range": 0.2, "pad_token_id": 0, "model_type": family}
    fields = {**initial, "architectures": [f"{name}ForCausalLM"], "eos_token_id": 1, **fields}
    return {name: value for name, value in fields.items() if name not in OMITTABLE or random.random() > OMITTED}


def rotary_fields(
    rope: Fields, theta: float, spelling: str, partial_rotary_factor: Any, *, by_kind: bool, local: bool
) -> Fields:
    """Write rotary parameters in a spelling; ``by_kind`` = a section for each kind of layers."""
    share = {} if partial_rotary_factor in (None, ABSENT) else {"partial_rotary_factor": partial_rotary_factor}
    scaling = rope or {"rope_type": "default"}
    if spelling == "old":
        base = {"rope_local_base_freq": 1e3} if local else {}
        return {"rope_theta": theta, "rope_scaling": dict(rope) or None, **share, **base}
    section = {"rope_theta": theta, **share}
    plain = {"rope_type": "default", "rope_theta": 1e3}
    if spelling == "new":
        full = {**scaling, **section}
        return {"rope_parameters": {"full_attention": full, "sliding_attention": plain} if by_kind else full}
    full = {"rope_type": "default", **section}
    parameters = {"full_attention": full, "sliding_attention": plain} if by_kind else full
    return {"rope_parameters": parameters, "rope_scaling": dict(rope) or None}


def change(fields: Fields, random: Random) -> Fields:
    """Give one field of transformers' configuration, which :func:`draw` does not know, another value."""
    config = transformers.CONFIG_MAPPING[fields["model_type"]]
    others = [field for field in dataclasses.fields(config) if field.name not in fields and field.name not in INERT]
    field = random.choice(others)
    return {**fields, field.name: another(field.default, random)}


INERT = {
    "transformers_version", "architectures", "dtype", "id2label", "label2id", "problem_type", "return_dict",
    "output_hidden_states", "use_cache", "chunk_size_feed_forward", "is_encoder_decoder", "initializer_range",
    "pad_token_id", "bos_token_id", "eos_token_id", "vocab_size", "attention_dropout", "router_aux_loss_coef",
    "output_router_logits", "pretraining_tp", "rope_parameters",
}  # fmt: skip
"""Fields that do not enter the logits of inference."""


def another(value: Any, random: Random) -> Any:
    """Return another value of the kind of ``value``."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return random.choice([1, 2, 4])
    if isinstance(value, float):
        return value / 2 + 0.25
    if isinstance(value, str):
        return random.choice(["relu", "gelu", "sigmoid"])
    return random.choice([True, 1, 2.0])
