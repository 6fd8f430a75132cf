"""Selection of kernels, and the call of torch's attention over packed sequences."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.megatron import kernels, layers
from megarl.megatron.layers import PackedAttention, PackedSequences

RUNS = ((3, 4), (1, 5))
ENDS = torch.tensor([0, 4, 8, 12, 17], dtype=torch.int32)


def test_cpu_uses_torch_kernels() -> None:
    chosen = kernels.kernels(torch.device("cpu"), torch.bfloat16, trains=False)
    assert chosen == ("torch", "torch's, length by length", "")
    assert chosen.describe().startswith("layers: torch, attention: torch's, length by length, Megatron-Core 0.")


@pytest.mark.parametrize(
    ("package", "dtype", "expected"),
    [
        ("transformer_engine", torch.bfloat16, ("Transformer Engine", "Transformer Engine's")),
        ("transformer_engine", torch.float32, ("torch", "torch's, length by length")),
        ("", torch.bfloat16, ("torch", "torch's varlen_attn")),
        ("", torch.float32, ("torch", "torch's, length by length")),
    ],
)
def test_gpu_uses_the_best_installed_kernels(
    monkeypatch: pytest.MonkeyPatch, package: str, dtype: torch.dtype, expected: tuple[str, str]
) -> None:
    find = kernels.importlib.util.find_spec
    # Any module that exists stands for Transformer Engine's.
    monkeypatch.setattr(
        kernels.importlib.util, "find_spec", lambda name: find(name) or (find("torch") if name == package else None)
    )
    assert kernels.kernels(torch.device("cuda"), dtype, trains=False)[:2] == expected


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("transformer_engine.pytorch.optimizers.fused_adam", "Transformer Engine's (fused)"),
        ("apex.optimizers.fused_adam", "Apex's (fused)"),
        ("torch.optim.adamw", "torch's"),
    ],
)
def test_adam_kernel_is_named_by_package(module: str, name: str) -> None:
    assert kernels.adam_kernel(type("FusedAdam", (), {"__module__": module})) == name


def by_sequence(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, *_: Any, scale: float, **__: Any
) -> Tensor:
    """Result of torch's packed kernel, by attention that runs on a CPU."""
    parts = []
    for start, stop in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        q, k, v = (heads[start:stop].transpose(0, 1)[None] for heads in (query, key, value))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        parts.append(attended[0].transpose(0, 1))
    return torch.cat(parts)


def test_packed_kernel_equals_one_call_per_length(monkeypatch: pytest.MonkeyPatch) -> None:
    real = kernels.packed_attention()
    if real is None:
        pytest.skip("this torch has no attention over packed sequences")
    kernel: Callable[..., Any] = mock.create_autospec(real, side_effect=by_sequence)  # refuses other arguments
    query, key, value = (torch.randn(17, heads, 8) for heads in (4, 2, 2))
    turns = torch.randn(17, 1, 4)
    sequences = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=ENDS,
        cu_seqlens_kv=ENDS,
        max_seqlen_q=5,
        max_seqlen_kv=5,
        runs=RUNS,
        rotation=(turns.cos(), turns.sin()),
    )
    attention = PackedAttention(mock.Mock(), softmax_scale=0.3)
    expected = attention(query, key, value, None, packed_seq_params=sequences)
    monkeypatch.setattr(layers, "fits_packed_attention", lambda query, value: True)
    monkeypatch.setattr(layers, "packed_attention", lambda: kernel)
    torch.testing.assert_close(attention(query, key, value, None, packed_seq_params=sequences), expected)
    bound = inspect.signature(real).bind(*kernel.call_args.args, **kernel.call_args.kwargs)
    assert bound.arguments["window_size"] == (-1, 0) and bound.arguments["max_q"] == bound.arguments["max_k"] == 5


def test_heads_without_flash_kernel_use_one_call_per_length() -> None:
    on_gpu = mock.Mock(is_cuda=True, dtype=torch.bfloat16, shape=(17, 4, 64))
    assert kernels.fits_packed_attention(on_gpu, on_gpu) == (kernels.packed_attention() is not None)
    for other in ({"is_cuda": False}, {"dtype": torch.float32}, {"shape": (17, 4, 12)}, {"shape": (17, 4, 264)}):
        wrong = mock.Mock(**{"is_cuda": True, "dtype": torch.bfloat16, "shape": (17, 4, 64), **other})
        assert not kernels.fits_packed_attention(wrong, wrong)
    assert not kernels.fits_packed_attention(on_gpu, mock.Mock(shape=(17, 4, 32)))
