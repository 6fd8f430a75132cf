"""Megatron's parallel linear layers on a CPU: its communication, :mod:`megarl.models.cpu_linear`'s products."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megarl.models.cpu_linear import is_fast, linear


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
        if not is_fast(input) or gradient_accumulation_fusion:
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
        return linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        to_inputs, to_weight, _ = ctx.needs_input_grad
        return (
            linear(grad, weight.t()).view_as(inputs) if to_inputs else None,
            grad.t() @ inputs.flatten(0, -2) if to_weight else None,
            grad.sum(0) if ctx.has_bias else None,
        )
