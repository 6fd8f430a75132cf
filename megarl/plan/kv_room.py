"""How many tokens' keys and values a rollout replica has room for."""

from __future__ import annotations

from typing import NamedTuple

from megarl.models import ModelConfig
from megarl.plan.job import DTYPE_BYTES, PlannedRollout

LENGTH_MULTIPLE = 32
"""The embedded engine's slots are a multiple of so many tokens long."""
DEFAULT_FRACTION = 0.85
"""A middle value of what SGLang chooses by itself for ``mem_fraction_static``, by the device's memory."""
CPU_TOKENS = 2**16
"""What megarl has SGLang hold on a CPU."""


class KVRoom(NamedTuple):
    """Room for keys and values on the devices of one replica.

    Attributes:
        tokens: of all sequences together that it holds at a time; 0 where nothing is left.
        bytes_per_token: on one of its devices.
        nbytes: taken on one of its devices.
        sequences: how many of the longest it holds.
        how: what decides it, in words.
    """

    tokens: int
    bytes_per_token: int
    nbytes: int
    sequences: int
    how: str


def bytes_per_token(model: ModelConfig, tp: int, width: int) -> int:
    """Bytes of one token's keys and values in all layers on one rank; of latent attention, those of its latent."""
    if model.latent is not None:
        return model.num_layers * (model.latent.kv_lora_rank + model.latent.rope_dim) * width
    return model.num_layers * 2 * max(1, model.num_key_value_heads // tp) * model.head_dim * width


def kv_room(rollout: PlannedRollout, weights: int, beside: int, device_bytes: int | None, device: str) -> KVRoom | None:
    """Room of one replica.

    Args:
        rollout: the engine.
        weights: bytes of its weights on one device.
        beside: bytes of other roles on that device while it generates.
        device_bytes: memory of the device; None = not known.
        device: ``cpu`` or ``cuda``.

    Returns:
        None where it depends on a memory that is not known.
    """
    width = DTYPE_BYTES[rollout.config.dtype]
    each = bytes_per_token(rollout.model, rollout.tp, width)
    if rollout.config.name == "embedded":
        length = -(-(rollout.longest - 1) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        slots = min(rollout.config.max_num_seqs, -(-rollout.samples // rollout.replicas))
        tokens = slots * length
        return KVRoom(tokens, each, tokens * each, slots, "slots of the longest conversation, rollout.max_num_seqs")
    args = rollout.config.engine_kwargs.sglang.server_args
    given = args.get("max_total_tokens", CPU_TOKENS if device == "cpu" else None)
    fraction = args.get("mem_fraction_static", DEFAULT_FRACTION)
    room = None if device_bytes is None or device == "cpu" else _room(device_bytes, beside, weights, fraction)
    if room is None and given is None:
        return None
    tokens = min(size for size in (given, None if room is None else max(0, room) // each) if size is not None)
    how = f"mem_fraction_static={fraction:g}" if given is None or tokens != given else f"max_total_tokens={given}"
    return KVRoom(tokens, each, tokens * each, tokens // rollout.longest, how)


def _room(device_bytes: int, beside: int, weights: int, fraction: float) -> int:
    """SGLang's rule: of what was free when it started, ``1 - mem_fraction_static`` stays free; weights come first."""
    free = device_bytes - beside
    return int(free * fraction) - weights
