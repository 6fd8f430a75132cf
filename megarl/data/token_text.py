"""Which characters of a decoded answer each of its tokens wrote."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LONGEST_BY_PREFIXES = 512
"""Up to how many tokens are told apart by decoding every prefix, which costs the square of their number."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_SPACE = "\u2581"


def characters_per_token(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """How many characters of ``tokenizer.decode(ids, skip_special_tokens=True)`` each token wrote; they add up to all.

    A character whose bytes come from several tokens counts for the last of them, a special token writes none. The
    tokens' bytes are read as byte-level BPE and SentencePiece have them, and what that gives is compared with the
    decoded text; where neither fits, as with a tokenizer that tidies up spaces, every prefix is decoded.

    Returns:
        None where that would take too long: an answer of more than ``LONGEST_BY_PREFIXES`` tokens of such a tokenizer.
    """
    text = tokenizer.decode(list(ids), skip_special_tokens=True)
    tokens = tokenizer.convert_ids_to_tokens(list(ids))
    special = set(tokenizer.all_special_ids)
    added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    for bytes_of in (_byte_level, _sentencepiece):
        pieces = [
            b"" if number in special else added[number].encode() if number in added else bytes_of(token)
            for number, token in zip(ids, tokens, strict=True)
        ]
        found = _characters(pieces, text)
        if found is not None:
            return found
    return _by_prefixes(list(ids), text, tokenizer) if len(tokens) <= LONGEST_BY_PREFIXES else None


def _characters(pieces: Sequence[bytes | None], text: str) -> list[int] | None:
    """Characters that each piece completes; None where the pieces do not spell the text."""
    if None in pieces:
        return None
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    parts = [decoder.decode(piece or b"") for piece in pieces]
    if parts:
        parts[-1] += decoder.decode(b"", final=True)
    joined = "".join(parts)
    if joined == f" {text}":  # SentencePiece begins a text with a space that decoding takes away
        first = next(index for index, part in enumerate(parts) if part)
        parts[first] = parts[first][1:]
    elif joined != text:
        return None
    return [len(part) for part in parts]


def _byte_level(token: str) -> bytes | None:
    table = _byte_level_alphabet()
    if any(letter not in table for letter in token):
        return None
    return bytes(table[letter] for letter in token)


def _sentencepiece(token: str) -> bytes:
    single = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(single[1], 16)]) if single else token.replace(_SENTENCEPIECE_SPACE, " ").encode()


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """The letter by which byte-level BPE writes each byte (GPT-2): itself where it prints, else one from 256 on."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printed)]
    return {chr(byte): byte for byte in printed} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _by_prefixes(ids: list[int], text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """By the growth of the decoded prefix; a prefix that is not yet text of the whole has not grown."""
    decode: Callable[[list[int]], str] = lambda part: tokenizer.decode(part, skip_special_tokens=True)  # noqa: E731
    ends = [0]
    for count in range(1, len(ids) + 1):
        prefix = decode(ids[:count])
        ends.append(len(prefix) if text.startswith(prefix) else ends[-1])
    ends[-1] = len(text)
    return [end - begin for begin, end in pairwise(ends)]
