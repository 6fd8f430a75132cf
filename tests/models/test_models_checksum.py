import hashlib

import pytest
import torch

from megarl.models.checksum import tensor_checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8])
def test_any_dtype_and_stride(dtype):
    tensor = torch.arange(24).to(dtype).reshape(4, 6)
    assert tensor_checksum(tensor[1:, 2:4]) == tensor_checksum(tensor[1:, 2:4].clone())
    assert tensor_checksum(tensor) != tensor_checksum(tensor.reshape(6, 4))
    assert tensor_checksum(tensor[0, 0]) == tensor_checksum(tensor[0, 0].clone())


def test_it_is_blake2b_of_the_bytes():
    digest = hashlib.blake2b(b"torch.int16(2,)" + b"\x01\x00\x02\x00", digest_size=16).hexdigest()
    assert tensor_checksum(torch.tensor([1, 2], dtype=torch.int16)) == digest


def test_bits_count_not_values():
    nan = torch.tensor([float("nan")])
    assert tensor_checksum(nan) == tensor_checksum(nan.clone())
    assert tensor_checksum(torch.tensor([0.0])) != tensor_checksum(torch.tensor([-0.0]))
    assert tensor_checksum(torch.zeros(2)) != tensor_checksum(torch.zeros(4, dtype=torch.float16))
