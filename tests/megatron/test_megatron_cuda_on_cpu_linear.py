import pytest
import torch
import torch.nn.functional as F

from megarl.megatron.runtime.cuda_on_cpu import parallel_linear


def refused(*_, **__):
    raise AssertionError("Megatron's own function was called")


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_equal_torch(with_bias, frozen):
    torch.manual_seed(0)
    inputs, weight = torch.randn(7, 1, 8, requires_grad=True), torch.randn(6, 8, requires_grad=not frozen)
    bias = torch.randn(6, requires_grad=True) if with_bias else None
    leaves = [leaf for leaf in (inputs, weight, bias) if leaf is not None and leaf.requires_grad]
    output = parallel_linear(refused)(inputs, weight, bias, False, False, False)
    expected = F.linear(inputs, weight, bias)
    torch.testing.assert_close(output, expected)
    slope = torch.randn_like(output)
    ours, theirs = (torch.autograd.grad(result, leaves, slope) for result in (output, expected))
    torch.testing.assert_close(ours, theirs)


def test_inputs_without_kernel_use_megatron():
    inputs, weight = torch.randn(2, 4, dtype=torch.bfloat16), torch.randn(3, 4, dtype=torch.bfloat16)
    seen = []

    def original(*args, **kwargs):
        seen.append((args[3:], kwargs))
        return torch.zeros(2, 3)

    parallel_linear(original)(inputs, weight, None, False, True, False, tp_group=None, wgrad_deferral_limit=0)
    assert seen == [((False, True, False), {"tp_group": None, "wgrad_deferral_limit": 0})]
