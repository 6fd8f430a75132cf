"""The models that SGLang runs, and keeps in the form of the weight map."""

from __future__ import annotations

import math
from dataclasses import replace

from megarl.base.errors import ModelError
from megarl.config.schema.rollout import FP8, QUANTIZATION_KEY
from megarl.models import ModelConfig
from megarl.models.declaration import FP8_BLOCK
from megarl.models.rope import attention_factor
from megarl.models.tower_class import engine_sizes
from megarl.rollout.interface import EngineOptions
from megarl.rollout.sglang.options import model_arguments, positions_of_full_attention
from megarl.sharding.quantization import check_blocks

CPU_MULTIPLE = 32
"""On a CPU SGLang pads the width of a rank's MLP to a multiple of this."""


def check_model_runs(config: ModelConfig, options: EngineOptions) -> None:
    """Refuse models that SGLang does not support on such a replica, or stores in another form, by a ModelError."""
    tp = options.tensor_parallel_size
    if config.latent is not None and config.num_attention_heads % tp:
        raise ModelError(
            f"rollout engine 'sglang' over {tp} ranks needs num_attention_heads to be a multiple of {tp}, "
            f"{config.architecture} has {config.num_attention_heads}: a rank has whole heads of latent attention",
            code="layout.rollout-heads",
        )
    if options.quantization is not None:
        check_quantization(config, options)
    model_arguments(config, getattr(options, "server_args", {}))
    _check_olmo_and_gemma(config, options)
    _check_positions(config)
    if config.linear is not None:
        _check_linear(config, options)
    if config.sinks:
        _check_sinks(config)
    if options.device == "cpu":
        _check_cpu_kernels(config)
        check_cpu_sizes(config, tp)


def _check_olmo_and_gemma(config: ModelConfig, options: EngineOptions) -> None:
    """Refuse forms of Gemma 3, OLMoE and OLMo 3 that SGLang does not divide over ranks or reads otherwise."""
    tp, name = options.tensor_parallel_size, config.architecture
    if name == "Gemma3ForCausalLM" and tp > 1:
        raise ModelError(
            f"rollout engine 'sglang' does not divide the embedding of {name} over {tp} ranks: set "
            "rollout.tensor_model_parallel_size=1",
            code="sglang.gemma-ranks",
        )
    if name == "OlmoeForCausalLM" and (tp > 1 or config.num_key_value_heads != config.num_attention_heads):
        raise ModelError(
            f"rollout engine 'sglang' norms the queries and keys of {name} over all heads of one rank: it needs "
            f"rollout.tensor_model_parallel_size=1 (here {tp}) and as many key-value heads as heads "
            f"(num_key_value_heads={config.num_key_value_heads}, num_attention_heads={config.num_attention_heads})",
            code="sglang.olmoe-ranks",
        )
    if getattr(options, "url", None) and positions_of_full_attention(config) is not None:
        raise ModelError(
            f"rollout.engine_kwargs.sglang.urls: SGLang reads no rotary embedding per kind of layer of {name}. In the "
            "servers' config.json, replace rope_parameters by those of full_attention",
            code="sglang.layer-rope",
        )


def _check_positions(config: ModelConfig) -> None:
    """Refuse a factor of YaRN that SGLang does not read; for latent attention it computes the factor as DeepSeek."""
    scaling = config.rope_scaling or {}
    if config.latent is None and scaling.get("rope_type") == "yarn" and scaling.get("attention_factor") is not None:
        factor = attention_factor(config)
        default = attention_factor(replace(config, rope_scaling={**scaling, "attention_factor": None}))
        if not math.isclose(factor, default, rel_tol=1e-6):
            raise ModelError(
                f"rollout engine 'sglang' reads no attention_factor={factor:g} of YaRN in {config.architecture}, and "
                f"computes {default:g} from the scaling factor; set rollout.name=embedded, or remove attention_factor",
                code="sglang.yarn-factor",
            )


def _check_linear(config: ModelConfig, options: EngineOptions) -> None:
    """Refuse models with gated delta nets in a form that SGLang does not have."""
    tp, linear = options.tensor_parallel_size, config.linear
    assert linear is not None
    if linear.key_heads % tp:
        raise ModelError(
            f"rollout engine 'sglang' over {tp} ranks needs linear_num_key_heads to be a multiple of {tp}, "
            f"{config.architecture} has {linear.key_heads}",
            code="layout.rollout-heads",
        )
    if linear.grouped and (config.experts is None or not all(config.experts.layers)):
        raise ModelError(
            f"rollout engine 'sglang' does not run {config.architecture} with dense layers: SGLang has experts in "
            "every layer of this architecture; set rollout.name=embedded",
            code="sglang.dense-layers",
        )


