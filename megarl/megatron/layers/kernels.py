"""Kernels: Transformer Engine's, Apex's or torch's, as installed; and attention in torch's.

On a GPU in half precision torch's flash kernels compute attention over packed sequences. They have no sinks, but return
the logarithm ``L`` of each query's denominator. A sink ``s`` changes it to ``log(exp(L) + exp(s))``, and the output by
the ratio of both denominators. The kernels' backward computes each share of the softmax from this logarithm and needs
only the output besides: with both changed, gradients of queries, keys and values are exact. The sink's share has no
value, so its gradient is minus this share of the products of outputs and their gradients.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.base.compilers import fusion_error
from megarl.megatron.runtime.versions import has_transformer_engine
from megarl.models import ModelConfig
from megarl.models.functional import causal_attention

logger = logging.getLogger(__name__)


def uses_transformer_engine(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether Transformer Engine computes the layers: it needs CUDA, and half precision to pack sequences."""
    return device.type == "cuda" and dtype is torch.bfloat16 and has_transformer_engine()


def kernels(model: ModelConfig, device: torch.device, dtype: torch.dtype, *, trains: bool) -> dict[str, str]:
    """Name the kernels of each part of a model in this number format on this device, such as ``attention: torch's``.

    A model with sliding-window attention or sinks has torch's attention among Transformer Engine's other layers.
    """
    fused = uses_transformer_engine(device, dtype)
    value_dim = model.head_dim if model.latent is None else model.latent.v_dim
    packed = device.type == "cuda" and _packs(dtype, model.head_dim, value_dim)
    attention = "torch's varlen_attn" if packed else "torch's, length by length"
    if model.sinks:
        attention = f"torch's with sinks, {'in its flash kernels' if packed else 'in chunks'}"
    elif fused and model.window is None:
        attention = "Transformer Engine's"
    used = {"layers": "Transformer Engine" if fused else "torch", "attention": attention}
    if model.linear is not None:
        delta_nets = "flash-linear-attention's" if delta_rule_kernel(device, dtype) else "torch's, in chunks"
        convolution = " (convolution: causal-conv1d's)" if convolution_kernel(device) else ""
        used["gated delta nets"] = delta_nets + convolution
    if model.experts is not None:
        used["experts"] = "Transformer Engine's (grouped)" if fused else "one after the other"
    return used | ({"Adam": adam_kernel(megatron_optimizer.Adam)} if trains else {})


def delta_rule_kernel(device: torch.device, dtype: torch.dtype) -> Callable[..., Any] | None:
    """Select the kernel of the delta rule: flash-linear-attention's on a GPU in half precision; None = torch's."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    return installed_kernel("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")


def convolution_kernel(device: torch.device) -> Callable[..., Any] | None:
    """Select the kernel of causal convolutions: that of causal-conv1d on a GPU; None = torch's."""
    return installed_kernel("causal_conv1d", "causal_conv1d_fn") if device.type == "cuda" else None


@functools.cache
def installed_kernel(module: str, function: str) -> Callable[..., Any] | None:
    """Return a function of an optional package; None without the package."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return None
    kernel: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return kernel


def adam_kernel(adam: type) -> str:
    """Name the package of Megatron's Adam: Transformer Engine's, else Apex's, else torch's."""
    owners = {"transformer_engine": "Transformer Engine's (fused)", "apex": "Apex's (fused)"}
    return owners.get(adam.__module__.partition(".")[0], "torch's")


@functools.cache
def packed_attention() -> Callable[..., Any] | None:
    """Return torch's packed attention with grouped queries; None if the installed torch has none.

    Its first call imports torch's compiler, for seconds; imported here, they belong to the start and not to a pass.
    """
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return None
    importlib.import_module("torch._dynamo")
    return with_grouped_queries(importlib.import_module("torch.nn.attention.varlen").varlen_attn)


def with_grouped_queries(varlen_attn: Callable[..., Any]) -> Callable[..., Any] | None:
    """Wrap torch's ``varlen_attn`` so that it accepts fewer key-value heads than queries.

    Torch 2.11 groups queries without being asked; later releases compare the head counts unless ``enable_gqa`` is set.

    Returns:
        None if the function has no ``scale`` or ``window_size`` (torch 2.10).
    """
    parameters = inspect.signature(varlen_attn).parameters
    if not {"scale", "window_size"} <= parameters.keys():
        return None
    return functools.partial(varlen_attn, enable_gqa=True) if "enable_gqa" in parameters else varlen_attn


def fits_packed_attention(query: Tensor, value: Tensor) -> bool:
    """Return whether :func:`packed_attention` supports these heads; it needs half precision and one head width."""
    return query.is_cuda and _packs(query.dtype, query.shape[-1], value.shape[-1])


def _packs(dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    if dtype not in (torch.bfloat16, torch.float16) or key_dim != value_dim or key_dim > 256 or key_dim % 8:
        return False
    return packed_attention() is not None


def check_fusions(config: TransformerConfig, device: torch.device) -> None:
    """Test whether torch can compile Megatron's fused functions; otherwise all ranks run their operations one by one.

    Communicates if the configuration has such functions on a GPU.
    """
    compiles = config.bias_activation_fusion or config.bias_dropout_fusion or config.attention_output_gate
    if device.type != "cuda" or not compiles:
        return
    errors = [""] * dist.get_world_size()
    dist.all_gather_object(errors, fusion_error(device.type))
    failed = [rank for rank, error in enumerate(errors) if error]
    if failed:
        importlib.import_module("torch._dynamo").config.disable = True
        if dist.get_rank() == 0:
            reason = f"rank {failed[0]}: {errors[failed[0]]}"
            logger.warning("torch cannot compile, so fused operations run one by one (`megarl doctor`); %s", reason)


def window_attention(query: Tensor, key: Tensor, value: Tensor, window: int, scale: float | None = None) -> Tensor:
    """Compute sliding-window attention of the last tokens of sequences, in chunks of the window's size.

    Every chunk of queries needs only the keys from one window before it: time and memory grow with the number of
    tokens, not with its square.

    The arguments are those of :func:`causal_attention`; ``window`` counts the token itself.
    """
    count, seen = query.shape[2], key.shape[2]
    outputs = []
    for start in range(0, count, window):
        stop = min(start + window, count)
        position = seen - count + start  # of the chunk's first query
        first, last = max(0, position - window + 1), seen - count + stop
        visible = torch.ones(stop - start, last - first, dtype=torch.bool, device=query.device)
        mask = visible.tril(position - first).triu(position - first - window + 1)
        keys, values = key[:, :, first:last], value[:, :, first:last]
        outputs.append(causal_attention(query[:, :, start:stop], keys, values, mask=mask, scale=scale))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


class PackedFlashKernel:
    """Torch's flash kernel for sequences laid end to end, causal for the last tokens of each.

    Args:
        query_ends: ``[sequences + 1]`` int32, cumulative numbers of queries, from 0.
        key_ends: the same of keys.
        longest: most queries, and most keys, per sequence.
        window: tokens that a token attends to, itself included; None = all earlier ones.
    """

    def __init__(
        self, query_ends: Tensor, key_ends: Tensor, longest: tuple[int, int], scale: float, window: int | None
    ) -> None:
        self._sequences = (query_ends, key_ends, *longest)
        self._is_causal = window is None
        earlier, later = (-1, -1) if window is None else (window - 1, 0)  # -1 = no limit
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
    """Compute :func:`megarl.models.functional.sink_attention`, with its arguments, in torch's flash kernel."""
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
