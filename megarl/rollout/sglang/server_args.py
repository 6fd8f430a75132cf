"""The arguments that SGLang is started with."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError
from megarl.rollout.sglang import features
from megarl.rollout.sglang.options import SGLangOptions

LOADER = "megarl.rollout.sglang.loader.load"
"""Where SGLang's ranks find the function that writes weights."""

RESERVED_TOKENS = 2
"""Tokens of the context length that SGLang does not give to a request."""

KEY = "rollout.engine_kwargs.sglang"

_CPU = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 2**16,
    # Else its scheduler takes a whole core while it waits.
    "sleep_on_idle": True,
}

# What the engine's own options say, or what it cannot do without.
_OWN = (
    "model_path",
    "device",
    "dtype",
    "tp_size",
    "context_length",
    "max_running_requests",
    "load_format",
    "skip_tokenizer_init",
    "custom_weight_loader",
    "enable_deterministic_inference",
    "host",
    "port",
    "base_gpu_id",
)

# Arguments by which SGLang's ranks would hold other parameters than a sync writes, and values by which they do not.
_HOLDS_OTHERWISE: dict[str, tuple[Any, ...]] = {
    "ep_size": (1,),
    "moe_a2a_backend": (None, "none"),
    "enable_eplb": (False,),
    "ep_num_redundant_experts": (0,),
    "enforce_shared_experts_fusion": (False,),
    "moe_dense_tp_size": (None,),
    "enable_dp_attention": (False,),
    "pp_size": (1,),
    "quantization": (None,),
    "speculative_algorithm": (None,),
}

# Absent from some version, and then of no consequence.
_OPTIONAL = (
    "grammar_backend",
    "disable_overlap_schedule",
    "enable_memory_saver",
    "sleep_on_idle",
    "disable_shared_experts_fusion",
)


def server_args(folder: str, max_model_len: int, options: SGLangOptions) -> dict[str, Any]:
    """Values of ``ServerArgs`` by field name, for an engine that starts without weights.

    Args:
        folder: the model; only its configuration and, with stop strings, its tokenizer are read.
        max_model_len: most tokens of prompt and answer together.
        options: the rest.

    Raises:
        ConfigError: an argument in ``options.server_args`` that the engine sets itself, or that SGLang does not have.
    """
    device, _, index = options.device.partition(":")
    own: dict[str, Any] = {
        "model_path": folder,
        "device": device,
        "dtype": options.dtype,
        "tp_size": options.tensor_parallel_size,
        "context_length": max_model_len + RESERVED_TOKENS,
        "max_running_requests": options.max_num_seqs,
        "load_format": "dummy",
        "skip_tokenizer_init": not decodes(folder, options),
        "custom_weight_loader": [LOADER],
        "enable_deterministic_inference": options.seeded,
        # A fused expert more would not be one of the checkpoint.
        "disable_shared_experts_fusion": True,
        "log_level": "error",
    }
    if device == "cpu":
        own |= _CPU
    else:
        own["enable_memory_saver"] = importlib.util.find_spec("torch_memory_saver") is not None
        if index:
            own["base_gpu_id"] = int(index)
    check_server_args(options.server_args)
    chosen = own | dict(options.server_args)
    known = features.server_arg_names()
    return {name: value for name, value in chosen.items() if name in known or name not in _OPTIONAL}


def decodes(folder: str, options: SGLangOptions) -> bool:
    """Whether SGLang decodes answers, without which it knows no stop strings."""
    if options.stop_strings is None:
        return (Path(folder) / "tokenizer_config.json").is_file()
    return options.stop_strings


def check_server_args(given: Mapping[str, Any]) -> None:
    """Refuses arguments of SGLang that are not the user's to set, that change what its ranks hold, or that it lacks.

    The last is known only where SGLang is installed.

    Raises:
        ConfigError: names the argument.
    """
    for name, value in given.items():
        if name in _OWN:
            raise ConfigError(f"{KEY}.server_args.{name}: the engine sets this itself, from the other rollout keys")
        if name in _HOLDS_OTHERWISE and value not in _HOLDS_OTHERWISE[name]:
            raise ConfigError(
                f"{KEY}.server_args.{name}={value!r}: SGLang's ranks would hold other parameters than a weight sync "
                "writes; leave it out"
            )
    if not given or not features.is_installed():
        return
    known = features.server_arg_names()
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; nearest: {near[0]}" if near else ""
            raise ConfigError(f"{KEY}.server_args.{name}: the installed SGLang has no such argument{hint}")
