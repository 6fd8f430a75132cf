"""Bounds of the tokens of a text, and texts without their middle, with tokenizers of every kind."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.tokenization import truncate
from megarl.data.tokenizers import cut_middle, fewest_tokens, longest_token, measured_tokens
from tests.data.test_data_tokenization import CORPUS, TOKENIZERS

WORDS = sorted({word for text in CORPUS for word in text.split()})


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([*WORDS, "unknown", "ß", "\n"]), min_size=600, max_size=900), st.integers(1, 9))
def test_both_ends_of_a_cut_text_have_the_tokens_of_the_whole(name, words, limit):
    tokenizer, text = TOKENIZERS[name], " ".join(words)
    short = cut_middle(tokenizer, text, measured_tokens(limit))
    ids, cut = tokenizer([text, short], add_special_tokens=False)["input_ids"]
    for side in ("left", "right", "middle"):
        assert truncate(cut, limit, side) == truncate(ids, limit, side)
    assert len(short) <= measured_tokens(limit) * longest_token(tokenizer)
    assert fewest_tokens(tokenizer, [{"content": text}, ("", 1)]) <= len(ids)


def test_a_text_that_may_have_few_tokens_stays():
    tokenizer = TOKENIZERS["byte-level"]
    text = "x" * (32 * longest_token(tokenizer))
    assert measured_tokens(5) == measured_tokens(8) == 32
    assert cut_middle(tokenizer, text, 32) == text
    assert len(cut_middle(tokenizer, text + "x", 32)) == len(text)
