"""Options of an SGLang engine, and SGLang's arguments and environment that follow from them."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.base.allocators import without_expandable_segments
from megarl.base.errors import ConfigError
from megarl.base.json_text import parse_json
from megarl.base.packages import is_installed
from megarl.base.ports import GLOO_INTERFACE, collective_interfaces
from megarl.config.schema.rollout import FP8
from megarl.models import ModelConfig, read_model_config
from megarl.models.declaration import FP8_BLOCK
from megarl.rollout.interface import EngineOptions

KEY = "rollout.engine_kwargs.sglang"
OVERRIDES = "json_model_override_args"
"""Argument of SGLang with fields that replace those of the model's config."""
KERNELS_ARGUMENT, EXPERT_KERNELS = "moe_runner_backend", "triton"
"""SGLang's argument that selects kernels of experts, and the kernels whose experts with biases are not transposed."""
MODES = ("in_process", "http")
LOADER = "megarl.sharding.sglang_loader.load"
"""Import path of the weight loader for SGLang's ranks."""
RESERVED_TOKENS = 2
"""Tokens of the context length that SGLang reserves."""
ROUTES_ARGUMENT = "enable_return_routed_experts"
"""Argument of SGLang with which it records the experts of tokens."""
CACHE_TOKENS = "max_total_tokens"
"""Argument of SGLang with the tokens that its cache holds, of all requests together."""
IMAGE_CACHE = "mm_preprocess_cache_size_mb"
"""Argument of SGLang with the memory for processed images."""
IMAGE_SETTINGS = "mm_process_config"
"""Argument of SGLang with settings of its image processor."""
FRACTION = "mem_fraction_static"
"""Argument of SGLang with the share of the free memory for weights and KV cache."""
WHOLE_TOWERS = "mm_enable_dp_encoder"
"""Argument of SGLang with which each rank has the whole vision tower, and computes the features of other images."""
_CPU = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.3,
    CACHE_TOKENS: 2**16,
    # Without this the idle scheduler uses a whole core.
    "sleep_on_idle": True,
}

# Set by the engine.
_ENGINE_ARGS = (
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
    "api_key",
    "admin_api_key",
    "base_gpu_id",
    ROUTES_ARGUMENT,
    "image_processor_backend",
    IMAGE_SETTINGS,
)

