"""KV cache of a replica: bytes of a token, and the tokens that the engine's settings leave room for."""

from __future__ import annotations

from typing import NamedTuple

from megarl.base.formatting import DTYPE_BYTES
from megarl.models import ModelConfig
from megarl.ops.plan.job import PlannedRollout
from megarl.ops.plan.states import FLOAT32
from megarl.rollout.settings import FRACTION, FreeMemory, default_fraction, shared_fraction

LENGTH_MULTIPLE = 32  # the embedded engine rounds its slot length up to a multiple of this number of tokens
CPU_TOKENS = 2**16  # tokens in SGLang's KV cache on a CPU, as megarl sets it


class KVCacheCapacity(NamedTuple):
    """KV cache on the devices of one replica."""

    tokens: int  # capacity over all sequences; 0 if no memory is left
    bytes_per_token: int  # bytes per token on one device
    nbytes: int  # bytes on one device, with the states of gated delta nets
    sequences: int  # capacity in sequences of maximum length
    how: str  # the setting that determines the size, in words


def bytes_per_token(model: ModelConfig, tp: int, width: int) -> int:
    """Return the KV cache bytes of one token, in all layers on one rank.

    With latent attention, the cache holds the latent instead of keys and values. Gated delta nets have none.
    """
    layers = len(model.attention_layers)
    if model.latent is not None:
        return layers * (model.latent.kv_lora_rank + model.latent.rope_dim) * width
    return layers * 2 * max(1, model.num_key_value_heads // tp) * model.head_dim * width


def bytes_per_sequence(model: ModelConfig, tp: int, width: int) -> int:
    """Return the bytes of one sequence's states of gated delta nets, in all layers on one rank; 0 without them."""
    linear = model.linear
    if linear is None:
        return 0
    matrices = FLOAT32 * linear.value_heads * linear.key_dim * linear.value_dim
    inputs = width * (linear.conv_width - 1) * linear.mixed_width
    return sum(linear.layers) * (matrices + inputs) // tp


def kv_cache_capacity(
    rollout: PlannedRollout, weights: int, other_roles: int, device_bytes: int | None, device: str
) -> KVCacheCapacity | None:
    """Return the KV cache of one replica.

    Args:
        weights: bytes of its weights on one device.
        other_roles: bytes of other roles on that device during generation.
        device_bytes: memory of the device; None = unknown.

    Returns:
        None if the size depends on an unknown device memory.
    """
    width = DTYPE_BYTES[rollout.config.dtype]
    per_token = bytes_per_token(rollout.model, rollout.tp, width)
    if rollout.config.name == "embedded":
        length = -(-(rollout.longest - 1) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        slots = min(rollout.config.max_num_seqs, -(-rollout.samples // rollout.replicas))
        tokens = slots * length
        nbytes = tokens * per_token + slots * bytes_per_sequence(rollout.model, rollout.tp, width)
        return KVCacheCapacity(
            tokens, per_token, nbytes, slots, "slots for the longest trajectory, rollout.max_num_seqs"
        )
    states = rollout.config.max_num_seqs * bytes_per_sequence(rollout.model, rollout.tp, width)
    args = rollout.config.engine_kwargs.sglang.server_args
    max_tokens = args.get("max_total_tokens", CPU_TOKENS if device == "cpu" else None)
    if device == "cpu" or device_bytes is None:
        if max_tokens is None:
            return None
        return _of_tokens(int(max_tokens), per_token, rollout, f"max_total_tokens={max_tokens}", states)
    free = FreeMemory(device_bytes - other_roles, device_bytes)
    fraction = args.get(FRACTION)
    if fraction is None:
        if rollout.own_devices:
            fraction = default_fraction(device_bytes, rollout.tp)
        else:
            keeps_memory = not rollout.config.free_cache_engine
            fraction = shared_fraction([free] * rollout.tp, 0, keeps_memory=keeps_memory)
    # The fraction applies to the memory that is free when the engine starts; weights are taken out first.
    available = int(free.free * fraction) - weights - states
    tokens = max(0, available) // per_token
    if max_tokens is not None and max_tokens < tokens:
        return _of_tokens(int(max_tokens), per_token, rollout, f"max_total_tokens={max_tokens}", states)
    return _of_tokens(tokens, per_token, rollout, f"{FRACTION}={fraction:g}", states)


def _of_tokens(tokens: int, per_token: int, rollout: PlannedRollout, how: str, states: int = 0) -> KVCacheCapacity:
    return KVCacheCapacity(tokens, per_token, tokens * per_token + states, tokens // rollout.longest, how)
