import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import WeightSyncError
from megarl.models import LocalParam
from megarl.rollout.embedded.weights import Coverage, WeightStore


@st.composite
def tilings(draw):
    """A shape cut into a grid of rectangles, in a random order."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    rectangles = [((), ())]
    for edges in cuts:
        spans = list(pairwise(edges))
        rectangles = [((*at, a), (*extent, b - a)) for at, extent in rectangles for a, b in spans]
    return tuple(shape), draw(st.permutations(rectangles))


@settings(max_examples=100, deadline=None)
@given(tilings(), st.data())
def test_a_tiling_covers_once(tiling, data):
    shape, rectangles = tiling
    cover = Coverage("p", shape)
    for start, extent in rectangles:
        assert cover.written < cover.expected == math.prod(shape)
        cover.add(start, extent)
    assert cover.written == cover.expected
    # Everything is covered: any rectangle inside the shape overlaps.
    start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    extent = tuple(data.draw(st.integers(1, n - a)) for a, n in zip(start, shape, strict=True))
    with pytest.raises(WeightSyncError, match="overlaps"):
        cover.add(start, extent)


@pytest.mark.parametrize("start", [(0, 0), (2, 3), (3, 2), (1, 1)])
def test_overlap_is_seen_from_every_side(start):
    cover = Coverage("p", (6, 6))
    cover.add((2, 2), (2, 2))
    with pytest.raises(WeightSyncError, match=r"'p': .* overlaps \[\[2, 2\], \[4, 4\]\)"):
        cover.add(start, (3, 3))


def test_neighbours_do_not_overlap():
    cover = Coverage("p", (6, 6))
    cover.add((2, 2), (2, 2))
    for start, extent in [((0, 0), (2, 6)), ((4, 0), (2, 6)), ((2, 0), (2, 2)), ((2, 4), (2, 2))]:
        cover.add(start, extent)
    assert cover.written == 36


def test_nothing_is_written_by_a_refused_slab_and_other_formats_are_converted():
    store = WeightStore([LocalParam("p", (4,), ())], torch.float32, torch.device("cpu"))
    store.allocate()
    store.begin(0)
    store.write([("p", (0,), torch.ones(2, dtype=torch.bfloat16))])
    with pytest.raises(WeightSyncError):
        store.write([("p", (1,), torch.full((3,), 5.0))])
    assert store.tensors["p"].tolist() == [1, 1, 0, 0]
    assert store.tensors["p"].dtype == torch.float32


def test_updates_keep_the_memory():
    store = WeightStore([LocalParam("p", (4,), ())], torch.float32, torch.device("cpu"))
    store.allocate()
    address = store.tensors["p"].data_ptr()
    store.begin(1)
    store.write([("p", torch.ones(4))])
    store.end(1)
    assert store.tensors["p"].data_ptr() == address
