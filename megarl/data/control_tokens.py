"""Control tokens of a tokenizer, and the encoding of external text without them; imports no torch.

A chat template mixes its control tokens with the texts of tools, documents and clients. Before it is rendered,
:meth:`ControlTokens.hide` replaces the parts of a text that would become control tokens with placeholders. Afterwards
:meth:`ControlTokens.encode` spells these parts with ordinary tokens. So the text stays whole and imitates no turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "@@megarl-"
"""Beginning of all marks that this package writes into messages; a text that contains it is hidden too."""
_HIDDEN = re.compile(rf"{MARK}(?:text|edge):([0-9a-f]*)@@")
_EDGE = re.compile(rf"{MARK}edge:([0-9a-f]*)@@")
_BLANK = " \t\r\n\u2581"
"""Some tokenizers have runs of spaces as added tokens; SentencePiece writes U+2581 for a space."""
_CHAT = [{"role": role, "content": "?"} for role in ("user", "assistant", "user")]


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
        if isinstance(value, Mapping):
            return {self.hide(str(name), role): self.hide_all(inner, role) for name, inner in value.items()}
        return [self.hide_all(inner, role) for inner in value] if isinstance(value, list | tuple) else value

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
        """Count the ordinary tokens of each token of an external text: 1, more for a control token."""
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
