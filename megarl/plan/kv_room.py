"""How many tokens' keys and values a rollout replica has room for."""

from __future__ import annotations

from typing import NamedTuple

from megarl.amounts import GIB
from megarl.models import ModelConfig
from megarl.plan.job import DTYPE_BYTES, PlannedRollout

LENGTH_MULTIPLE = 32
"""The embedded engine's slots are a multiple of so many tokens long."""
MIB = 2**20
_PREFILL = ((35 * GIB, 2048), (60 * GIB, 4096), (160 * GIB, 8192))
_GRAPHS = ((20 * GIB, 8, 8), (35 * GIB, 24, 80), (60 * GIB, 32, 160), (160 * GIB, 256, 512))
"""By device memory below which they hold: SGLang's tokens per prefill, and its largest batch in CUDA graphs with fewer
than four ranks and with more."""
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


def default_fraction(device_bytes: int, tp: int) -> float:
    """What SGLang chooses for ``mem_fraction_static`` where nothing is said.

    It leaves free what it thinks a prefill, CUDA graphs and communication take, and at least 10 GiB of a large device
    (``ServerArgs._handle_gpu_memory_settings``, as of SGLang 0.5.6).
    """
    tokens = next((size for limit, size in _PREFILL if device_bytes < limit), 16384)
    graphs = next((few if tp < 4 else many for limit, few, many in _GRAPHS if device_bytes < limit), 512)
    left = MIB * (512 + 1.5 * tokens + 2 * graphs + tp / 8 * 1024)
    if device_bytes > 60 * GIB:
        left = max(left, 10 * GIB)
    return round(1 - left / device_bytes, 3)


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
    if device == "cpu" or device_bytes is None:
        return None if given is None else _of_tokens(int(given), each, rollout, f"max_total_tokens={given}")
    fraction = args.get("mem_fraction_static") or default_fraction(device_bytes, rollout.tp)
    # Of what was free when the engine started, so much stays free; weights come first.
    left = int((device_bytes - beside) * fraction) - weights
    tokens = max(0, left) // each
    if given is not None and given < tokens:
        return _of_tokens(int(given), each, rollout, f"max_total_tokens={given}")
    return _of_tokens(tokens, each, rollout, f"mem_fraction_static={fraction:g}")


def _of_tokens(tokens: int, each: int, rollout: PlannedRollout, how: str) -> KVRoom:
    return KVRoom(tokens, each, tokens * each, tokens // rollout.longest, how)
