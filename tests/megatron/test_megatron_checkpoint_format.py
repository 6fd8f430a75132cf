"""A flat range of a local parameter, cut into rectangles of Hugging Face tensors, against element-wise bookkeeping."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.megatron.checkpoint.storage import blocks_of_range
from megarl.models import LocalParam, ParallelLayout, Piece, WeightMap, parse_model_config

SHAPE = (7, 5)


def model_map(architecture):
    raw = {
        "architectures": [architecture],
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 37,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "layer_types": ["linear_attention", "full_attention"],  # of Qwen3.5, whose convolution has three dimensions
        "head_dim": 2,
        "partial_rotary_factor": 1.0,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 3,
        "linear_value_head_dim": 1,
    }
    return WeightMap(parse_model_config(raw))


def numbered(shapes):
    """Hugging Face tensors whose elements are numbered from 1, without repetition."""
    full, first = {}, 1
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        full[name] = np.arange(first, first + size).reshape(shape)
        first += size
    return full


def local_of(param, full):
    local = np.zeros(param.shape, dtype=int)
    for piece in param.pieces:
        stop = [at + size for at, size in zip(piece.at, piece.shape, strict=True)]
        local[tuple(map(slice, piece.at, stop))] = full[piece.hf_name][tuple(map(slice, piece.start, piece.stop))]
    return local


@given(st.data())
def test_blocks_cover_the_elements_of_the_range(data):
    weight_map = model_map(data.draw(st.sampled_from(["Qwen2ForCausalLM", "Qwen3_5ForCausalLM"])))
    layout = data.draw(st.sampled_from([ParallelLayout(), ParallelLayout(tp=2), ParallelLayout(tp=2, pp=2)]))
    rank = data.draw(st.integers(0, layout.world_size - 1))
    param = data.draw(st.sampled_from(weight_map.megatron_params(layout, rank)))
    full = numbered(weight_map.hf_shapes())
    flat = local_of(param, full).reshape(-1)
    start = data.draw(st.integers(0, flat.size))
    stop = data.draw(st.integers(start, flat.size))
    actual = np.zeros(stop - start, dtype=int)
    blocks = list(blocks_of_range(param, start, stop))
    for block in blocks:
        assert block.numel > 0
        corner = tuple(slice(a, a + n) for a, n in zip(block.start, block.shape, strict=True))
        assert not actual[block.at : block.at + block.numel].any(), "an element is in two blocks"
        actual[block.at : block.at + block.numel] = full[block.hf_name][corner].reshape(-1)
    assert (actual == flat[start:stop]).all()
    assert len(blocks) <= 3 * len(param.pieces)


@given(st.data())
def test_blocks_of_several_dimensions(data):
    """As of the convolution of a vision tower; the piece is the last rows."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)))
    first = data.draw(st.integers(0, shape[0] - 1))
    begin, rows = (first, *(0,) * (len(shape) - 1)), (shape[0] - first, *shape[1:])
    param = LocalParam("p", rows, (Piece("hf", begin, shape, (0,) * len(shape)),))
    full = np.arange(np.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, int(np.prod(rows))))
    stop = data.draw(st.integers(start, int(np.prod(rows))))
    blocks = list(blocks_of_range(param, start, stop))
    parts = [full[tuple(slice(a, a + n) for a, n in zip(b.start, b.shape, strict=True))].ravel() for b in blocks]
    assert [block.at for block in blocks] == np.cumsum([0, *map(len, parts)])[: len(blocks)].tolist()
    assert np.concatenate([[], *parts]).tolist() == full[first:].ravel()[start:stop].tolist()
    assert len(blocks) <= 2 * len(shape) - 1


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 35])
def test_data_parallel_cuts_cover_each_element_once(parts):
    param = LocalParam("p", SHAPE, (Piece("hf", (2, 0), (9, 5), (0, 0)),))
    count = np.zeros((9, 5), dtype=int)
    cuts = np.linspace(0, 35, parts + 1).astype(int)
    for start, stop in pairwise(cuts):
        for block in blocks_of_range(param, int(start), int(stop)):
            count[tuple(slice(a, a + n) for a, n in zip(block.start, block.shape, strict=True))] += 1
    assert (count[2:] == 1).all()
    assert (count[:2] == 0).all()


def test_piece_that_does_not_span_its_rows_raises():
    param = LocalParam("p", SHAPE, (Piece("hf", (0, 0), (7, 4), (0, 1)),))
    with pytest.raises(ValueError, match=r"'p' of shape .* does not span its rows"):
        list(blocks_of_range(param, 0, 35))
