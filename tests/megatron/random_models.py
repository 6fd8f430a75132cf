"""Random valid configurations of every family, as files of old and new transformers write them.

A draw chooses an option for every field that its family has: kind of rotary scaling, rotary share, head size, window,
biases, tie, experts and so on. Some fields are left out, and sometimes a field without options has another value than
its default. megarl computes what transformers computes, or refuses the file.
"""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import transformers
from tiny_models import VOCAB

Fields = dict[str, Any]
Options = dict[str, tuple[Any, ...]]
ABSENT = object()
"""Option of a file without the field."""
CHANGED, OMITTED = 0.15, 0.1
"""Shares of draws with a changed field, and of fields that are left out."""

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
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
    YARN,
    {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
    {**YARN, "attention_factor": 1.4},
    {"rope_type": "yarn", "factor": 2.0, "beta_fast": 8, "beta_slow": 2},
    {**YARN, "truncate": False},
)
BY_KIND = ("olmo3", "gemma3_text")
"""Families with rotary parameters for each kind of layers."""
SPELLINGS = ("new", "old", "added")
"""Rotary parameters as transformers 5 writes them, as earlier versions did, and the new with an old scaling added."""

COMMON: Options = {
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
EXPERTS: Options = {"num_experts_per_tok": (1, 2, 3), "moe_intermediate_size": (24,)}
SIGMOID_EXPERTS: Options = EXPERTS | {
    "n_routed_experts": (8,),
    "n_shared_experts": (1, 2),
    "first_k_dense_replace": (0, 1, 2),
    "routed_scaling_factor": (1.0, 2.5),
    "norm_topk_prob": (True, False),
    "n_group": (1, 2),
    "topk_group": (1,),
}
LATENTS: Options = {
    "num_key_value_heads": (4,),
    "head_dim": (ABSENT,),
    "q_lora_rank": (None, 20),
    "kv_lora_rank": (12,),
    "qk_nope_head_dim": (8, 6),
    "qk_rope_head_dim": (4, 8),
    "v_head_dim": (6, 16),
}
SHARE: Options = {"partial_rotary_factor": (ABSENT, 0.25, 0.5, 1.0)}
SHARED_EXPERT: Options = {"num_experts": (4,), "shared_expert_intermediate_size": (40,)}
SPARSE: Options = {"norm_topk_prob": (False, True), "mlp_only_layers": ([], [0]), "decoder_sparse_step": (1, 2)}
LINEAR: Options = SHARE | {
    "linear_num_key_heads": (2, 4),
    "linear_num_value_heads": (4, 8),
    "linear_key_head_dim": (8,),
    "linear_value_head_dim": (6, 8),
    "linear_conv_kernel_dim": (2, 4),
    "kinds": (("linear_attention", "full_attention"), ("full_attention", "linear_attention"), ABSENT),
    "full_attention_interval": (2,),
    # Queries and keys are normed after a convolution: larger weights amplify rounding, also in transformers.
    "initializer_range": (0.1,),
}
WINDOW: Options = {
    "sliding_window": (1, 3, 6, 100),
    "kinds": (("sliding_attention", "full_attention"), ("full_attention", "sliding_attention"), ABSENT),
}
FAMILIES: dict[str, Options] = {
    "llama": {},
    "mistral": {"sliding_window": (None, 128)},
    "qwen2": {"head_dim": (ABSENT,)},
    "qwen3": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "gemma3_text": WINDOW | {"query_pre_attn_scalar": (9, 64)},
    "gpt_oss": WINDOW
    | {
        "num_local_experts": (4,),
        "num_experts_per_tok": (1, 2),
        "swiglu_limit": (1.0, 7.0),
        "swiglu_alpha": (1.702, 1.2),
    },
    "mixtral": {"num_local_experts": (4,), "num_experts_per_tok": (1, 2)},
    "olmoe": {
        "num_experts": (4,),
        "num_experts_per_tok": (1, 2),
        "norm_topk_prob": (False, True),
        "head_dim": (ABSENT,),
    },
    "qwen2_moe": EXPERTS | SHARED_EXPERT | SPARSE | {"head_dim": (ABSENT,)},
    "qwen3_moe": EXPERTS | SPARSE | {"num_experts": (4,)},
    "glm4_moe": SIGMOID_EXPERTS | SHARE | {"attention_bias": (False, True), "use_qk_norm": (False, True)},
    "deepseek_v2": SIGMOID_EXPERTS
    | LATENTS
    | {"topk_method": ("greedy", "group_limited_greedy"), "norm_topk_prob": (False,)},
    "deepseek_v3": SIGMOID_EXPERTS | LATENTS | {"rope_interleave": (True, False)},
    "qwen3_next": LINEAR | EXPERTS | SHARED_EXPERT | {"num_experts": (4, 0), "mlp_only_layers": ([], [0])},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR | EXPERTS | SHARED_EXPERT,
}
"""Options of each family by transformers' ``model_type``, beyond the common ones."""
OMITTABLE = frozenset({
    "rms_norm_eps", "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq",
    "partial_rotary_factor", "norm_topk_prob", "routed_scaling_factor", "mlp_only_layers", "decoder_sparse_step",
    "attention_bias", "use_qk_norm", "swiglu_alpha", "swiglu_limit", "rope_interleave", "topk_method", "sliding_window",
    "query_pre_attn_scalar", "first_k_dense_replace", "layer_types", "q_lora_rank",
})  # fmt: skip
"""Fields whose default in transformers fits every size."""
INERT = frozenset({
    "transformers_version", "architectures", "dtype", "id2label", "label2id", "problem_type", "return_dict",
    "output_hidden_states", "use_cache", "chunk_size_feed_forward", "is_encoder_decoder", "initializer_range",
    "pad_token_id", "bos_token_id", "eos_token_id", "vocab_size", "attention_dropout", "router_aux_loss_coef",
    "output_router_logits", "router_jitter_noise", "pretraining_tp", "rope_parameters",
})  # fmt: skip
"""Fields that do not enter the logits of inference, or are drawn under other names."""


def draw(family: str, random: Random) -> Fields:
    """Draw a ``config.json``."""
    chosen = {name: random.choice(values) for name, values in (COMMON | FAMILIES[family]).items()}
    kinds = chosen.pop("kinds", ABSENT)
    if kinds is not ABSENT:
        chosen["layer_types"] = [kinds[layer % 2] for layer in range(chosen["num_hidden_layers"])]
    rope = rotary_fields(family, *(chosen.pop(name) for name in ("rope", "theta", "spelling")))
    share = chosen.pop("partial_rotary_factor", ABSENT)
    if share is not ABSENT:
        rope.get("rope_parameters", rope)["partial_rotary_factor"] = share
    name = transformers.CONFIG_MAPPING[family].__name__.removesuffix("Config").removesuffix("Text")
    fields = {
        "model_type": family,
        "architectures": [f"{name}ForCausalLM"],
        "vocab_size": VOCAB,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "eos_token_id": 1,
        **{name: value for name, value in chosen.items() if value is not ABSENT},
        **rope,
    }
    fields = {name: value for name, value in fields.items() if name not in OMITTABLE or random.random() > OMITTED}
    return changed(fields, random) if random.random() < CHANGED else fields


def rotary_fields(family: str, rope: Fields, theta: float, spelling: str) -> Fields:
    """Write rotary parameters in one of :data:`SPELLINGS`."""
    if spelling == "old":
        base = {"rope_local_base_freq": 1e3} if family == "gemma3_text" else {}
        return {"rope_theta": theta, "rope_scaling": dict(rope) or None, **base}
    scaled = spelling == "new" and bool(rope)
    section = {"rope_theta": theta, **(rope if scaled else {"rope_type": "default"})}
    added = {} if spelling == "new" else {"rope_scaling": dict(rope) or None}
    if family not in BY_KIND:
        return {"rope_parameters": section, **added}
    plain = {"rope_type": "default", "rope_theta": 1e3}
    return {"rope_parameters": {"full_attention": section, "sliding_attention": plain}, **added}


def changed(fields: Fields, random: Random) -> Fields:
    """Give one more field of transformers' configuration another value than its default."""
    known = dataclasses.fields(transformers.CONFIG_MAPPING[fields["model_type"]])
    field = random.choice([field for field in known if field.name not in INERT | fields.keys()])
    return {**fields, field.name: _another(field.default, random)}


def _another(value: Any, random: Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return random.choice([1, 2, 4])
    if isinstance(value, float):
        return value / 2 + 0.25
    return random.choice(["relu", "gelu"] if isinstance(value, str) else [True, 1, 2.0])
