"""What is known of every token of an answer, coded into the line of the answer's dump.

An answer's line has ``tokens``: ``{"characters": ..., "<name>": ...}``, each a base64 text. ``characters`` are the
characters of ``output`` that each token wrote, as 16-bit whole numbers; they add up to the length of ``output``. The
other columns are 16-bit floats (three significant digits, which a colour and a label need), little-endian like the
former; a column that has the same value at every token holds it once. That makes about three bytes of file per token
and value.
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
    """A value of tokens that the report can show.

    Attributes:
        name: in the dump.
        label: for people.
        note: what it means and in which unit.
        scale: ``signed`` for colours on both sides of zero, ``low`` where small values stand out, ``high`` where large
            ones do, ``mask`` for 0 or 1.
    """

    name: str
    label: str
    note: str
    scale: str


TOKEN_COLUMNS = (
    TokenColumn("advantage", "advantage", "what the token was reinforced by", "signed"),
    TokenColumn("difference", "log-prob difference", "actor's less the rollout engine's, in nats", "signed"),
    TokenColumn("mask", "mask", "tokens that are not learned from", "mask"),
    TokenColumn("log_prob", "log-prob", "of the sampled token under the actor, in nats", "low"),
    TokenColumn("entropy", "entropy", "of the actor's distribution at the token, in nats", "high"),
    TokenColumn("kl", "KL to the reference", "actor's log-prob less the reference's, in nats", "signed"),
    TokenColumn("value", "value", "the critic's estimate of what is to come", "signed"),
    TokenColumn("reward", "reward", "given at the token", "signed"),
)


@dataclass(frozen=True)
class TokenValues:
    """Values of an answer's ``n`` tokens.

    Attributes:
        characters: ``[n]``, of the answer's text.
        columns: by name, ``[n]`` each.
    """

    characters: np.ndarray
    columns: dict[str, np.ndarray]

    @classmethod
    def of(cls, characters: Sequence[int], columns: Mapping[str, np.ndarray]) -> TokenValues:
        """From columns of equal length.

        Raises:
            ValueError: a column has another length.
        """
        for name, values in columns.items():
            if len(values) != len(characters):
                raise ValueError(f"token column {name!r} has {len(values)} values, expected {len(characters)}")
        return cls(np.asarray(characters, dtype=np.int64), {name: np.asarray(v) for name, v in columns.items()})

    def coded(self) -> dict[str, str] | None:
        """As the dump has it; None where there is no token, or one of more characters than can be written."""
        if not len(self.characters) or int(self.characters.max()) > _MOST_CHARACTERS:
            return None
        coded = {CHARACTERS: _text(self.characters.astype("<u2"))}
        limit = float(np.finfo(np.float16).max)
        for name, values in self.columns.items():
            numbers = np.clip(np.asarray(values, dtype=np.float64), -limit, limit).astype("<f2")
            same = np.array_equal(numbers, np.broadcast_to(numbers[:1], numbers.shape), equal_nan=True)
            coded[name] = _text(numbers[:1] if same else numbers)
        return coded

    @classmethod
    def decoded(cls, coded: Mapping[str, str], characters: int) -> TokenValues | None:
        """What :meth:`coded` wrote for a text of so many characters; None where it is not that."""
        try:
            lengths = np.frombuffer(base64.b64decode(coded[CHARACTERS], validate=True), "<u2").astype(np.int64)
            read = {name: np.frombuffer(base64.b64decode(text, validate=True), "<f2") for name, text in coded.items()}
        except (KeyError, TypeError, ValueError, binascii.Error):
            return None
        del read[CHARACTERS]
        if int(lengths.sum()) != characters or any(len(values) not in (1, len(lengths)) for values in read.values()):
            return None
        spread = {name: np.broadcast_to(v, lengths.shape).astype(np.float32) for name, v in read.items()}
        return cls(lengths, spread)

    def part(self, begin: int, end: int) -> TokenValues:
        """Tokens ``begin`` to ``end``."""
        return TokenValues(self.characters[begin:end], {name: v[begin:end] for name, v in self.columns.items()})

    def joined(self, other: TokenValues, between: int) -> TokenValues:
        """These tokens and others, with a piece of text between them that no token wrote.

        Args:
            other: tokens with the same columns.
            between: characters of the piece; its values are not numbers.
        """
        gap = np.array([np.nan], dtype=np.float32)
        columns = {name: np.concatenate([v, gap, other.columns[name]]) for name, v in self.columns.items()}
        return TokenValues(np.concatenate([self.characters, [between], other.characters]), columns)


def _text(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")
