"""Sizes of the dimensions that declarations of parameters name."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.models.model_config import LinearAttention, ModelConfig


def dimension_sizes(config: ModelConfig) -> Mapping[str, int]:
    """Return the size of each dimension name that a declaration may use."""
    sizes = {
        "hidden": config.hidden_size,
        "q": config.num_attention_heads * config.head_dim,
        "q_and_gate": 2 * config.num_attention_heads * config.head_dim,
        "kv": config.num_key_value_heads * config.head_dim,
        "head": config.head_dim,
        "heads": config.num_attention_heads,
        "ffn": config.ffn_hidden_size,
        "vocab": config.vocab_size,
        "one": 1,
    }
    if config.experts is not None:
        sizes["experts"] = config.experts.count
        sizes["expert_ffn"] = config.experts.ffn_hidden_size
        sizes["expert_gate_up"] = 2 * config.experts.ffn_hidden_size
        sizes["shared_ffn"] = config.experts.shared_ffn_hidden_size
    if config.latent is not None:
        latent = config.latent
        sizes["q_latent"] = latent.q_lora_rank
        sizes["kv_latent"] = latent.kv_lora_rank
        sizes["kv_latent_and_rope"] = latent.kv_lora_rank + latent.rope_dim
        sizes["kv_unpacked"] = config.num_attention_heads * (latent.nope_dim + latent.v_dim)
        sizes["v"] = config.num_attention_heads * latent.v_dim
    if config.linear is not None:
        linear = config.linear
        sizes["conv"] = linear.conv_width
        sizes["linear_heads"] = linear.value_heads
        sizes["linear_head"] = linear.value_dim
        sizes |= {name: linear.key_heads * sum(rows) for name, rows in head_sections(linear).items()}
    return sizes


def head_sections(linear: LinearAttention) -> Mapping[str, tuple[int, ...]]:
    """Return the rows that each key head has in the sections of a dimension, by dimension name.

    ``q`` and ``k`` are a key head's query and key, ``v`` and ``z`` the values and output gates of its value heads,
    ``b`` their learning rates, ``a`` their decays.
    """
    key, values, heads = linear.key_dim, linear.values_per_key * linear.value_dim, linear.values_per_key
    return {
        "linear_qkvz": (key, key, values, values),
        "linear_qkv": (key, key, values),
        "linear_z": (values,),
        "linear_ba": (heads, heads),
        "linear_b": (heads,),
        "linear_a": (heads,),
    }
