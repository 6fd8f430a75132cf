"""KV cache sizes against those of the embedded engine."""

import torch

from megarl.models import parse_model_config
from megarl.ops.plan.kv_cache import LENGTH_MULTIPLE, bytes_per_sequence, bytes_per_token
from megarl.rollout.embedded import engine
from megarl.rollout.embedded.kv_cache import KVCache


def test_the_cache_is_as_large_as_the_embedded_engines():
    """With gated delta nets in three of four layers: keys and values of one layer, and states of the others."""
    raw = {"architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48,
           "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 50,
           "max_position_embeddings": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
           "linear_key_head_dim": 8, "linear_value_head_dim": 6}  # fmt: skip
    model, slots, length = parse_model_config(raw), 3, 64
    for dtype, width in ((torch.float32, 4), (torch.bfloat16, 2)):
        cache = KVCache(model, slots, length, dtype, torch.device("cpu"))
        assert cache.delta is not None
        held = (*cache._keys, *cache._values, *cache.delta._inputs, *cache.delta._matrices)
        states = slots * bytes_per_sequence(model, 1, width)
        assert states + slots * length * bytes_per_token(model, 1, width) == sum(part.nbytes for part in held)
    assert bytes_per_sequence(model, 2, 2) * 2 == bytes_per_sequence(model, 1, 2)


def test_slots_are_rounded_as_in_the_embedded_engine():
    """The plan imports no torch, so it has a constant of its own."""
    assert LENGTH_MULTIPLE == engine.LENGTH_MULTIPLE
