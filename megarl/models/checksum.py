"""Checksums of tensors, by which two processes compare weights without sending them."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_PIECE_BYTES = 2**20


def tensor_checksum(tensor: Tensor) -> str:
    """BLAKE2b (128 bits, hexadecimal) of a tensor's dtype, shape and bytes.

    Equal for equal bits wherever the tensor lies and whatever its strides: a NaN equals itself, 0.0 differs from -0.0.
    """
    digest = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    for part in data.split(_PIECE_BYTES):
        # A copy, because torch lets no one free or resize memory of which there ever was a numpy array.
        digest.update(part.clone().numpy().data)
    return digest.hexdigest()
