"""Gated activations of MLPs and experts in torch: SwiGLU, GeGLU, and the clamped SwiGLU of gpt-oss."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megarl.models.model_config import ClampedGate

_CACHED_BYTES = 2**19


class _Gating(NamedTuple):
    """An elementwise function, and its derivative times an incoming gradient, written to ``grad_input``."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[..., Tensor]


_SILU = _Gating(F.silu, torch.ops.aten.silu_backward.grad_input)
_GELU_TANH = _Gating(
    partial(F.gelu, approximate="tanh"), partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh")
)


class _Gated(torch.autograd.Function):
    """Writes the gradient of both halves into one tensor, and saves only the input."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, gating: _Gating) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.gating = gating
        gate, up = inputs.chunk(2, dim=-1)
        return gating.value(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (inputs,) = ctx.saved_tensors
        result = torch.empty_like(inputs)
        rows = _rows_at_once(inputs)
        for part, grad, out in zip(inputs.split(rows), grads[0].split(rows), result.split(rows), strict=True):
            gate, up = part.chunk(2, dim=-1)
            grad_gate, grad_up = out.chunk(2, dim=-1)
            torch.mul(ctx.gating.value(gate), grad, out=grad_up)
            ctx.gating.slope(grad * up, gate, grad_input=grad_gate)
        return result, None


class _ClampedSwiGLU(torch.autograd.Function):
    """As :class:`_Gated`, with alternating columns of gates and ups."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.alpha, ctx.limit = alpha, limit
        gate = inputs[..., ::2].clamp(max=limit)
        up = inputs[..., 1::2].clamp(-limit, limit)
        return up.add_(1.0).mul_(gate * (gate * alpha).sigmoid_())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inputs,) = ctx.saved_tensors
        result = torch.empty_like(inputs)
        rows = _rows_at_once(inputs)
        for part, grad, out in zip(inputs.split(rows), grads[0].split(rows), result.split(rows), strict=True):
            raw_gate, raw_up = part[..., ::2], part[..., 1::2]
            gate, up = raw_gate.clamp(max=ctx.limit), raw_up.clamp(-ctx.limit, ctx.limit)
            share = (gate * ctx.alpha).sigmoid_()
            slope = share * (1.0 + ctx.alpha * gate * (1.0 - share))
            out[..., ::2] = (grad * (up + 1.0) * slope).masked_fill_(raw_gate > ctx.limit, 0.0)
            out[..., 1::2] = (grad * gate * share).masked_fill_(raw_up.abs() > ctx.limit, 0.0)
        return result, None, None


def _rows_at_once(inputs: Tensor) -> int:
    """Rows whose intermediate results fit a CPU's cache; on a GPU all rows."""
    if inputs.is_cuda:
        return max(1, len(inputs))
    return max(1, _CACHED_BYTES // (math.prod(inputs.shape[1:]) * inputs.element_size()))


class GatedActivation(nn.Module):
    """A gated activation of ``[..., 2 * n]``; subclasses name the function and its further arguments."""

    function: type[torch.autograd.Function] = _Gated
    arguments: tuple[Any, ...] = ()

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute ``[..., n]`` from ``[..., 2 * n]``."""
        result: Tensor = self.function.apply(inputs, *self.arguments)
        return result


class SwiGLU(GatedActivation):
    """``silu(gate) * up``, the gate in the first half (https://arxiv.org/abs/2002.05202)."""

    arguments = (_SILU,)


class GeGLU(GatedActivation):
    """``gelu(gate) * up`` with the tanh approximation, the gate in the first half (https://arxiv.org/abs/2002.05202)."""

    arguments = (_GELU_TANH,)


class ClampedSwiGLU(GatedActivation):
    """Clamped gated activation with alternating gates and ups."""

    function = _ClampedSwiGLU

    def __init__(self, config: TransformerConfig, *, clamped: ClampedGate) -> None:
        super().__init__(config)
        self.arguments = (clamped.alpha, clamped.limit)
