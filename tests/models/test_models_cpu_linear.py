from __future__ import annotations

import pytest
import torch

from megarl.models.cpu_linear import add_linear, is_fast, linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 8), (3, 1, 8), (0, 8)])
def test_products_are_torchs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs, weight, bias = (torch.randn(*size, dtype=dtype) for size in (shape, (6, 8), (6,)))
    torch.testing.assert_close(linear(inputs, weight), inputs @ weight.t())
    torch.testing.assert_close(linear(inputs, weight, bias), inputs @ weight.t() + bias)
    rows, addend = inputs.flatten(0, -2), torch.randn(inputs.flatten(0, -2).shape[0], 6, dtype=dtype)
    torch.testing.assert_close(add_linear(rows, weight, addend), addend + rows @ weight.t())
    assert not torch.backends.mkldnn.is_available() or is_fast(inputs) == (dtype is torch.float32 and 0 not in shape)


def test_operands_may_have_any_strides() -> None:
    torch.manual_seed(0)
    inputs, weight = torch.randn(8, 5).t(), torch.randn(8, 12)[:, ::2].t()
    torch.testing.assert_close(linear(inputs, weight), inputs @ weight.t())