# Arguments that change the parameters of SGLang's ranks, with the values that do not.
_PARAMETER_ARGS: dict[str, tuple[Any, ...]] = {
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

# With several tokenizer processes SGLang checks no API key.
_UNPROTECTED = "tokenizer_worker_num"

# Missing in some versions, where they are not needed.
_OPTIONAL = (
    "grammar_backend",
    "disable_overlap_schedule",
    "enable_memory_saver",
    "sleep_on_idle",
    "disable_shared_experts_fusion",
)

SHIM = Path(__file__).parent / "cpu_shim"


@dataclass(frozen=True)
class EngineNodes:
    """Nodes of one SGLang; the front end, and the store at ``port``, are on the first host."""

    hosts: tuple[str, ...]
    port: int
    number: int = 0

    @property
    def rendezvous(self) -> str:
        """Address and port of the store."""
        host = self.hosts[0]
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


@dataclass(frozen=True)
class SGLangOptions(EngineOptions):
    """Options of SGLang; those without a line here are keys of :class:`megarl.config.schema.rollout.SGLangConfig`.

    Attributes:
        mode: ``in_process`` has one engine per process, and no running event loop in the same thread.
        url: URL of a running server, which the engine does not end; implies ``mode=http``.
        api_key: key that the server demands; None = a random one for a started server.
        port: its port; 0 = a free one.
        health_timeout_s: seconds after which a scheduler counts as lost that does not respond while requests run, or
            whose process is stopped during a call.
        nodes: nodes of the ranks, with equal numbers of ranks; None = all are on this node.
    """

    mode: str = "in_process"
    url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    host: str = "127.0.0.1"
    port: int = 0
    server_args: Mapping[str, Any] = field(default_factory=dict)
    deterministic: bool | None = None
    stop_strings: bool | None = None
    start_timeout_s: float = 600.0
    call_timeout_s: float = 600.0
    health_timeout_s: float = 180.0
    nodes: EngineNodes | None = None

    @property
    def local_ranks(self) -> int:
        """Number of ranks on this node."""
        return self.tensor_parallel_size // (len(self.nodes.hosts) if self.nodes else 1)

    @property
    def is_cpu(self) -> bool:
        """Whether SGLang computes on the CPU."""
        return self.device == "cpu"

    @property
    def seeded(self) -> bool:
        """Whether a request's seed determines its tokens."""
        return self.is_cpu if self.deterministic is None else self.deterministic


def server_args(folder: str, max_model_len: int, options: SGLangOptions) -> dict[str, Any]:
    """Return the fields of ``ServerArgs`` for an engine that starts without weights.

    Raises:
        ConfigError: ``options.server_args`` has an argument that the engine sets, or that SGLang does not have.
    """
    device, _, index = options.device.partition(":")
    arguments: dict[str, Any] = {
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
        # Fusion would add an expert that the checkpoint does not have.
        "disable_shared_experts_fusion": True,
        "trust_remote_code": False,
        "log_level": "error",
    }
    if options.return_routes:
        arguments[ROUTES_ARGUMENT] = True
    if device == "cpu":
        arguments |= _CPU
    else:
        arguments["enable_memory_saver"] = is_installed("torch_memory_saver")
        if not _samples_with_flashinfer():
            arguments["sampling_backend"] = "pytorch"
        if index:
            arguments["base_gpu_id"] = int(index)
    check_server_args(options.server_args)
    config = read_model_config(folder).with_trained_tower(options.trained_tower)
    if config.vision is not None:
        # With a cache, SGLang gives the options to its image processor, and reads no token again.
        arguments |= {IMAGE_CACHE: 512, **image_arguments(options)}
    arguments |= model_arguments(config, options.server_args)
    if options.quantization is not None:
        arguments |= quantization_args(arguments)
    supported = server_arg_names()
    return {name: value for name, value in arguments.items() if name in supported or name not in _OPTIONAL}


def image_arguments(options: EngineOptions) -> dict[str, Any]:
    """Return SGLang's arguments of a model with images: the image processor of training, and a frozen tower's weights.

    A weight sync sends the language model, and a trained tower.
    """
    arguments = {"image_processor_backend": "pil"} | ({} if options.trained_tower else {"load_format": "auto"})
    return arguments | ({IMAGE_SETTINGS: {"image": dict(options.image_options)}} if options.image_options else {})


def model_arguments(config: ModelConfig, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return SGLang's arguments with those that the model needs.

    Raises:
        ConfigError: the user's arguments select other kernels or whole towers, or their overrides of the config are no
            JSON object.
    """
    result = dict(arguments)
    if config.experts is not None and config.experts.biases:
        chosen = arguments.get(KERNELS_ARGUMENT, EXPERT_KERNELS)
        if chosen != EXPERT_KERNELS:
            raise ConfigError(
                f"{KEY}.server_args.{KERNELS_ARGUMENT}={chosen!r} is not supported for {config.architecture}: SGLang "
                f"would store its experts in another form than weight syncs write; set {EXPERT_KERNELS!r} or remove it",
                code="sglang.expert-kernels",
            )
        result[KERNELS_ARGUMENT] = EXPERT_KERNELS
    if config.trains_tower and arguments.get(WHOLE_TOWERS):
        raise ConfigError(
            f"{KEY}.server_args.{WHOLE_TOWERS}={arguments[WHOLE_TOWERS]!r}: each rank would hold a whole vision tower, "
            "and a weight sync writes its part of a trained one; remove it, or freeze the tower",
            code="sglang.parameter-argument",
        )
    if (positions := positions_of_full_attention(config)) is not None:
        result |= with_overrides(result, {"rope_parameters": positions})
    return result


def positions_of_full_attention(config: ModelConfig) -> dict[str, Any] | None:
    """Return the rotary embedding of OLMo 3's layers with full attention, if the config has one per kind of layer.

    SGLang reads one for all layers, and leaves its scaling out of layers with a window. From a config with one per kind
    of layer, as transformers 5 writes it, it would read neither base nor scaling.
    """
    positions = config.raw.get("rope_parameters")
    if config.architecture != "Olmo3ForCausalLM" or not positions or "full_attention" not in positions:
        return None
    return dict(positions["full_attention"])


def with_overrides(arguments: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the argument that replaces fields of the model's config, with the user's replacements.

    Raises:
        ConfigError: the user's replacements are no JSON object.
    """
    text = arguments.get(OVERRIDES) or "{}"
    try:
        overrides = dict(parse_json(text))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{KEY}.server_args.{OVERRIDES}={text!r}: expected a JSON object: {error}", code="sglang.config-overrides"
        ) from None
    return {OVERRIDES: json.dumps({**overrides, **fields})}


def quantization_args(server_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with which SGLang holds linear layers as a DeepSeek-V3 folder does; see `with_overrides`."""
    form = {
        "quant_method": FP8,
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    }
    return {"quantization": FP8, **with_overrides(server_args, {"quantization_config": form})}


def _samples_with_flashinfer() -> bool:
    """Whether flashinfer's sampling kernels are compiled already, or can be: they need nvcc at the first request."""
    toolkits = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    compilers = ("nvcc", *(f"{toolkit}/bin/nvcc" for toolkit in toolkits if toolkit))
    return is_installed("flashinfer_jit_cache") or any(map(shutil.which, compilers))


def check_server_args(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the engine sets, that change the ranks' parameters, or that an installed SGLang lacks.

    Raises:
        ConfigError: names the argument.
    """
    for name, value in arguments.items():
        if name in _ENGINE_ARGS:
            raise ConfigError(
                f"{KEY}.server_args.{name}: the engine sets this itself, from the other rollout keys",
                code="sglang.engine-argument",
            )
        if name in _PARAMETER_ARGS and value not in _PARAMETER_ARGS[name]:
            raise ConfigError(
                f"{KEY}.server_args.{name}={value!r}: SGLang's ranks would hold other parameters than a weight sync "
                "writes; remove it",
                code="sglang.parameter-argument",
            )
    if arguments.get(_UNPROTECTED, 1) != 1:
        raise ConfigError(
            f"{KEY}.server_args.{_UNPROTECTED}={arguments[_UNPROTECTED]!r}: SGLang's server then checks no API key, "
            "and every client could replace the weights; set 1",
            code="sglang.tokenizer-workers",
        )
    if not arguments or not is_installed("sglang"):
        return
    supported = server_arg_names()
    for name in arguments:
        if name not in supported:
            near = difflib.get_close_matches(name, supported, n=1)
            hint = f"; nearest: {near[0]}" if near else ""
            raise ConfigError(
                f"{KEY}.server_args.{name}: the installed SGLang has no such argument{hint}",
                code="sglang.unknown-argument",
            )


def decodes(folder: str, options: SGLangOptions) -> bool:
    """Return whether SGLang decodes responses, which stop strings require."""
    if options.stop_strings is None:
        return (Path(folder) / "tokenizer_config.json").is_file()
    return options.stop_strings


@functools.cache
def server_arg_names() -> frozenset[str]:
    """Return the field names of SGLang's ``ServerArgs``: a dataclass or msgspec structure, depending on the version."""
    from sglang.srt.server_args import ServerArgs

    return frozenset(field_names(ServerArgs))


def field_names(kind: type) -> list[str]:
    """Return the field names of a dataclass, msgspec structure or pydantic model, in order.

    Raises:
        TypeError: the type is none of these.
    """
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    fields = getattr(kind, "__struct_fields__", getattr(kind, "model_fields", None))
    if fields is None:
        raise TypeError(f"{kind.__name__} is neither a dataclass nor a structure")
    return list(fields)


def request_of(name: str, fields: dict[str, Any]) -> Any:
    """Create a structure of ``io_struct`` with the ``fields`` of this version; an older one needs no others."""
    from sglang.srt.managers import io_struct

    kind = getattr(io_struct, name)
    supported = set(field_names(kind))
    return kind(**{key: value for key, value in fields.items() if key in supported})


def environment(options: SGLangOptions) -> dict[str, str]:
    """Return the environment variables for SGLang's processes, in addition to those of this process."""
    # Requests may use the model's whole context, and SGLang reserves two more tokens.
    variables = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    if on_one_node(options):
        loopback = collective_interfaces("127.0.0.1")
        if os.environ.get(GLOO_INTERFACE, loopback.get(GLOO_INTERFACE)) != loopback.get(GLOO_INTERFACE):
            # Trainers on other nodes send weights to the same processes, and NCCL reads its interface once.
            loopback.pop("NCCL_SOCKET_IFNAME", None)
        variables |= loopback
    elif options.nodes is not None:
        variables |= collective_interfaces(options.nodes.hosts[options.nodes.number])
    if options.is_cpu:
        variables["SGLANG_USE_CPU_ENGINE"] = "1"
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = _cores(options.tensor_parallel_size)
        # torch.compile of a few lines in SGLang takes longer than a test run.
        variables["TORCHDYNAMO_DISABLE"] = os.environ.get("TORCHDYNAMO_DISABLE", "1")
    else:
        # Without this, the memory of CUDA graphs stays on the GPU while the engine sleeps.
        variables["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
        variables |= without_expandable_segments(os.environ)
    if needs_shim(options):
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SHIM), os.environ.get("PYTHONPATH", "")]))
    return variables


