"""Tokenizers: loading, bounds of a text's tokens, control tokens, and characters per token; imports no torch.

A chat template mixes its control tokens with the texts of tools, documents and clients. Before it is rendered,
:meth:`ControlTokens.hide` replaces the parts of a text that would become control tokens with placeholders. Afterwards
:meth:`ControlTokens.encode` spells these parts with ordinary tokens. So the text stays whole and imitates no turn.

Bounds follow from the bytes of a text: to tokenize 10 MB takes half a minute and gigabytes of memory.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from megarl.base.errors import ModelError
from megarl.base.image_tokens import PLACEHOLDER, image_spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_LONGEST: WeakKeyDictionary[PreTrainedTokenizerBase, int] = WeakKeyDictionary()
MAX_PREFIX_TOKENS = 512
"""Longest response for which characters per token are found by decoding every prefix, at quadratic cost."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_SPACE = "\u2581"
MARK = "@@megarl-"
"""Beginning of all marks that this package writes into messages; a text that contains it is hidden too."""
_HIDDEN = re.compile(rf"{MARK}(?:text|edge):([0-9a-f]*)@@")
_EDGE = re.compile(rf"{MARK}edge:([0-9a-f]*)@@")
IMAGE_PART = {"type": "image"}
"""Part of a message in place of an image."""
_BLANK = " \t\r\n\u2581"
"""Some tokenizers have runs of spaces as added tokens; SentencePiece writes U+2581 for a space."""
_CHAT = [{"role": role, "content": "?"} for role in ("user", "assistant", "user")]


def open_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder, whatever it has.

    Raises:
        ModelError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        # Without False, transformers asks on a terminal whether to run code of the folder.
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
        tokenizer.get_vocab()
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a malformed file raises any error there, and a panic of Rust is no Exception
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelError(
            f"no tokenizer can be loaded from {path} ({reason:.300}); copy the tokenizer files of the model into the "
            "folder again, or name a folder that has them in the model's tokenizer_path",
            code="tokenizer.cannot-load",
        ) from error
    return tokenizer


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder for a job.

    Raises:
        ModelError: it cannot be loaded, or has no vocabulary, no chat template or no end-of-sequence token.
    """
    tokenizer = open_tokenizer(path)
    # transformers builds an empty tokenizer for a folder without tokenizer files.
    special = {*map(str, tokenizer.added_tokens_decoder.values()), *tokenizer.all_special_tokens}
    if not tokenizer.get_vocab().keys() - special:
        raise ModelError(
            f"the tokenizer in {path} has no vocabulary: tokenizer.json (or vocab.json, tokenizer.model, ...) is "
            "missing there. Copy the tokenizer files of the model into the folder, or name a folder that has them in "
            "the model's tokenizer_path",
            code="tokenizer.no-vocabulary",
        )
    start, remedy = f"the tokenizer in {path} has no", "set it in its tokenizer_config.json"
    if tokenizer.chat_template is None:
        raise ModelError(f"{start} chat_template; {remedy}", code="tokenizer.no-chat-template")
    if tokenizer.eos_token is None:
        raise ModelError(f"{start} eos_token; {remedy}", code="tokenizer.no-eos-token")
    return tokenizer


def end_token_of(path: str | Path) -> int | None:
    """Return the end-of-sequence token of the tokenizer in a folder; None without a tokenizer, or if it has none.

    Raises:
        ModelError: the tokenizer cannot be loaded.
    """
    has_tokenizer = (Path(path) / "tokenizer_config.json").is_file()
    return open_tokenizer(path).eos_token_id if has_tokenizer else None


def longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return an upper bound of the bytes of one token: a text of more bytes has more tokens."""
    if tokenizer not in _LONGEST:
        _LONGEST[tokenizer] = max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)
    return _LONGEST[tokenizer]


