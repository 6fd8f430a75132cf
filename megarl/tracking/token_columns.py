"""Per-token values of a response (advantage, log-prob, KL, ...), encoded in its line of a sample file.

A line has ``tokens``: ``{"characters": ..., "<name>": ...}``, each a base64 string. ``characters`` is the number of
characters of ``output`` per token, as 16-bit integers; they sum to the length of ``output``. The other columns are
16-bit floats: three significant digits, enough for a color and a label. All are little-endian. A constant column holds
one value. This takes about three bytes per token and value.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

CHARACTERS = "characters"
_MOST_CHARACTERS = np.iinfo(np.uint16).max


class TokenColumn(NamedTuple):
    """A per-token value that the report shows.

    Attributes:
        name: key in the sample file.
        note: meaning and unit.
        scale: color scale: ``signed`` around zero, ``low`` highlights small values, ``high`` large values, ``mask``
            0/1.
    """

    name: str
    label: str
    note: str
    scale: str


TOKEN_COLUMNS = (
    TokenColumn("advantage", "advantage", "the weight of the token in the policy gradient", "signed"),
    TokenColumn("difference", "log-prob difference", "actor minus rollout engine, in nats", "signed"),
    TokenColumn("mask", "mask", "tokens excluded from the loss", "mask"),
    TokenColumn("log_prob", "log-prob", "of the sampled token under the actor, in nats", "low"),
    TokenColumn("entropy", "entropy", "of the actor's distribution at the token, in nats", "high"),
    TokenColumn("kl", "KL to the reference", "actor minus reference, in nats", "signed"),
    TokenColumn("value", "value", "the critic's estimate of the return", "signed"),
    TokenColumn("reward", "reward", "reward at the token", "signed"),
)


@dataclass(frozen=True)
class TokenValues:
    """Values of the ``n`` tokens of a response.

    Attributes:
        characters: ``[n]``, number of characters of the text per token.
        columns: values by name, ``[n]`` each.
    """

    characters: np.ndarray
    columns: dict[str, np.ndarray]

    @classmethod
    def of(cls, characters: Sequence[int], columns: Mapping[str, np.ndarray]) -> TokenValues:
        """Build from columns of equal length.

        Raises:
            ValueError: the lengths differ.
        """
        for name, values in columns.items():
            if len(values) != len(characters):
                raise ValueError(f"token column {name!r} has {len(values)} values, expected {len(characters)}")
        return cls(np.asarray(characters, dtype=np.int64), {name: np.asarray(v) for name, v in columns.items()})

    def encoded(self) -> dict[str, str] | None:
        """Encode for a sample file; None without tokens, or with a token too long to encode."""
        if not len(self.characters) or int(self.characters.max()) > _MOST_CHARACTERS:
            return None
        columns = {CHARACTERS: _text(self.characters.astype("<u2"))}
        limit = float(np.finfo(np.float16).max)
        for name, values in self.columns.items():
            numbers = np.clip(np.asarray(values, dtype=np.float64), -limit, limit).astype("<f2")
            same = np.array_equal(numbers, np.broadcast_to(numbers[:1], numbers.shape), equal_nan=True)
            columns[name] = _text(numbers[:1] if same else numbers)
        return columns

    @classmethod
    def decode(cls, encoded: Mapping[str, str], characters: int) -> TokenValues | None:
        """Decode :meth:`encoded` for a text of ``characters`` characters; None if it does not fit."""
        try:
            lengths = np.frombuffer(base64.b64decode(encoded[CHARACTERS], validate=True), "<u2").astype(np.int64)
            read = {name: np.frombuffer(base64.b64decode(text, validate=True), "<f2") for name, text in encoded.items()}
        except (KeyError, TypeError, ValueError, binascii.Error):
            return None
        del read[CHARACTERS]
        if int(lengths.sum()) != characters or any(len(values) not in (1, len(lengths)) for values in read.values()):
            return None
        spread = {name: np.broadcast_to(v, lengths.shape).astype(np.float32) for name, v in read.items()}
        return cls(lengths, spread)

    def part(self, begin: int, end: int) -> TokenValues:
        """Return tokens ``begin`` to ``end``."""
        return TokenValues(self.characters[begin:end], {name: v[begin:end] for name, v in self.columns.items()})

    def joined(self, other: TokenValues, between: int) -> TokenValues:
        """Concatenate with further tokens, with a gap of text without tokens between them.

        Args:
            between: characters of the gap; its values are NaN.
        """
        gap = np.array([np.nan], dtype=np.float32)
        columns = {name: np.concatenate([v, gap, other.columns[name]]) for name, v in self.columns.items()}
        return TokenValues(np.concatenate([self.characters, [between], other.characters]), columns)


def _text(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")
