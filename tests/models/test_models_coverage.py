"""Boxes that cover a tensor: gaps, overlaps and neighbours."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.expected_errors import raises

from megarl.base.errors import CheckpointError
from megarl.models.coverage import Coverage


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
