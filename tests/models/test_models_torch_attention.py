"""Selection of torch's attention kernels, and grouped queries without a kernel for them."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from megarl.models import torch_attention
from megarl.models.torch_attention import dot_product_attention, lacks_grouped_kernel


def test_gpu_has_no_kernel_with_grouped_queries_in_single_precision_or_with_a_mask():
    mask = torch.zeros(2, 2)
    cases = [
        (True, torch.float32, 64, 64, None, True),
        (True, torch.bfloat16, 64, 64, mask, True),
        (True, torch.bfloat16, 64, 64, None, False),
        (True, torch.bfloat16, 64, 64, causal_lower_right(1, 2), False),
        (True, torch.bfloat16, 576, 512, None, True),  # latent attention
        (True, torch.bfloat16, 320, 320, None, True),
        (False, torch.float32, 64, 64, mask, False),
    ]
    for is_cuda, dtype, key_dim, value_dim, bias, lacks in cases:
        query, value = mock.Mock(is_cuda=is_cuda, dtype=dtype, shape=(key_dim,)), mock.Mock(shape=(value_dim,))
        assert lacks_grouped_kernel(query, value, bias) is lacks


@pytest.mark.parametrize("masked", [False, True])
def test_repeated_key_value_heads_equal_grouped_queries(monkeypatch, masked):
    query = torch.randn(2, 4, 5, 8, requires_grad=True)
    key, value = (torch.randn(2, 2, 5, 8, requires_grad=True) for _ in range(2))
    seed = torch.randn(2, 4, 5, 8)
    mask = torch.ones(5, 5, dtype=torch.bool).tril(-1).logical_or(torch.eye(5).flip(0).bool()) if masked else None

    def attend():
        return dot_product_attention(query, key, value, mask=mask, is_causal=not masked, scale=0.3)

    grouped = attend()
    expected = torch.autograd.grad(grouped, (query, key, value), seed)
    plain = mock.Mock(side_effect=F.scaled_dot_product_attention)
    monkeypatch.setattr(torch_attention, "lacks_grouped_kernel", lambda query, value, mask: True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", plain)
    repeated = attend()
    assert [heads.shape[1] for heads in plain.call_args.args] == [4, 4, 4]
    torch.testing.assert_close(repeated, grouped)
    torch.testing.assert_close(torch.autograd.grad(repeated, (query, key, value), seed), expected)


def test_gpu_takes_no_kernel_of_cudnn(monkeypatch):
    """The choice is process-wide while the attention is chosen, and as before afterwards."""
    allowed: list[tuple[bool, bool, bool]] = []

    def choose(*_, **__):
        flags = torch.backends.cuda
        allowed.append((flags.cudnn_sdp_enabled(), flags.flash_sdp_enabled(), flags.mem_efficient_sdp_enabled()))

    monkeypatch.setattr(F, "scaled_dot_product_attention", choose)
    query = mock.Mock(is_cuda=True, dtype=torch.bfloat16, shape=(1, 2, 3, 8))
    before = torch.backends.cuda.cudnn_sdp_enabled()
    dot_product_attention(query, query, query, mask=None, is_causal=True, scale=None)
    assert allowed == [(False, True, True)]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
