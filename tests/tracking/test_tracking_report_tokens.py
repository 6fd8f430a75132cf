"""Token values as the answer's line codes them."""

from __future__ import annotations

import base64
import struct

import numpy as np
import pytest

from megarl.tracking.report.tokens import TokenValues


def test_the_code_is_as_documented() -> None:
    coded = TokenValues.of([1, 0, 3], {"a": np.array([1.5, -2.0, 0.0]), "same": np.array([0.25, 0.25, 0.25])}).coded()
    assert coded is not None
    read = {name: base64.b64decode(text) for name, text in coded.items()}
    assert struct.unpack("<3H", read["characters"]) == (1, 0, 3)
    assert struct.unpack("<3e", read["a"]) == (1.5, -2.0, 0.0), "half-precision floats, as Python's own struct has them"
    assert struct.unpack("<1e", read["same"]) == (0.25,), "what is the same everywhere is written once"
    again = TokenValues.decoded(coded, 4)
    assert again is not None and again.columns["same"].tolist() == [0.25] * 3
    assert again.columns["a"].tolist() == [1.5, -2.0, 0.0] and again.characters.tolist() == [1, 0, 3]


def test_what_cannot_be_coded() -> None:
    assert TokenValues.of([], {"a": np.zeros(0)}).coded() is None
    assert TokenValues.of([70_000], {}).coded() is None, "characters of a token are 16 bits"
    with pytest.raises(ValueError, match="'a' has 2 values, expected 1"):
        TokenValues.of([1], {"a": np.zeros(2)})
    coded = TokenValues.of([1, 1, 1], {"a": np.array([np.nan, np.inf, 1e9])}).coded()
    assert coded is not None
    read = TokenValues.decoded(coded, 3)
    assert read is not None and np.isnan(read.columns["a"][0]) and read.columns["a"][1:].tolist() == [65504.0] * 2


@pytest.mark.parametrize(
    "coded",
    [
        {},
        {"characters": "no base64 !"},
        {"characters": 3},
        {"characters": "AQACAA==", "a": "AQACAAMA"},  # three values of two tokens
        {"characters": "AQACAA==", "a": "AQA"},
    ],
)
def test_what_is_not_a_code_is_not_read(coded: dict[str, str]) -> None:
    assert TokenValues.decoded(coded, 3) is None
    whole = TokenValues.of([1, 2], {}).coded()
    assert whole is not None and TokenValues.decoded(whole, 4) is None, "of another text"
