"""Megatron's parallel linear layers on a CPU: its communication, oneDNN's products where torch brings them.

Torch takes another library for single precision. On the processors measured oneDNN's products take a tenth to a sixth
less time, and a small model spends most of its time in them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor


@functools.cache
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _is_fast(inputs: Tensor) -> bool:
    return inputs.device.type == "cpu" and inputs.dtype is torch.float32 and inputs.numel() > 0 and _has_onednn()


def parallel_linear(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Stands in for the function, trainable or frozen, by which Megatron's parallel layers multiply."""

    @functools.wraps(original)  # with the attributes by which it remembers its warnings
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: Any = None,
        **rest: Any,
    ) -> Tensor:
        """``input @ weight.T + bias``; under sequence parallelism of the input gathered over the ranks."""
        if not _is_fast(input) or gradient_accumulation_fusion:
            flags = (gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel)
            return original(input, weight, bias, *flags, tp_group=tp_group, **rest)
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        result: Tensor = _Linear.apply(input, weight, bias)
        return result

    return forward


class _Linear(torch.autograd.Function):
    """The gradient of the weight is torch's own product: oneDNN would copy both transposed operands."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.has_bias = bias is not None
        return _product(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        to_inputs, to_weight, _ = ctx.needs_input_grad
        return (
            _product(grad, weight.t()).view_as(inputs) if to_inputs else None,
            grad.t() @ inputs.flatten(0, -2) if to_weight else None,
            grad.sum(0) if ctx.has_bias else None,
        )


def _product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``inputs @ weight.T + bias``."""
    if not _is_fast(inputs):
        return F.linear(inputs, weight, bias)
    result: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return result
