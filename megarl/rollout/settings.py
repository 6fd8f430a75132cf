"""From the configuration of rollout to the options of an engine."""

from __future__ import annotations

from pathlib import Path

from megarl.config import RolloutConfig
from megarl.config.engines import SGLangConfig
from megarl.rollout.interface import EngineOptions

MEGABYTE = 2**20


def engine_options(rollout: RolloutConfig, device: str, replica: int = 0) -> EngineOptions:
    """What the engine that ``rollout.name`` chooses is built with.

    Args:
        rollout: the section.
        device: of the replica's first rank.
        replica: its number, by which it has its server where they were started by somebody else.
    """
    common = EngineOptions(
        dtype=rollout.dtype,
        device=device,
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        max_num_seqs=rollout.max_num_seqs,
    )
    return _sglang(common, rollout.engine_kwargs.sglang, replica) if rollout.name == "sglang" else common


def takes_stop_strings(rollout: RolloutConfig, model_path: str) -> bool:
    """Whether the engine knows stop strings, for which it has to decode what it generates."""
    sglang: SGLangConfig = rollout.engine_kwargs.sglang
    if rollout.name == "sglang" and sglang.stop_strings is not None:
        return sglang.stop_strings
    return (Path(model_path) / "tokenizer_config.json").is_file()


def _sglang(common: EngineOptions, sglang: SGLangConfig, replica: int) -> EngineOptions:
    from megarl.rollout.sglang.options import SGLangOptions

    return SGLangOptions(
        **vars(common),
        mode=sglang.mode,
        url=sglang.urls[replica] if sglang.urls else None,
        host=sglang.host,
        weight_transport=sglang.weight_transport,
        bucket_bytes=sglang.update_weights_bucket_megabytes * MEGABYTE,
        deterministic=sglang.deterministic,
        stop_strings=sglang.stop_strings,
        start_timeout_s=sglang.start_timeout_s,
        call_timeout_s=sglang.call_timeout_s,
        server_args=sglang.server_args,
    )
