"""torch's scaled dot-product attention, by kernels that keep no scores in memory and need no preparation per shape."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

GPU_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All but cuDNN's, which torch prefers on Hopper: it prepares a plan for each shape, and batches differ in shape."""


def dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """Compute attention with grouped queries.

    Args:
        query: ``[sequences, heads, tokens, head_dim]``.
        key: ``[sequences, key-value heads, earlier tokens, head_dim]``.
        value: like ``key``; its last dimension may differ.
        mask: of the scores, or one of ``torch.nn.attention.bias``; None without one.
        is_causal: whether a token attends to itself and earlier ones only; not with a mask.
        scale: of the scores; None = ``head_dim ** -0.5``.

    Returns:
        ``[sequences, heads, tokens, value's last dimension]``.
    """
    if query.shape[1] != key.shape[1] and lacks_grouped_kernel(query, value, mask):
        key, value = (heads.repeat_interleave(query.shape[1] // heads.shape[1], dim=1) for heads in (key, value))
    with sdpa_kernel(GPU_KERNELS) if query.is_cuda else nullcontext():
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=True
        )


def lacks_grouped_kernel(query: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether torch computes grouped queries on this GPU only with all scores in memory.

    Flash attention has neither single precision nor masks, and one head width of at most 256; the memory-efficient
    kernel has no grouped queries.
    """
    fits_flash = query.shape[-1] == value.shape[-1] <= 256
    return query.is_cuda and (query.dtype is torch.float32 or type(mask) is Tensor or not fits_flash)
