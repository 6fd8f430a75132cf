import hashlib
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.expected_errors import raises

from megarl.base.errors import CheckpointError
from megarl.models.verification import Coverage, rectangle_checksum, tensor_checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8])
def test_any_dtype_and_stride(dtype):
    tensor = torch.arange(24).to(dtype).reshape(4, 6)
    assert tensor_checksum(tensor[1:, 2:4]) == tensor_checksum(tensor[1:, 2:4].clone())
    assert tensor_checksum(tensor) != tensor_checksum(tensor.reshape(6, 4))
    assert tensor_checksum(tensor[0, 0]) == tensor_checksum(tensor[0, 0].clone())


def test_tensor_checksum_is_blake2b_of_the_bytes():
    digest = hashlib.blake2b(b"torch.int16(2,)" + b"\x01\x00\x02\x00", digest_size=16).hexdigest()
    assert tensor_checksum(torch.tensor([1, 2], dtype=torch.int16)) == digest


def test_bits_count_not_values():
    nan = torch.tensor([float("nan")])
    assert tensor_checksum(nan) == tensor_checksum(nan.clone())
    assert tensor_checksum(torch.tensor([0.0])) != tensor_checksum(torch.tensor([-0.0]))
    assert tensor_checksum(torch.zeros(2)) != tensor_checksum(torch.zeros(4, dtype=torch.float16))


# ---- checksums of rectangles


def mixed(index, axis):
    """SplitMix64 with Python's own whole numbers."""
    mask = 2**64 - 1
    value = (index + 1 + (axis << 32)) * 0x9E3779B97F4A7C15 & mask
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
    return value ^ value >> 31


def by_hand(tensor, start):
    words = tensor.contiguous().view(torch.int16).reshape(*tensor.shape[:-1], -1)
    first = tensor.element_size() // 2 * start[-1]
    total = 0
    for place in np.ndindex(tuple(words.shape)):
        weight = mixed(first + place[-1], 0) & 2**20 - 1 | 1
        for axis, (at, offset) in enumerate(zip(place[:-1], start[:-1], strict=True)):
            weight *= mixed(at + offset, axis + 1) | 1
        total += weight * int(words[place])
    return total % 2**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "start"), [((5,), (3,)), ((3, 4), (7, 2)), ((2, 3, 4), (1, 0, 5))])
def test_rectangle_checksum_is_a_weighted_sum_of_words(dtype, shape, start):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert rectangle_checksum(tensor, start) == by_hand(tensor, start)


@given(st.data())
@settings(max_examples=40)
def test_checksums_of_tiles_add_up_to_that_of_the_whole(data):
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    row, column = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    whole = torch.randn(rows, columns)
    cuts = [(r, c) for r in ((0, row), (row, rows)) for c in ((0, column), (column, columns))]
    parts = [rectangle_checksum(whole[r[0] : r[1], c[0] : c[1]], (r[0], c[0])) for r, c in cuts]
    assert sum(parts) % 2**64 == rectangle_checksum(whole, (0, 0))


def test_large_values_in_wide_rows_are_summed_exactly():
    widest = torch.full((2, 70_000), -32768, dtype=torch.int16).view(torch.bfloat16)
    expected = sum(
        (mixed(row, 1) | 1) * sum(-32768 * (mixed(column, 0) & 2**20 - 1 | 1) for column in range(70_000))
        for row in range(2)
    )
    assert rectangle_checksum(widest, (0, 0)) == expected % 2**64


def test_checksum_depends_on_every_bit_and_position():
    tensor = torch.randn(64, 32)
    checksum = rectangle_checksum(tensor, (0, 0))
    for bit in (0, 15, 16, 31):
        other = tensor.clone()
        other.view(torch.int32)[63, 31] ^= 1 << bit if bit < 31 else -(2**31)
        assert rectangle_checksum(other, (0, 0)) != checksum
    assert rectangle_checksum(tensor.flip(0), (0, 0)) != checksum
    assert rectangle_checksum(tensor.flip(1), (0, 0)) != checksum
    assert rectangle_checksum(tensor, (1, 0)) != checksum
    assert rectangle_checksum(tensor.T.contiguous().T, (0, 0)) == checksum


def test_checksum_after_conversion_to_another_dtype():
    tensor = torch.randn(300, 1000)
    assert rectangle_checksum(tensor, (5, 7), torch.bfloat16) == rectangle_checksum(tensor.bfloat16(), (5, 7))


@st.composite
def tilings(draw):
    """A shape cut into a grid of boxes, in random order."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    rectangles = [((), ())]
    for edges in cuts:
        spans = list(pairwise(edges))
        rectangles = [((*at, a), (*extent, b - a)) for at, extent in rectangles for a, b in spans]
    return tuple(shape), draw(st.permutations(rectangles))


@settings(max_examples=100)
@given(tilings(), st.data())
def test_a_tiling_covers_each_element_once(tiling, data):
    shape, rectangles = tiling
    cover = Coverage("p", shape, CheckpointError)
    for start, extent in rectangles:
        assert cover.written < cover.expected == math.prod(shape)
        cover.add(start, extent)
    assert cover.written == cover.expected
    # Everything is covered: any rectangle inside the shape overlaps.
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    extent = tuple(data.draw(st.integers(1, n - a)) for a, n in zip(start, shape, strict=True))
    with raises("model.slice-overlap", "'p'", error=CheckpointError):
        cover.add(start, extent)


@pytest.mark.parametrize("start", [(0, 0), (2, 3), (3, 2), (1, 1)])
def test_overlap_is_detected_from_every_side(start):
    cover = Coverage("p", (6, 6), CheckpointError)
    cover.add((2, 2), (2, 2))
    with raises("model.slice-overlap", "'p'", "[[2, 2], [4, 4])"):
        cover.add(start, (3, 3))


def test_neighbors_do_not_overlap():
    cover = Coverage("p", (6, 6), CheckpointError)
    cover.add((2, 2), (2, 2))
    for start, extent in [((0, 0), (2, 6)), ((4, 0), (2, 6)), ((2, 0), (2, 2)), ((2, 4), (2, 2))]:
        cover.add(start, extent)
    assert cover.written == 36
