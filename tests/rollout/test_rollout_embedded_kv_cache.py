"""The KV cache keeps its tokens through every change of width."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rollout.embedded.kv_cache import WIDTH_MULTIPLE, KVCache, decode_parts

SLOTS, HEADS, HEAD_DIM, LENGTH = 3, 2, 4, 300


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A model of two layers."""
    from transformers import Qwen2Config

    from megarl.models import read_model_config

    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": HEADS * HEAD_DIM, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 16}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    Qwen2Config(**sizes, **heads, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    return read_model_config(folder)


@settings(max_examples=60)
@given(lengths=st.lists(st.lists(st.integers(1, LENGTH), min_size=SLOTS, max_size=SLOTS), min_size=2, max_size=6))
def test_slots_keep_their_tokens_through_every_change_of_width(config, lengths):
    """Each round has other lengths: fitting tokens stay, and new tokens are written after them."""
    cache = KVCache(config, SLOTS, LENGTH, torch.float32, torch.device("cpu"))
    held = [torch.zeros(0, HEADS, HEAD_DIM) for _ in range(SLOTS)]
    for lengths_now in lengths:
        held = [tokens[:length] for tokens, length in zip(held, lengths_now, strict=True)]
        cache.fit(max(lengths_now), SLOTS)
        for slot, (tokens, length) in enumerate(zip(held, lengths_now, strict=True)):
            new = torch.randn(length - len(tokens), HEADS, HEAD_DIM)
            positions = torch.arange(len(tokens), length)
            for layer in range(2):
                cache.write(layer, cache.write_indices(torch.full_like(positions, slot), positions), new, -new)
            held[slot] = torch.cat([tokens, new])
        for layer in range(2):
            keys, values = cache.read(layer, 0, SLOTS)
            assert keys.is_contiguous() and keys.shape == (SLOTS, HEADS, cache.width, HEAD_DIM)
            for slot, tokens in enumerate(held):
                torch.testing.assert_close(keys[slot, :, : len(tokens)].transpose(0, 1), tokens, rtol=0, atol=0)
                torch.testing.assert_close(values[slot, :, : len(tokens)].transpose(0, 1), -tokens, rtol=0, atol=0)


def test_width_follows_the_longest_sequence_with_hysteresis(config):
    """It grows to the next multiple, and shrinks only by a quarter or more."""
    cache = KVCache(config, SLOTS, LENGTH, torch.float32, torch.device("cpu"))
    widths = []
    for length in (1, 32, 33, 200, 190, 161, 160, 100, 300, 290):
        cache.fit(length, SLOTS)
        widths.append(cache.width)
    assert WIDTH_MULTIPLE["cpu"] == 32
    assert widths == [32, 32, 64, 224, 224, 224, 160, 160, 300, 300]


@given(lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=40), is_sorted=st.booleans())
def test_parts_cover_all_sequences_in_any_order(lengths, is_sorted):
    lengths = sorted(lengths, reverse=True) if is_sorted else lengths
    parts = decode_parts(torch.tensor(lengths), 1000)
    assert [place for rows, _ in parts for place in range(rows.start, rows.stop)] == list(range(len(lengths)))
    assert all(max(lengths[rows]) <= width <= 1000 for rows, width in parts)
    reads = sum((rows.stop - rows.start) * width for rows, width in parts)
    assert len(parts) == 1 or reads <= 0.75 * 1000 * len(lengths)


def test_parts_of_a_few_long_sequences_and_many_short_ones():
    lengths = torch.tensor([1000, 600, 450, 260, *[100] * 28])
    assert decode_parts(lengths, 1024) == [(slice(0, 2), 1000), (slice(2, 4), 450), (slice(4, 32), 100)]
    assert decode_parts(lengths[:4], 1024) == [(slice(0, 2), 1000), (slice(2, 4), 450)]
    assert decode_parts(lengths[:3], 1024) == [(slice(0, 3), 1024)], "too little to save"