def _check_sinks(config: ModelConfig) -> None:
    """Refuse gpt-oss where SGLang would hold quantized weights."""
    if config.quantized:
        raise ModelError(
            f"rollout engine 'sglang' would hold the experts of {config.architecture} in {config.quantized}, and a "
            "weight sync sends plain weights; convert the model folder: megarl convert hf-to-megatron FOLDER ROLE, "
            "then megarl convert megatron-to-hf ROLE NEW_FOLDER",
            code="sglang.quantized-experts",
        )


def _check_cpu_kernels(config: ModelConfig) -> None:
    """Refuse models for which SGLang has kernels of GPUs only."""
    needs_gpu = {
        "gated delta nets": config.linear is not None,
        "attention sinks": config.sinks,
    }
    for part, exists in needs_gpu.items():
        if exists:
            raise ModelError(
                f"rollout engine 'sglang' does not run {config.architecture} on a CPU: its {part} need a GPU; set "
                "rollout.name=embedded",
                code="sglang.model-needs-gpu",
            )


def check_cpu_sizes(config: ModelConfig, tp: int) -> None:
    """Refuse models that SGLang would pad on a CPU: it needs whole heads and multiples of 32 on every rank."""
    sizes = {
        "num_attention_heads": (config.num_attention_heads, tp),
        "num_key_value_heads": (config.num_key_value_heads, tp),
        "intermediate_size": (config.ffn_hidden_size, CPU_MULTIPLE * tp),
    }
    if config.experts is not None:
        sizes["moe_intermediate_size"] = (config.experts.ffn_hidden_size, CPU_MULTIPLE * tp)
        sizes["width of shared experts"] = (config.experts.shared_ffn_hidden_size, CPU_MULTIPLE * tp)
    if config.vision is not None and config.vision.trained:
        tower = engine_sizes(config.vision)
        sizes["vision_config.num_heads"] = (tower["vision_config.num_heads"], tp)
        sizes["vision_config.intermediate_size"] = (tower["vision_config.intermediate_size"], CPU_MULTIPLE * tp)
    for name, (size, multiple) in sizes.items():
        if size % multiple:
            raise ModelError(
                f"rollout engine 'sglang' on a CPU over {tp} ranks needs {name} to be a multiple of {multiple}, "
                f"{config.architecture} has {size}: SGLang would hold padded weights there",
                code="sglang.cpu-padding",
            )


def check_quantization(config: ModelConfig, options: EngineOptions) -> None:
    """Refuse models and devices whose weights SGLang would not hold in blockwise FP8, or in another form."""
    setting = f"{QUANTIZATION_KEY}={FP8} with rollout.name=sglang"
    if options.device == "cpu":
        raise ModelError(
            f"{setting}: on a CPU SGLang repacks FP8 weights, which a weight sync cannot write; set "
            "rollout.name=embedded, or quantization=null",
            code="sglang.fp8-cpu",
        )
    if options.dtype != "bfloat16":
        raise ModelError(
            f"{setting} and rollout.dtype={options.dtype}: SGLang's FP8 layers compute in bfloat16; set dtype=bfloat16",
            code="sglang.fp8-dtype",
        )
    unsupported = {
        "gated delta nets": config.linear is not None,
        "experts with biases": config.sinks,
        "vision tower": config.vision is not None,
    }
    special = next((part for part, exists in unsupported.items() if exists), None)
    if special is not None:
        raise ModelError(
            f"{setting} is not supported for the {special} of {config.architecture}; set quantization=null",
            code="sglang.fp8-model",
        )
    if config.latent is not None and config.latent.q_lora_rank % FP8_BLOCK:
        raise ModelError(
            f"{setting}: q_lora_rank={config.latent.q_lora_rank} of {config.architecture} is no multiple of "
            f"{FP8_BLOCK}, and SGLang fuses both latents in one matrix; set quantization=null",
            code="sglang.fp8-latent",
        )
    check_blocks(config, options.tensor_parallel_size)
