"""Attention with sinks equals transformers'; torch's kernels, and grouped queries without a kernel for them."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from megarl.models import functional
from megarl.models.functional import causal_attention, lacks_grouped_kernel, masked_sink_attention, sink_attention

TOKENS, SEEN = 7, 11


def mask_of(window):
    visible = torch.ones(TOKENS, SEEN, dtype=torch.bool).tril(SEEN - TOKENS)
    visible = visible if window is None else visible.triu(SEEN - TOKENS - window + 1)
    return torch.zeros(TOKENS, SEEN, dtype=torch.double).masked_fill(~visible, -torch.inf)


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    sizes = [(2, 4, TOKENS, 8), (2, 2, SEEN, 8), (2, 2, SEEN, 6), (4,)]
    return [torch.randn(size, dtype=torch.double) for size in sizes]


def reference(tensors, window):
    query, key, value, sinks = (tensor.clone().requires_grad_() for tensor in tensors)
    layer = SimpleNamespace(sinks=sinks, num_key_value_groups=2, training=False)
    output = eager_attention_forward(layer, query, key, value, mask_of(window), scaling=0.3)[0].transpose(1, 2)
    seed = torch.linspace(-1, 1, output.numel(), dtype=torch.double).view(output.shape)
    return output, torch.autograd.grad(output, (query, key, value, sinks), seed), seed


@pytest.mark.parametrize("chunk_bytes", [2**26, 2000, 1])
@pytest.mark.parametrize("window", [None, 1, 3, 20])
def test_values_and_gradients_equal_transformers(monkeypatch, tensors, window, chunk_bytes):
    monkeypatch.setattr(functional, "_CHUNK_BYTES", chunk_bytes)
    expected, grads, seed = reference(tensors, window)
    ours = [tensor.float().requires_grad_() for tensor in tensors]
    output = sink_attention(*ours, 0.3, window)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(torch.autograd.grad(output, ours, seed.float()), grads, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=2e-6)


def test_half_precision_keeps_scores_in_float32(tensors):
    expected, grads, seed = reference([tensor.bfloat16().double() for tensor in tensors], 3)
    ours = [tensor.bfloat16().requires_grad_() for tensor in tensors]
    output = sink_attention(*ours, 0.3, 3)
    torch.testing.assert_close(output.double(), expected, rtol=2**-8, atol=2**-9)
    for mine, theirs in zip(torch.autograd.grad(output, ours, seed.bfloat16()), grads, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=2**-6, atol=2**-6)


def test_a_masked_step_equals_transformers(tensors):
    """The heads of a key are its rows; all have the mask of their sequence."""
    query, key, value, sinks = tensors
    value = torch.cat([value, value[..., :2]], -1)
    expected, _, _ = reference([query, key, value, sinks], 3)
    last = query[:, :, -1].unflatten(1, (2, 2))
    ours = masked_sink_attention(last, key, value, sinks.view(2, 2), 0.3, mask_of(3)[-1].float())
    torch.testing.assert_close(ours.flatten(1, 2), expected[:, :, -1], rtol=1e-5, atol=1e-6)


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
        return causal_attention(query, key, value, mask=mask, scale=0.3)

    grouped = attend()
    expected = torch.autograd.grad(grouped, (query, key, value), seed)
    plain = mock.Mock(side_effect=F.scaled_dot_product_attention)
    monkeypatch.setattr(functional, "lacks_grouped_kernel", lambda query, value, mask: True)
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
    causal_attention(query, query, query)
    assert allowed == [(False, True, True)]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
