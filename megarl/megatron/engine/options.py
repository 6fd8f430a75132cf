"""Options of the engine: number format, recomputation, overlap of communication, offload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megarl.megatron.engine.optimizer import OptimizerOptions
from megarl.models.adapters import LoraOptions


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
