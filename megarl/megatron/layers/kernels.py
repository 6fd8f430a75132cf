"""Detection of installed kernels: Transformer Engine's, Apex's or torch's."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import __version__ as megatron_version
from megatron.core import optimizer as megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.base.compilers import fusion_error
from megarl.megatron.runtime.transformer_engine import has_transformer_engine
from megarl.models import ModelConfig
from megarl.models.torch_attention import dot_product_attention

logger = logging.getLogger(__name__)


class Kernels(NamedTuple):
    """Kernels of an engine.

    Attributes:
        experts: of a mixture of experts; empty for a dense model.
        adam: of the optimizer; empty for inference.
        delta_nets: of gated delta nets; empty for a model without them.
    """

    layers: str
    attention: str
    experts: str
    adam: str
    delta_nets: str = ""

    def describe(self) -> str:
        """Describe the kernels in one line, such as ``layers: torch, attention: torch's, Megatron-Core 0.16.1``."""
        named = {
            "layers": self.layers,
            "attention": self.attention,
            "gated delta nets": self.delta_nets,
            "experts": self.experts,
            "Adam": self.adam,
        }
        parts = [f"{name}: {kernel}" for name, kernel in named.items() if kernel]
        return ", ".join([*parts, f"Megatron-Core {megatron_version}"])


def uses_transformer_engine(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether Transformer Engine computes the layers: it needs CUDA, and half precision to pack sequences."""
    return device.type == "cuda" and dtype is torch.bfloat16 and has_transformer_engine()


def kernels(model: ModelConfig, device: torch.device, dtype: torch.dtype, *, trains: bool) -> Kernels:
    """Select the kernels for a model in this number format on this device.

    A model with sliding-window attention or sinks has torch's attention among Transformer Engine's other layers.
    """
    has_experts = model.experts is not None
    adam = adam_kernel(megatron_optimizer.Adam) if trains else ""
    value_dim = model.head_dim if model.latent is None else model.latent.v_dim
    packed = device.type == "cuda" and _packs(dtype, model.head_dim, value_dim)
    attention = "torch's varlen_attn" if packed else "torch's, length by length"
    if model.sinks:
        attention = f"torch's with sinks, {'in its flash kernels' if packed else 'in chunks'}"
    delta_nets = ""
    if model.linear is not None:
        delta_nets = "flash-linear-attention's" if delta_rule_kernel(device, dtype) else "torch's, in chunks"
        delta_nets += " (convolution: causal-conv1d's)" if convolution_kernel(device) else ""
    if uses_transformer_engine(device, dtype):
        grouped = "Transformer Engine's (grouped)" if has_experts else ""
        attention = attention if model.window is not None or model.sinks else "Transformer Engine's"
        return Kernels("Transformer Engine", attention, grouped, adam, delta_nets)
    return Kernels("torch", attention, "one after the other" if has_experts else "", adam, delta_nets)


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
    """Return the package of Megatron's Adam: Transformer Engine's, else Apex's, else torch's."""
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


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Compute torch's scaled dot-product attention with grouped queries.

    Args:
        query: ``[sequences, heads, tokens, head_dim]``.
        key: ``[sequences, key-value heads, earlier tokens, head_dim]``.
        value: like ``key``; its last dimension may differ.
        mask: of the scores; None = causal for as many queries as keys, else every query attends to every key.
        scale: of the scores; None = ``head_dim ** -0.5``.

    Returns:
        ``[sequences, heads, tokens, value's last dimension]``.
    """
    is_causal = mask is None and query.shape[2] == key.shape[2]
    return dot_product_attention(query, key, value, mask=mask, is_causal=is_causal, scale=scale)


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
