import torch

from megarl.rollout import tensor_digest


def test_digest_tells_values_shape_and_dtype_apart():
    tensor = torch.arange(6, dtype=torch.float32)
    changed = tensor.clone()
    changed[3] = torch.nextafter(changed[3], torch.tensor(9.0))
    others = [changed, tensor.view(2, 3), tensor.double(), tensor.bfloat16(), tensor.int(), torch.tensor(0.0)]
    digests = {tensor_digest(t) for t in [tensor, *others]}
    assert len(digests) == 7


def test_digest_ignores_strides():
    tensor = torch.randn(4, 5)
    assert tensor_digest(tensor.t()) == tensor_digest(tensor.t().contiguous()) != tensor_digest(tensor)
