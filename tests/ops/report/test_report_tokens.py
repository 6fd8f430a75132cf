"""Encoding of token values in a sample's line."""

import base64
import struct

import numpy as np
import pytest

from megarl.tracking.token_columns import TokenValues


def test_encoding_matches_its_documentation():
    encoded = TokenValues.of(
        [1, 0, 3], {"a": np.array([1.5, -2.0, 0.0]), "same": np.array([0.25, 0.25, 0.25])}
    ).encoded()
    assert encoded is not None
    read = {name: base64.b64decode(text) for name, text in encoded.items()}
    assert struct.unpack("<3H", read["characters"]) == (1, 0, 3)
    assert struct.unpack("<3e", read["a"]) == (1.5, -2.0, 0.0), "half-precision floats, as Python's own struct has them"
    assert struct.unpack("<1e", read["same"]) == (0.25,), "a constant column is stored once"
    again = TokenValues.decode(encoded, 4)
    assert again is not None and again.columns["same"].tolist() == [0.25] * 3
    assert again.columns["a"].tolist() == [1.5, -2.0, 0.0] and again.characters.tolist() == [1, 0, 3]


def test_values_that_cannot_be_encoded():
    assert TokenValues.of([], {"a": np.zeros(0)}).encoded() is None
    assert TokenValues.of([70_000], {}).encoded() is None, "characters of a token are 16 bits"
    with pytest.raises(ValueError, match="'a' has 2 values, expected 1"):
        TokenValues.of([1], {"a": np.zeros(2)})
    encoded = TokenValues.of([1, 1, 1], {"a": np.array([np.nan, np.inf, 1e9])}).encoded()
    assert encoded is not None
    read = TokenValues.decode(encoded, 3)
    assert read is not None and np.isnan(read.columns["a"][0]) and read.columns["a"][1:].tolist() == [65504.0] * 2


@pytest.mark.parametrize(
    "encoded",
    [
        {},
        {"characters": "no base64 !"},
        {"characters": 3},
        {"characters": "AQACAA==", "a": "AQACAAMA"},  # three values of two tokens
        {"characters": "AQACAA==", "a": "AQA"},
    ],
)
def test_invalid_encodings_are_ignored(encoded):
    assert TokenValues.decode(encoded, 3) is None
    whole = TokenValues.of([1, 2], {}).encoded()
    assert whole is not None and TokenValues.decode(whole, 4) is None, "of another text"
