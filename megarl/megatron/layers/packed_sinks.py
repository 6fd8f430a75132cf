"""Attention with sinks over packed sequences in torch's flash kernels, on a GPU in half precision.

These kernels have no sinks, but return the logarithm ``L`` of each query's denominator. A sink ``s`` changes it to
``log(exp(L) + exp(s))``, and the output by the ratio of both denominators. The kernels' backward computes each share of
the softmax from this logarithm, and needs nothing else of the forward than the output: with both changed, gradients of
queries, keys and values are exact. The sink's share has no value, so its gradient is minus this share of the products
of outputs and their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NO_WINDOW = -1
"""The kernels' size of a window without limit."""


class PackedFlashKernel:
    """Torch's flash kernel for sequences laid end to end, causal for the last tokens of each.

    Args:
        query_ends: ``[sequences + 1]`` int32, cumulative numbers of queries, from 0.
        key_ends: the same of keys.
        longest: largest numbers of queries and of keys of a sequence.
        window: tokens that a token attends to, itself included; None = all earlier ones.
    """

    def __init__(
        self, query_ends: Tensor, key_ends: Tensor, longest: tuple[int, int], scale: float, window: int | None
    ) -> None:
        self._sequences = (query_ends, key_ends, *longest)
        self._is_causal = window is None
        earlier, later = (NO_WINDOW, NO_WINDOW) if window is None else (window - 1, 0)
        self._options = {"scale": scale, "window_size_left": earlier, "window_size_right": later}
        self._random: tuple[Tensor, Tensor] | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the attention, and the logarithms of the denominators, ``[heads, tokens]`` float32."""
        output, totals, *state, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, *self._sequences, 0.0, self._is_causal, False, **self._options
        )
        self._random = (state[0], state[1])  # of dropout, which is off
        return output, totals

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, totals: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of query, key and value; ``totals`` are the logarithms of the denominators."""
        assert self._random is not None, "the forward precedes the backward"
        saved = (query, key, value, output, totals)
        result: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            grad, *saved, *self._sequences, 0.0, self._is_causal, *self._random, **self._options
        )
        return result


def flash_sink_attention(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, kernel: PackedFlashKernel) -> Tensor:
    """Compute attention with sinks in a flash kernel; differentiable.

    Args:
        query: ``[queries, heads, head_dim]``.
        key: ``[keys, key-value heads, head_dim]``.
        value: like ``key``.
        sinks: ``[heads]``, logits.
    """
    result: Tensor = _FlashSinkAttention.apply(query, key, value, sinks, kernel)
    return result


def flash_prefix_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scale: float, window: int | None
) -> Tensor:
    """Compute :func:`megarl.models.sink_attention.sink_attention`, with its arguments, in torch's flash kernel."""
    (count, _, rows, _), seen = query.shape, key.shape[2]
    query_ends, key_ends = (
        torch.arange(0, (count + 1) * length, length, dtype=torch.int32, device=query.device) for length in (rows, seen)
    )
    kernel = PackedFlashKernel(query_ends, key_ends, (rows, seen), scale, window)
    queries, keys, values = (heads.transpose(1, 2).flatten(0, 1) for heads in (query, key, value))
    attended = flash_sink_attention(queries, keys, values, sinks, kernel)
    return attended.view(count, rows, *attended.shape[1:]).transpose(1, 2)


class _FlashSinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, kernel: PackedFlashKernel
    ) -> Tensor:
        plain, logarithms = kernel.forward(query, key, value)
        totals = torch.logaddexp(logarithms, sinks.float()[:, None])
        output = plain * torch.exp(logarithms - totals).t()[..., None].to(plain.dtype)
        ctx.save_for_backward(query, key, value, sinks, output, totals)
        ctx.kernel = kernel
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        query, key, value, sinks, output, totals = ctx.saved_tensors
        grad = grads[0].contiguous()
        products = (grad.float() * output.float()).sum(-1).t()
        grad_sinks = -(torch.exp(sinks.float()[:, None] - totals) * products).sum(1)
        grad_heads = ctx.kernel.backward(grad, query, key, value, output, totals)
        return (*grad_heads, grad_sinks.to(sinks.dtype), None)