def fewest_tokens(tokenizer: PreTrainedTokenizerBase, value: Any) -> int:
    """Return the fewest tokens that a text, or all texts in nested values, can have, without tokenizing them."""
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

    The result still has ``tokens`` tokens or more, half of them before the cut and half after it. They equal the text's
    tokens, except a few next to the cut. A tokenizer that does not split texts into words may differ further.
    """
    half = tokens // 2 * longest_token(tokenizer)
    return text if len(text) <= 2 * half else text[:half] + text[len(text) - half :]


@lru_cache(maxsize=16)
def control_tokens(tokenizer: PreTrainedTokenizerBase) -> ControlTokens:
    """Return the control tokens of a tokenizer."""
    return ControlTokens(tokenizer)


class ControlTokens:
    """Control tokens: all special tokens, named or not, and other added tokens that the chat template writes.

    DeepSeek's ``<｜User｜>`` and Qwen's ``</tool_response>`` are added tokens, but not special ones. Tools may write
    none of them. Users may write those that only mark tool calls or thinking, such as ``<tool_call>`` in an
    instruction. In the assistant's messages only special tokens are hidden.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.special_ids = frozenset([*tokenizer.all_special_ids, *(n for n, token in added.items() if token.special)])
        self.special = frozenset([*tokenizer.all_special_tokens, *(str(t) for t in added.values() if t.special)])
        texts = {str(token) for token in added.values() if str(token).strip(_BLANK)}
        template = str(tokenizer.chat_template or "")
        written = {text for text in texts if text in template}
        self._ids = self.special_ids | {n for n, token in added.items() if str(token) in written}
        self._special, self._turns = _pattern(self.special), _pattern(self.special | self._of_turns(written))
        everything = self.special | written
        self._all = _pattern(everything)
        self._starts = {text[:count] for text in everything for count in range(1, len(text))}
        self._ends = {text[count:] for text in everything for count in range(1, len(text))}
        # Some templates write a name between brackets, as Qwen3-Coder does with the keys of a schema.
        self._names = {text[begin:-end] for text in everything for begin in (1, 2) for end in (1, 2)}
        self._longest = max(map(len, everything), default=0)

    def _of_turns(self, written: set[str]) -> set[str]:
        """Tokens that the template writes between two turns of a conversation without tools."""
        try:
            chat = str(self.tokenizer.apply_chat_template(_CHAT, tokenize=False))
        except Exception:  # a template is a program and may raise any error
            return written
        return {text for text in written if text in chat}

    def hide(self, text: str, role: str = "tool") -> str:
        """Replace what would become a control token with placeholders, for :meth:`encode`.

        Args:
            role: role of its message.
        """
        pattern = {"assistant": self._special, "system": self._turns, "user": self._turns}.get(role, self._all)
        shown = pattern.sub(lambda match: _placeholder("text", match[0]), text)
        # The template or another text could complete a token that begins or ends here.
        if shown in self._names:
            return _placeholder("edge", shown)
        lengths = range(1, self._longest)
        head = max((n for n in lengths if shown[:n] in self._ends), default=0)
        rest = shown[head:]
        tail = max((n for n in lengths if rest[-n:] in self._starts), default=0)
        ends = (shown[:head], rest[len(rest) - tail :])
        first, last = (_placeholder("edge", end) if end else "" for end in ends)
        return first + rest[: len(rest) - tail] + last

    def hide_all(self, value: Any, role: str = "tool") -> Any:
        """Hide the control tokens in all texts of a JSON value, including its keys."""
        if isinstance(value, str):
            return self.hide(value, role)
        if value == IMAGE_PART:
            return value
        if isinstance(value, Mapping):
            return {self.hide(str(name), role): self.hide_all(inner, role) for name, inner in value.items()}
        return [self.hide_all(inner, role) for inner in value] if isinstance(value, list | tuple) else value

    def hide_token(self, value: Any, token: str) -> Any:
        """Hide one control token in all texts of a JSON value, whole occurrences only."""
        if isinstance(value, str):
            return value.replace(token, _placeholder("text", token))
        if isinstance(value, Mapping):
            return {name: self.hide_token(inner, token) for name, inner in value.items()}
        return [self.hide_token(inner, token) for inner in value] if isinstance(value, list | tuple) else value

    def hide_messages(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Hide the control tokens in all fields of chat messages; the roles stay."""
        return [{**self.hide_all(message, message["role"]), "role": message["role"]} for message in messages]

    def encode(self, text: str) -> list[int]:
        """Encode a text without adding special tokens; hidden parts become ordinary tokens."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts; see :meth:`encode`."""
        shown = [self._with_edges(text) for text in texts]
        encoded = self.tokenizer(shown, add_special_tokens=False)["input_ids"]
        return [
            list(ids) if MARK not in text else self._spelled(text) for ids, text in zip(encoded, shown, strict=True)
        ]

    def spelled_sizes(self, ids: Sequence[int]) -> list[int]:
        """Count how many ordinary tokens spell each token of an external text: 1, more for a control token."""
        spelled = {n: len(self._spell(self.tokenizer.convert_ids_to_tokens(n))) for n in self._ids.intersection(ids)}
        return [spelled.get(number, 1) for number in ids]

    def remove(self, text: str) -> str:
        """Remove the special tokens from the policy's text, for a client."""
        return self._special.sub(lambda match: MARK if match[0] == MARK else "", text)

    def _with_edges(self, text: str) -> str:
        """Show hidden ends of texts, unless they form control tokens with their neighbours."""
        shown = _EDGE.sub(_original, text)
        joined = shown != text and len(self._all.findall(shown)) > len(self._all.findall(_EDGE.sub("\0", text)))
        return text if joined else shown

    def _spelled(self, text: str) -> list[int]:
        # Each part is encoded alone, so that no token extends over two of them.
        ids: list[int] = []
        for number, part in enumerate(_HIDDEN.split(text)):
            ids += self._spell(bytes.fromhex(part).decode()) if number % 2 else self._ids_of(part)
        return ids

    def _spell(self, text: str) -> list[int]:
        """Encode a hidden part in pieces that contain no control token."""
        first = [number for number in self._ids_of(text[:1]) if number not in self._ids]
        rest = self._ids_of(text[1:])
        return first + (rest if self._ids.isdisjoint(rest) else self._spell(text[1:]))

    def _ids_of(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Match any of the tokens, the longest first, and :data:`MARK`."""
    return re.compile("|".join(map(re.escape, [MARK, *sorted(filter(None, tokens), key=len, reverse=True)])))


def _placeholder(kind: str, text: str) -> str:
    return f"{MARK}{kind}:{text.encode().hex()}@@"


def _original(match: re.Match[str]) -> str:
    return bytes.fromhex(match[1]).decode()


def characters_per_token(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """Count the characters of :func:`megarl.rewards.scorer.decode_text` per token.

    The counts add up to the text. The first token of an image has those of ``<image>``. A character with bytes from
    several tokens counts for the last of them; a special token has none. Tokens are read as byte-level BPE, then as
    SentencePiece, and compared with the decoded text. If neither matches, as with a tokenizer that cleans up spaces,
    every prefix is decoded.

    Returns:
        None if decoding prefixes would take too long, above :data:`MAX_PREFIX_TOKENS` tokens.
    """
    counts, done = list[int](), 0
    for start, stop in (*((span.start, span.stop) for span in image_spans(ids)), (len(ids), len(ids))):
        of_text = _characters_of_text(ids[done:start], tokenizer)
        if of_text is None:
            return None
        image = [len(PLACEHOLDER), *[0] * (stop - start - 1)] if stop > start else []
        counts += [*of_text, *image]
        done = stop
    return counts


def _characters_of_text(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    text = tokenizer.decode(list(ids), skip_special_tokens=True)
    tokens = tokenizer.convert_ids_to_tokens(list(ids))
    special = set(tokenizer.all_special_ids)
    added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    for bytes_of in (_byte_level, _sentencepiece):
        pieces = [
            b"" if number in special else added[number].encode() if number in added else bytes_of(token)
            for number, token in zip(ids, tokens, strict=True)
        ]
        counts = _characters(pieces, text)
        if counts is not None:
            return counts
    return _by_prefixes(list(ids), text, tokenizer) if len(tokens) <= MAX_PREFIX_TOKENS else None


def _characters(pieces: Sequence[bytes | None], text: str) -> list[int] | None:
    """Count the characters that each piece completes; None if the pieces do not spell the text."""
    if None in pieces:
        return None
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    parts = [decoder.decode(piece or b"") for piece in pieces]
    if parts:
        parts[-1] += decoder.decode(b"", final=True)
    joined = "".join(parts)
    if joined == f" {text}":  # SentencePiece starts a text with a space that decoding removes
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
    """Map the letters of byte-level BPE (GPT-2) to bytes: printable bytes map to themselves, others from 256 on."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printed)]
    return {chr(byte): byte for byte in printed} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _by_prefixes(ids: list[int], text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Count characters by the growth of the decoded prefix; an incomplete character does not grow it."""
    decode: Callable[[list[int]], str] = lambda part: tokenizer.decode(part, skip_special_tokens=True)  # noqa: E731
    ends = [0]
    for count in range(1, len(ids) + 1):
        prefix = decode(ids[:count])
        ends.append(len(prefix) if text.startswith(prefix) else ends[-1])
    ends[-1] = len(text)
    return [end - begin for begin, end in pairwise(ends)]
