"""Characters per token, with tokenizers of every kind in transformers."""

import random
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megarl.data import tokenization
from megarl.data.tokenization import characters_per_token

CORPUS = [
    "the cat sat on the mat 123",
    "naïve café 🙂 über",
    "日本語 text  with   spaces\n\nand lines",
    "x = y + 1",
] * 3


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False)
    made.add_tokens(["<think>"])
    return made


def sentencepiece():
    """As in Llama 2's ``tokenizer.json``: a byte outside the vocabulary is a separate token."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz0123456789", "▁t", "he", "▁the"]
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {t: 256 + n for n, t in enumerate(letters)}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False)


def words():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"])
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="<eos>")


TOKENIZERS = {"byte-level": byte_level(), "sentencepiece": sentencepiece(), "words": words()}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60)
@given(numbers=st.lists(st.integers(0, 319), max_size=30))
def test_characters_of_random_tokens_add_up_to_the_text(name, numbers):
    """Random ids, as from an untrained model: incomplete bytes and special tokens."""
    tokenizer = TOKENIZERS[name]
    ids = [number % len(tokenizer) for number in numbers]
    counts = characters_per_token(ids, tokenizer)
    assert counts is not None and len(counts) == len(ids) and min(counts, default=0) >= 0
    assert sum(counts) == len(tokenizer.decode(ids, skip_special_tokens=True))


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_every_token_gets_its_characters(name):
    tokenizer = TOKENIZERS[name]
    text = "the cat sat on 123 mats 🙂é"
    ids = tokenizer(text).input_ids
    counts = characters_per_token(ids, tokenizer)
    assert counts is not None
    ends = list(accumulate(counts))
    pieces = [text[end - count : end] for end, count in zip(ends, counts, strict=True)]
    assert "".join(pieces) == text
    # the independent source: the text up to a token, decoded by the library, where it ends with a whole letter
    for number in range(1, len(ids) + 1):
        prefix = tokenizer.decode(ids[:number], skip_special_tokens=True)
        if "\ufffd" not in prefix:
            assert text[: ends[number - 1]] == prefix


def test_special_and_added_tokens():
    tokenizer = TOKENIZERS["byte-level"]
    eos, think = tokenizer.convert_tokens_to_ids(["<eos>", "<think>"])
    (cat,) = {*tokenizer(" cat").input_ids[-1:]}
    assert characters_per_token([think, cat, eos], tokenizer) == [7, len(tokenizer.decode([cat])), 0]
    assert characters_per_token([], tokenizer) == []


def test_tokenizer_with_cleanup_is_decoded_by_prefixes(monkeypatch):
    tokenizer = TOKENIZERS["words"]
    ids = tokenizer("the cat sat on the mat").input_ids
    counts = characters_per_token(ids, tokenizer)
    assert counts is not None and sum(counts) == len("the cat sat on the mat")
    monkeypatch.setattr(tokenization, "MAX_PREFIX_TOKENS", len(ids) - 1)
    assert characters_per_token(ids, tokenizer) is None, "more would take the square of their number"
    assert characters_per_token(random.Random(0).sample(ids, 2), tokenizer) is not None
