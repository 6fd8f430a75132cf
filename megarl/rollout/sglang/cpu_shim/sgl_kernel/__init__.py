"""Substitute for SGLang's compiled kernels: it can be imported and has one kernel.

SGLang checks for operators, finds only the hash for its request seeds, and computes everything else with torch. Calling
any other kernel raises an error.
"""

import sys
import types
from typing import Any

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def _missing(name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"SGLang called its compiled kernel '{name}', which is not installed on this machine")

    call.__name__ = name
    return call


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(name)


def _submodule(name: str) -> None:
    module = types.ModuleType(f"{__name__}.{name}")
    module.__getattr__ = __getattr__  # type: ignore[method-assign]
    sys.modules[module.__name__] = module


_submodule("mamba")


def _rotated(word: Tensor, by: int) -> Tensor:
    return (word << by | word >> (32 - by)) & _LOW


def _mixed(state: Tensor | int, word: Tensor) -> Tensor:
    """Run one round of MurmurHash3 (32 bits), in 64-bit numbers below 2**32."""
    word = _rotated(word * 0xCC9E2D51 & _LOW, 15) * 0x1B873593 & _LOW
    return (_rotated(word ^ state, 13) * 5 + 0xE6546B64) & _LOW


def murmur_hash32_cpu(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """Return MurmurHash3 of 16 bytes: a 64-bit seed, a position and a column.

    Args:
        seed: ``[n]``, uint64.
        positions: ``[n]``, position of the token in its sequence.
        columns: ``[m]``, token ids.

    Returns:
        ``[n, m]``, uint32.
    """
    seed, positions, columns = seed.view(torch.int64), positions.long() & _LOW, columns.long() & _LOW
    rows = _mixed(_mixed(_mixed(0, seed & _LOW), seed >> 32 & _LOW), positions)
    state = _mixed(rows[:, None], columns) ^ 16
    state = (state ^ state >> 16) * 0x85EBCA6B & _LOW
    state = (state ^ state >> 13) * 0xC2B2AE35 & _LOW
    return (state ^ state >> 16).to(torch.uint32)


_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
# Another copy of this module may have done it in this process.
if not hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu"):
    _LIBRARY.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    _LIBRARY.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")
    # SGLang's models with images look these up when they are imported, and do not call them.
    for _name in (
        "fused_qk_gemma_rmsnorm_cpu",
        "fused_qk_gemma_rmsnorm_with_gate_cpu",
        "fused_qkvzba_split_reshape_cat_contiguous_cpu",
        "fused_sigmoid_mul_cpu",
    ):
        _LIBRARY.define(f"{_name}() -> Tensor")
