import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms import clipped_value_loss


@settings(max_examples=60)
@given(st.integers(1, 12), st.integers(0, 2**31), st.sampled_from([0.1, 0.5, 2.0]))
def test_loss_gradient_and_clip_fraction_equal_the_loop(size, seed, cliprange):
    generator = np.random.default_rng(seed)
    new, old, returns = (generator.normal(size=size) for _ in range(3))
    vpreds = torch.tensor(new, requires_grad=True)
    result = clipped_value_loss(vpreds, torch.tensor(old), torch.tensor(returns), cliprange)
    result.loss.sum().backward()
    for i in range(size):
        near = min(max(new[i], old[i] - cliprange), old[i] + cliprange)
        free, held = (new[i] - returns[i]) ** 2, (near - returns[i]) ** 2
        np.testing.assert_allclose(result.loss[i].item(), 0.5 * max(free, held))
        np.testing.assert_allclose(vpreds.grad[i], 0.0 if held > free else new[i] - returns[i], atol=1e-12)
        assert result.diagnostics["vf_clipfrac"][i].item() == float(held > free)
    assert torch.equal(result.diagnostics["vpred_mean"], vpreds.detach())


def test_rectangle_and_packed_tokens_give_the_same_numbers():
    generator = torch.Generator().manual_seed(1)
    columns = [torch.randn(2, 4, generator=generator) for _ in range(3)]
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1]]).bool()
    rectangle = clipped_value_loss(*columns, 0.2)
    packed = clipped_value_loss(*(column[mask] for column in columns), 0.2)
    assert torch.equal(rectangle.loss[mask], packed.loss)
