"""Options of a rollout engine from the rollout section of the config."""

from __future__ import annotations

from megarl.config import RolloutConfig
from megarl.rollout.interface import EngineOptions
from megarl.rollout.sglang.options import SGLangOptions

MEGABYTE = 2**20


def engine_options(rollout: RolloutConfig, device: str, replica: int = 0) -> EngineOptions:
    """Return the options of the engine ``rollout.name``.

    Args:
        rollout: rollout section of the config.
        device: device of the replica's first rank.
        replica: number of the replica; selects its server if the config has ``urls``.
    """
    common = EngineOptions(
        dtype=rollout.dtype,
        device=device,
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        max_num_seqs=rollout.max_num_seqs,
    )
    if rollout.name != "sglang":
        return common
    sglang = rollout.engine_kwargs.sglang
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
