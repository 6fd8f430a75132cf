"""Gated activations against plain formulas and transformers: values and gradients."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from megarl.megatron.layers.activations import ClampedSwiGLU, GeGLU, SwiGLU
from megarl.models.model_config import ClampedGate

CONFIG: Any = None
"""The activations read nothing of Megatron's configuration."""


def assert_same(ours, theirs, inputs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    seed = torch.linspace(-1, 1, ours.numel()).view(ours.shape)
    mine, expected = (torch.autograd.grad(outputs, inputs, seed) for outputs in (ours, theirs))
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


def test_swiglu():
    inputs = torch.randn(5, 1, 12, requires_grad=True)
    gate, up = inputs[..., :6], inputs[..., 6:]
    assert_same(SwiGLU(CONFIG)(inputs), gate * torch.sigmoid(gate) * up, inputs)


def test_geglu():
    inputs = torch.randn(5, 1, 12, requires_grad=True)
    gate, up = inputs[..., :6], inputs[..., 6:]
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    assert_same(GeGLU(CONFIG)(inputs), 0.5 * gate * (1 + inner.tanh()) * up, inputs)


@pytest.mark.parametrize("limit", [0.5, 7.0])
def test_clamped_swiglu_equals_transformers(limit):
    inputs = torch.randn(40, 12, requires_grad=True)
    theirs: Any = SimpleNamespace(alpha=1.702, limit=limit)
    expected = GptOssExperts._apply_gate(theirs, inputs)
    assert_same(ClampedSwiGLU(CONFIG, clamped=ClampedGate(1.702, limit))(inputs), expected, inputs)
