"""Products with weight matrices on a CPU, by oneDNN's kernels where torch brings them.

Torch takes another library for single precision. On the processors measured, oneDNN's products take a tenth to a sixth
less time, and a small model spends three quarters of its time in them (``benchmarks/engine.py`` prints both).
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor


@functools.cache
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def is_fast(inputs: Tensor) -> bool:
    """Whether :func:`linear` has a kernel of its own for these inputs."""
    return inputs.device.type == "cpu" and inputs.dtype is torch.float32 and inputs.numel() > 0 and _has_onednn()


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``inputs [..., n] @ weight [m, n].T + bias [m]``; not differentiable where :func:`is_fast`."""
    if is_fast(inputs):
        result: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
        return result
    return F.linear(inputs, weight, bias)


def add_linear(inputs: Tensor, weight: Tensor, addend: Tensor) -> Tensor:
    """``addend [n, m] + inputs [n, k] @ weight [m, k].T``; not differentiable where :func:`is_fast`."""
    if is_fast(inputs):
        result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(inputs, addend, weight, None, "add")
        return result
    return torch.addmm(addend, inputs, weight.t())
