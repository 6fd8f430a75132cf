"""Bounds of the tokens of a text by its bytes; imports no torch.

To tokenize a text of 10 MB takes half a minute and gigabytes of memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONGEST: WeakKeyDictionary[PreTrainedTokenizerBase, int] = WeakKeyDictionary()


def longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return an upper bound of the bytes of one token: a text of more bytes has more tokens."""
    if tokenizer not in _LONGEST:
        _LONGEST[tokenizer] = max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)
    return _LONGEST[tokenizer]


def fewest_tokens(tokenizer: PreTrainedTokenizerBase, value: Any) -> int:
    """Return a lower bound of the tokens of a text, or of all texts in nested values, without tokenizing them."""
    size, values = 0, [value]
    while values:
        inner = values.pop()
        if isinstance(inner, str):
            size += len(inner.encode(errors="surrogatepass"))
        elif isinstance(inner, Mapping):
            values += inner.values()
        elif isinstance(inner, Sequence):
            values += inner
    return size // longest_token(tokenizer)


def measured_tokens(limit: int) -> int:
    """Return up to how many tokens a text is measured exactly if only ``limit`` are used.

    Similar limits have the same value, so that they share cached lengths.
    """
    return 4 << (limit - 1).bit_length()


def cut_middle(tokenizer: PreTrainedTokenizerBase, text: str, tokens: int) -> str:
    """Cut the middle out of a text that has more than ``tokens`` tokens by its length.

    The result still has ``tokens`` tokens or more, half of them before the cut and half after it. They equal those of
    the text, except a few next to the cut. A tokenizer that does not split texts into words may differ further.
    """
    half = tokens // 2 * longest_token(tokenizer)
    return text if len(text) <= 2 * half else text[:half] + text[len(text) - half :]
