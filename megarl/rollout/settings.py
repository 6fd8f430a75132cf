"""Options of a rollout engine from the rollout section of the config."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from megarl.base.errors import ConfigError
from megarl.config import RolloutConfig
from megarl.config.schema.rollout import SGLangConfig, TrainingRolloutConfig
from megarl.models import ModelConfig
from megarl.rollout.interface import EngineOptions
from megarl.rollout.sglang.memory import FRACTION, FreeMemory, fraction_beside_training
from megarl.rollout.sglang.options import CACHE_TOKENS, EngineNodes, SGLangOptions


def engine_options(
    rollout: RolloutConfig,
    device: str,
    replica: int = 0,
    pending_bytes: int | None = None,
    *,
    return_routes: bool = False,
    eos_token_ids: tuple[int, ...] | None = None,
    nodes: EngineNodes | None = None,
) -> EngineOptions:
    """Return the options of the engine ``rollout.name``.

    Args:
        device: device of the replica's first rank.
        replica: number of the replica; selects its server if the config has ``urls``.
        pending_bytes: device bytes that training roles on the replica's GPUs have yet to allocate, from which SGLang's
            share of the free memory follows; None = no training role.
        nodes: nodes of the replica's ranks; None = one node.

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
        quantization=rollout.quantization if isinstance(rollout, TrainingRolloutConfig) else None,
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
    fraction = fraction_beside_training(
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
