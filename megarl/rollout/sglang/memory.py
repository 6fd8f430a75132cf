"""SGLang's share of a GPU, ``mem_fraction_static``: its own default, and the share next to training roles.

SGLang measures the free memory when it starts. Its weights and KV cache take the fraction; the rest is for its CUDA
graphs and activations. At that time training roles lack Adam's state and the buffers of their first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megarl.base.errors import ConfigError
from megarl.base.formatting import GIB, MIB

FRACTION = "mem_fraction_static"
KEY = f"actor_rollout_ref.rollout.engine_kwargs.sglang.server_args.{FRACTION}"
LARGEST_WHILE_TRAINING = 0.5
"""Largest fraction for an engine that keeps its memory while the roles train: activations need the rest."""

_PREFILL = ((35 * GIB, 2048), (60 * GIB, 4096), (160 * GIB, 8192))
_GRAPHS = ((20 * GIB, 8, 8), (35 * GIB, 24, 80), (60 * GIB, 32, 160), (160 * GIB, 256, 512))
"""SGLang's settings by device memory (upper limits): tokens per prefill, and largest batch in CUDA graphs with fewer
than four ranks and with more.
"""


class FreeMemory(NamedTuple):
    """Free and total bytes of a GPU."""

    free: int
    total: int


def default_fraction(device_bytes: int, tp: int) -> float:
    """Return SGLang's default for ``mem_fraction_static``.

    It reserves memory for prefill, CUDA graphs and communication, and at least 10 GiB of a large device
    (``ServerArgs._handle_gpu_memory_settings``, as of SGLang 0.5.6).
    """
    tokens = next((size for limit, size in _PREFILL if device_bytes < limit), 16384)
    graphs = next((few if tp < 4 else many for limit, few, many in _GRAPHS if device_bytes < limit), 512)
    reserved = MIB * (512 + 1.5 * tokens + 2 * graphs + tp / 8 * 1024)
    if device_bytes > 60 * GIB:
        reserved = max(reserved, 10 * GIB)
    return round(1 - reserved / device_bytes, 3)


def shared_fraction(devices: Sequence[FreeMemory], pending: int, *, keeps_memory: bool) -> float:
    """Return ``mem_fraction_static`` of an engine on the devices of training roles.

    Args:
        devices: memory of each rank's device, without the engine.
        pending: bytes per device that the training roles will allocate and keep during generation.
        keeps_memory: the engine keeps its memory while the roles train (``free_cache_engine=false``).

    Returns:
        At most 1, rounded down; 0 if no memory is left.
    """
    tp = len(devices)
    reserved = [pending + device.total * (1 - default_fraction(device.total, tp)) for device in devices]
    smallest = min(1 - size / max(1, device.free) for size, device in zip(reserved, devices, strict=True))
    if keeps_memory:
        smallest = min(smallest, LARGEST_WHILE_TRAINING)
    return max(0, int(smallest * 1000)) / 1000


def fraction_beside_training(devices: Sequence[FreeMemory], pending: int, *, keeps_memory: bool) -> float:
    """Return :func:`shared_fraction`, and require that it leaves memory.

    Raises:
        ConfigError: no memory is left for the engine; names the keys that free some.
    """
    fraction = shared_fraction(devices, pending, keeps_memory=keeps_memory)
    if not fraction:
        least = min(devices)
        raise ConfigError(
            f"{KEY} is not set, and no memory is left for SGLang: {least.free / GIB:.1f} of {least.total / GIB:.1f} "
            f"GiB are free next to the training roles, which will need {pending / GIB:.1f} GiB more. Set "
            "param_offload=true and optimizer_offload=true of the roles, or use more devices",
            code="sglang.no-memory",
        )
    return fraction
