"""Options of the engine, and their translation, with a model's shape and a layout, into ``TransformerConfig``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.base.errors import ConfigError
from megarl.megatron.engine.optimizer import OptimizerOptions
from megarl.megatron.layers.moe import expert_settings
from megarl.megatron.runtime.versions import patch_megatron_gaps, supported_arguments
from megarl.models import ModelConfig, ParallelLayout
from megarl.models.adapters import LoraOptions
from megarl.models.rope import softmax_scale

logger = logging.getLogger(__name__)

FUSED_ONLY = frozenset(
    {
        "apply_rope_fusion",
        "attention_backend",
        "bias_activation_fusion",
        "gradient_accumulation_fusion",
        "moe_permute_fusion",
    }
)
"""User-settable fields that select kernels of Transformer Engine."""


@dataclass(frozen=True)
class RecomputeOptions:
    """Activation recomputation in the backward pass, in Megatron's terms.

    Whole layers (``full``), in groups (``uniform``) or the first of each chunk (``block``); or ``selective``, modules.
    """

    granularity: str = "full"
    method: str = "uniform"
    num_layers: int = 1
    modules: tuple[str, ...] = ("core_attn",)


@dataclass(frozen=True)
class OverlapOptions:
    """Overlap of data-parallel communication with computation; ``bucket_size`` None is Megatron's default."""

    grad_reduce: bool = False
    param_gather: bool = False
    bucket_size: int | None = None


@dataclass(frozen=True)
class MegatronOptions:
    """Options of an engine.

    Attributes:
        dtype: of weights and activations; with bfloat16 weights and gradients are also kept in float32.
        sequence_parallel: split activations over tensor-parallel ranks by sequence too.
        value_head: a scalar head (a critic) in place of the output layer.
        optimizer: None for inference.
        recompute: None = keep every activation.
        overlap: communication overlap; no effect without optimizer.
        offload: parts that leave the device between phases (see :data:`megarl.megatron.engine.offload.PARTS`).
        lora: low-rank adapters on a frozen model; None = train all weights.
        transformer: further fields of Megatron's ``TransformerConfig``, which override megarl's choice.
        repeat_out_of_memory: all ranks vote after each pass, so that a pass that runs out of memory can be repeated.
    """

    dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    value_head: bool = False
    optimizer: OptimizerOptions | None = None
    recompute: RecomputeOptions | None = None
    overlap: OverlapOptions = OverlapOptions()
    offload: tuple[str, ...] = ()
    lora: LoraOptions | None = None
    transformer: Mapping[str, Any] = field(default_factory=dict)
    repeat_out_of_memory: bool = False


def build_transformer_config(
    model: ModelConfig, layout: ParallelLayout, options: MegatronOptions, *, fused: bool
) -> TransformerConfig:
    """Build Megatron's configuration of a decoder.

    Args:
        layout: the role's layout; it must fit the model (:func:`megarl.models.check_layout`).

    Raises:
        TypeError: ``options.transformer`` names a field that the installed Megatron-Core does not have.
        ConfigError: the recomputed modules need Transformer Engine's experts, which this role does not use.
    """
    patch_megatron_gaps()
    grouped = fused and options.lora is None
    if options.recompute is not None and "moe_act" in options.recompute.modules and not grouped:
        raise ConfigError(
            f"recompute_modules={list(options.recompute.modules)}: moe_act needs the grouped experts of Transformer "
            "Engine, which needs a GPU, bfloat16 and no LoRA (`megarl doctor` tells whether it is installed); use moe",
            code="config.recompute-moe-act",
        )
    arguments = {
        **_shape(model),
        **_division(model.num_layers, layout, options.sequence_parallel),
        **_execution(options.dtype, fused),
        **_activation(model, fused),
        **_recomputation(options.recompute),
        **expert_settings(model, layout, grouped=grouped),
    }
    chosen = _user_fields(options.transformer, fused=fused)
    if chosen.get("overlap_p2p_comm") and not torch.cuda.is_available():
        # Megatron releases an activation while gloo still sends it; NCCL protects the memory of a message.
        chosen["deallocate_pipeline_outputs"] = False
    arguments = {name: value for name, value in arguments.items() if name not in chosen}
    return TransformerConfig(**supported_arguments(TransformerConfig, arguments), **chosen)