def on_one_node(options: SGLangOptions) -> bool:
    """Return whether all ranks of a started SGLang are on this machine and form one group."""
    return options.nodes is None and all(options.server_args.get(name) in (None, 1) for name in ("nnodes", "dp_size"))


class RankRendezvous:
    """The TCPStore at which the ranks of an SGLang meet.

    On one node this object hosts it on loopback; of several nodes, the first one hosts it. Otherwise SGLang's rank 0
    hosts a store that listens on all interfaces.

    Attributes:
        variables: environment variables of SGLang's processes, which make all ranks clients of the store.
        arguments: fields of ``ServerArgs``.
    """

    def __init__(self, options: SGLangOptions) -> None:
        self.variables: dict[str, str] = {}
        self.arguments: dict[str, Any] = {}
        if (nodes := options.nodes) is not None:
            self.arguments = {
                "nnodes": len(nodes.hosts),
                "node_rank": nodes.number,
                "dist_init_addr": nodes.rendezvous,
            }
            self.variables = _at_store(nodes.rendezvous)
            return
        if not on_one_node(options):
            return
        from megarl.base.rendezvous import host_store

        self._store = host_store("127.0.0.1", options.server_args.get("nccl_port") or 0)
        port = self._store.port
        self.arguments["nccl_port"] = port
        self.variables = _at_store(f"127.0.0.1:{port}")  # also with another `host`


def _at_store(address: str) -> dict[str, str]:
    return {
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"tcp://{address}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def needs_shim(options: SGLangOptions) -> bool:
    """Return whether SGLang runs on a CPU without its compiled kernels."""
    if not options.is_cpu:
        return False
    spec = importlib.util.find_spec("sgl_kernel")
    return spec is None or spec.origin is None or Path(spec.origin).is_relative_to(SHIM)


def _cores(ranks: int) -> str:
    """Return this process's cores, divided among the ranks; ranks share cores if there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(",".join(map(str, cores[rank::ranks] or [cores[rank % len(cores)]])) for rank in range(ranks))


def load_shim() -> None:
    """Make the shim's substitutes importable in this process, which imports SGLang's front end."""
    if str(SHIM) in sys.path:
        return
    # At the end of the path: an installed package of this name takes precedence.
    sys.path.append(str(SHIM))
    spec = importlib.util.spec_from_file_location("megarl_sglang_cpu_shim", SHIM / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
