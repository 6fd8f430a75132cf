"""Attention with sinks in flash kernels: gradients with a real kernel of the CPU, and the arguments of the GPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.megatron.layers.packed_sinks import PackedFlashKernel, flash_prefix_attention, flash_sink_attention
from megarl.models.sink_attention import sink_attention


class FlashKernelOfTheCpu(PackedFlashKernel):
    """Torch's flash kernel of a CPU, for one sequence with as many keys as queries."""

    def __init__(self):
        pass

    def forward(self, query, key, value):
        heads = [part.transpose(0, 1)[None] for part in (query, key, value)]
        output, totals = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, True, scale=0.3)
        return output[0].transpose(0, 1), totals[0]

    def backward(self, grad, *saved):
        *parts, totals = saved
        heads = [part.transpose(0, 1)[None] for part in (grad, *parts)]
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads, totals[None], 0.0, True, scale=0.3
        )
        query, key, value = (part[0].transpose(0, 1) for part in grads)
        return query, key, value


def test_a_flash_kernel_without_sinks_gives_exact_gradients_with_them():
    torch.manual_seed(0)
    tensors = [torch.randn(70, 3, 16, requires_grad=True) for _ in range(3)]
    sinks, seed = torch.randn(3, requires_grad=True), torch.randn(70, 3, 16)
    ours = flash_sink_attention(*tensors, sinks, FlashKernelOfTheCpu())
    query, key, value = (part.transpose(0, 1)[None] for part in tensors)
    expected = sink_attention(query, key, value, sinks, 0.3)[0].transpose(0, 1)
    torch.testing.assert_close(ours, expected)
    for mine, theirs in zip(
        *(torch.autograd.grad(out, [*tensors, sinks], seed) for out in (ours, expected)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_torch_accepts_the_arguments_of_its_kernels_on_a_gpu(window):
    """Shapes and dtypes only, which torch computes without a GPU."""
    options: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16, "requires_grad": True}
    query, key, value = (torch.randn(17, heads, 64, **options) for heads in (4, 2, 2))
    sinks, ends = torch.randn(4, **options), torch.zeros(4, device="meta", dtype=torch.int32)
    output = flash_sink_attention(query, key, value, sinks, PackedFlashKernel(ends, ends, (8, 8), 0.3, window))
    assert (output.shape, output.dtype) == (query.shape, torch.bfloat16)
    grads = torch.autograd.grad(output.sum(), (query, key, value, sinks))
    assert [grad.shape for grad in grads] == [tensor.shape for tensor in (query, key, value, sinks)]
    query = torch.randn(3, 4, 5, 64, **options)
    key, value = (torch.randn(3, 2, 9, 64, **options) for _ in range(2))
    assert flash_prefix_attention(query, key, value, sinks, 0.3, window).shape == query.shape
