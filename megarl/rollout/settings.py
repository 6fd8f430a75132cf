"""A rollout engine's options from the config's rollout section, and SGLang's share of a GPU.

SGLang measures the free memory when it starts. Its weights and KV cache take the fraction ``mem_fraction_static``; the
rest is for its CUDA graphs and activations. At that time training roles lack Adam's state and the buffers of their
first step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from megarl.base.errors import ConfigError
from megarl.base.formatting import GIB, MIB
from megarl.config import RolloutConfig
from megarl.config.schema.rollout import SGLangConfig, TrainingRolloutConfig
from megarl.models import ModelConfig
from megarl.rollout.interface import EngineOptions
from megarl.rollout.sglang.options import CACHE_TOKENS, FRACTION, EngineNodes, SGLangOptions

LARGEST_WHILE_TRAINING = 0.5
"""Largest fraction for an engine that keeps its memory while the roles train: activations need the rest."""


def engine_options(
    rollout: RolloutConfig,
    device: str,
    replica: int = 0,
    pending_bytes: int | None = None,
    *,
    return_routes: bool = False,
    eos_token_ids: tuple[int, ...] | None = None,
    nodes: EngineNodes | None = None,
    image_options: Mapping[str, Any] = MappingProxyType({}),
    trained_tower: bool = False,
) -> EngineOptions:
    """Return the options of the engine ``rollout.name``.

    Args:
        device: device of the replica's first rank.
        replica: number of the replica; selects its server if the config has ``urls``.
        pending_bytes: device bytes that training roles on the replica's GPUs have yet to allocate, from which SGLang's
            share of the free memory follows; None = no training role.
        nodes: nodes of the replica's ranks; None = one node.
        image_options: see :class:`~megarl.rollout.interface.EngineOptions`, likewise ``trained_tower``.

    Raises:
        ConfigError: the training roles leave no memory to SGLang, or the API key of running servers is not set.
    """
    common = EngineOptions(
        dtype=rollout.dtype,
        device=device,
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        max_num_seqs=rollout.max_num_seqs,
        eos_token_ids=eos_token_ids,
        return_routes=return_routes,
        return_support=isinstance(rollout, TrainingRolloutConfig) and rollout.support.enable,
        quantization=rollout.quantization if isinstance(rollout, TrainingRolloutConfig) else None,
        image_options=dict(image_options),
        trained_tower=trained_tower,
    )
    if rollout.name != "sglang":
        return common
    sglang = rollout.engine_kwargs.sglang
    options = SGLangOptions(
        **vars(common),
        mode=sglang.mode,
        url=sglang.urls[replica] if sglang.urls else None,
        api_key=_server_key(sglang) if sglang.urls else None,
        host=sglang.host,
        deterministic=sglang.deterministic,
        stop_strings=sglang.stop_strings,
        start_timeout_s=sglang.start_timeout_s,
        call_timeout_s=sglang.call_timeout_s,
        server_args=sglang.server_args,
        health_timeout_s=rollout.health.timeout_s,
        nodes=nodes,
    )
    if not isinstance(rollout, TrainingRolloutConfig):
        return options
    if pending_bytes is None or options.is_cpu or options.url is not None or FRACTION in sglang.server_args:
        return options
    import torch  # the planner, which must start in seconds, imports this module

    fraction = _fraction_beside_training(
        [
            FreeMemory(*torch.cuda.mem_get_info(torch.device(options.device_of(rank))))
            for rank in range(options.local_ranks)
        ],
        pending_bytes,
        keeps_memory=not rollout.free_cache_engine,
    )
    return replace(options, server_args={FRACTION: fraction, **sglang.server_args})


def context_tokens(rollout: RolloutConfig, model: ModelConfig) -> int:
    """Return the maximum tokens of prompt and response: the model's context, or SGLang's cache if it is smaller."""
    arguments = rollout.engine_kwargs.sglang.server_args if rollout.name == "sglang" else {}
    cache = arguments.get(CACHE_TOKENS)
    return min(model.max_position_embeddings, cache) if isinstance(cache, int) else model.max_position_embeddings


def _server_key(sglang: SGLangConfig) -> str:
    value = os.environ.get(sglang.api_key_env or "", "")
    if not value:
        raise ConfigError(
            f"actor_rollout_ref.rollout.engine_kwargs.sglang.api_key_env={sglang.api_key_env}: the environment "
            "variable is not set; it must hold the API key that the servers of urls demand",
            code="sglang.api-key-unset",
        )
    return value


KEY = f"actor_rollout_ref.rollout.engine_kwargs.sglang.server_args.{FRACTION}"

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
    """Return SGLang's default share (``ServerArgs._handle_gpu_memory_settings``, as of SGLang 0.5.6).

    It reserves memory for prefill, CUDA graphs and communication, and at least 10 GiB of a large device.
    """
    tokens = next((size for limit, size in _PREFILL if device_bytes < limit), 16384)
    graphs = next((few if tp < 4 else many for limit, few, many in _GRAPHS if device_bytes < limit), 512)
    reserved = MIB * (512 + 1.5 * tokens + 2 * graphs + tp / 8 * 1024)
    if device_bytes > 60 * GIB:
        reserved = max(reserved, 10 * GIB)
    return round(1 - reserved / device_bytes, 3)


def shared_fraction(devices: Sequence[FreeMemory], pending: int, *, keeps_memory: bool) -> float:
    """Return ``mem_fraction_static`` for an engine on the training roles' devices.

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


def _fraction_beside_training(devices: Sequence[FreeMemory], pending: int, *, keeps_memory: bool) -> float:
    """Return :func:`shared_fraction`; a ConfigError if no memory is left for the engine."""
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