def _user_fields(fields: Mapping[str, Any], *, fused: bool) -> dict[str, Any]:
    """User-set fields, with an attention backend's name replaced by its enum member.

    Fields that select kernels of Transformer Engine are dropped for torch's layers, with a warning: the results are the
    same, and one configuration can then serve machines with and without Transformer Engine.
    """
    chosen = {name: AttnBackend[value] if name == "attention_backend" else value for name, value in fields.items()}
    if fused:
        return chosen
    dropped = {name: value for name, value in fields.items() if name in FUSED_ONLY and value not in (False, "auto")}
    if dropped:
        text = ", ".join(f"{name}={value}" for name, value in dropped.items())
        logger.warning("override_transformer_config: %s needs Transformer Engine; this role has torch's layers", text)
    return {name: value for name, value in chosen.items() if name not in FUSED_ONLY}


def _shape(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_key_value_heads,
        "kv_channels": model.head_dim,
        "qk_layernorm": model.qk_norm,
        "attention_output_gate": model.output_gate,
        "add_qkv_bias": model.qkv_bias,
        "add_bias_linear": model.output_bias,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.rms_norm_eps,
        "layernorm_zero_centered_gamma": model.zero_centered_norms,
        "gated_linear_unit": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "softmax_scale": softmax_scale(model),
    }


def _division(num_layers: int, layout: ParallelLayout, sequence_parallel: bool) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "pipeline_model_parallel_layout": _pipeline(layout.chunk_sizes(num_layers)) if layout.pp > 1 else None,
        "context_parallel_size": layout.cp,
        "sequence_parallel": sequence_parallel and layout.tp > 1,
        # Micro-batches differ in their number of tokens; Megatron then requires this dispatcher, even without experts.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        # Two stages send each other gradients and activations, which a batch of messages would mix up.
        "batch_p2p_comm": False,
        "deallocate_pipeline_outputs": True,
    }


def _pipeline(chunks: list[int]) -> list[list[str]]:
    """The layers of each chunk in Megatron's terms, in the order of the pipeline."""
    pipeline = [["decoder"] * size for size in chunks]
    return [["embedding", *pipeline[0]], *pipeline[1:-1], [*pipeline[-1], "loss"]]


def _execution(dtype: torch.dtype, fused: bool) -> dict[str, Any]:
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        # Weights are always loaded, so they are only allocated. Initialization must stay on: it also marks the split
        # parameters, and Megatron would omit the gradients of unmarked ones from the norm.
        "init_method": _leave_unset,
        "output_layer_init_method": _leave_unset,
        "embedding_init_method": _leave_unset,
        # Losses are already normalized by global counts, so gradients are summed and never divided.
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "use_te_activation_func": not fused,  # Megatron's name for an activation from the layer specification
        "bias_dropout_fusion": fused,
        "apply_rope_fusion": fused,
        "cuda_graph_scope": [],
    }


def _recomputation(recompute: RecomputeOptions | None) -> dict[str, Any]:
    if recompute is None:
        return {}
    if recompute.granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules)}
    return {
        "recompute_granularity": "full",
        "recompute_method": recompute.method,
        "recompute_num_layers": recompute.num_layers,
    }


def _activation(model: ModelConfig, fused: bool) -> dict[str, Any]:
    """Activation of MLPs; torch's layers take theirs from the specification, and Megatron accepts only known names.

    A clamped activation comes from the specification with Transformer Engine's layers too: its rows alternate.
    """
    if model.experts is not None and model.experts.clamped is not None:
        # The name of another activation: Megatron 0.19 may replace SwiGLU and its projections by one kernel.
        specified = {"use_te_activation_func": True, "bias_activation_fusion": False, "bias_dropout_fusion": False}
        return {"activation_func": F.gelu, **specified}
    if model.activation == "silu":
        return {"activation_func": F.silu, "bias_activation_fusion": fused}
    return {"activation_func": gelu_tanh if fused else F.gelu, "bias_activation_fusion": False}


def gelu_tanh(gate: Tensor) -> Tensor:
    """Compute GELU with the tanh approximation, elementwise."""
    return F.gelu(gate, approximate="tanh")


def _leave_unset(weight: Tensor) -> Tensor:
    return weight
