"""Attention with sinks equals transformers', with gradients, in chunks of any size, with and without a window."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from megarl.models import sink_attention as module
from megarl.models.sink_attention import masked_sink_attention, sink_attention

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
    monkeypatch.setattr(module, "_CHUNK_BYTES", chunk_bytes)
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
