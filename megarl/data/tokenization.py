"""Tokenization of chat prompts, responses, and whole conversations for fine-tuning; imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from megarl.base.errors import DataError
from megarl.base.image_tokens import PLACEHOLDER, Image
from megarl.base.json_text import parse_json
from megarl.data.images import ImageReader, with_image_tokens
from megarl.data.tokenizers import control_tokens, cut_middle, fewest_tokens, measured_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRUNCATIONS = ("error", "left", "right", "middle")
SYSTEM_COLUMN = "system"
TOOLS_COLUMN = "tools"
TRAINED_ROLE = "assistant"
"""Role of the response pieces that supervised fine-tuning trains on."""
_ENCODING = 2
"""Version of the encoding, for cached lengths: it changes with the tokens of a prompt."""
_SHOWN_CHARACTERS = 10_000
"""Characters of a prompt in which a tokenizer must know something; to tokenize megabytes takes minutes."""


class Prompt(NamedTuple):
    """Messages and tools of a prompt.

    Attributes:
        messages: chat messages, including the system message.
        tools: schemas of the tools that the prompt declares; None if the row has no tools entry.
        text: text to tokenize as it is, without the chat template; None = render the messages.
        images: one for each part of type ``image`` in the messages, in order.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    text: str | None = None
    images: tuple[Image, ...] = ()


@dataclass(frozen=True)
class PromptReader:
    """Reads the prompt of a row: its chat messages, system message, tools and images.

    Attributes:
        system_prompt: system message of rows without one (as first message or in the column ``system``); None = none.
        schemas: schemas of the tools that rows may name in the column ``tools``, by name.
        template_texts: whether a text is one user message for the chat template; False = it is tokenized as it is.
        images: reads the images; None = the model takes none.
    """

    key: str = "prompt"
    system_prompt: str | None = None
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    template_texts: bool = True
    images: ImageReader | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that :meth:`read` uses."""
        return (self.key, SYSTEM_COLUMN, TOOLS_COLUMN, *([] if self.images is None else [self.images.key]))

    def read(self, values: Mapping[str, Any], location: str, folder: str = ".") -> Prompt:
        """Read the prompt of a row.

        Args:
            location: file and row, for errors.
            folder: folder of relative paths of images.

        Raises:
            DataError: the row has two system messages, its tools are malformed or unknown, or see
                :meth:`megarl.data.images.ImageReader.read`.
        """
        prompt = values[self.key]
        if isinstance(prompt, str) and not self.template_texts:
            return self._text(prompt, values, location)
        messages = [_user_message(prompt)] if isinstance(prompt, str) else clean_messages(prompt)
        column, has_system = values.get(SYSTEM_COLUMN), messages[0]["role"] == "system"
        if column is not None and has_system:
            text = f"{location}: column {SYSTEM_COLUMN!r} and the prompt both have a system message; remove one"
            raise DataError(text, code="data.two-system-messages")
        system = self.system_prompt if column is None else column
        if system is not None and not has_system:
            if not isinstance(system, str):
                text = f"{location}: column {SYSTEM_COLUMN!r} must hold strings, not {system!r:.80}"
                raise DataError(text, code="data.column-type")
            messages = [{"role": "system", "content": system}, *messages]
        tools = self._tools(values.get(TOOLS_COLUMN), location)
        if self.images is None:
            return Prompt(messages, tools)
        messages, images = self.images.read(messages, values.get(self.images.key), location, folder)
        return Prompt(messages, tools, images=images)

    def _text(self, text: str, values: Mapping[str, Any], location: str) -> Prompt:
        for source, entry in (
            ("data.system_prompt", self.system_prompt),
            (f"column {SYSTEM_COLUMN!r}", values.get(SYSTEM_COLUMN)),
            (f"column {TOOLS_COLUMN!r}", values.get(TOOLS_COLUMN)),
            ("an image", self.images and (values.get(self.images.key) or PLACEHOLDER in text)),
        ):
            if entry:
                problem = f"{location}: {source} has no place in a plain-text prompt; set data.apply_chat_template=true"
                raise DataError(problem, code="data.plain-text-prompt")
        return Prompt([_user_message(text)], None, text)

    def _tools(self, entry: Any, location: str) -> list[dict[str, Any]] | None:
        if entry is None:
            return None
        tools = _parse_tools(entry, location) if isinstance(entry, str) else entry
        if not isinstance(tools, Sequence) or isinstance(tools, str):
            text = f"{location}: column {TOOLS_COLUMN!r} must be a list of tools, not {tools!r:.80}"
            raise DataError(text, code="data.column-type")
        return [self._tool(tool, location) for tool in tools]

    def _tool(self, tool: Any, location: str) -> dict[str, Any]:
        if isinstance(tool, str) and not tool.lstrip().startswith("{"):
            if tool not in self.schemas:
                names = sorted(self.schemas) or "none, set actor_rollout_ref.rollout.multi_turn.tool_config_path"
                text = f"{location}: column {TOOLS_COLUMN!r} names the tool {tool!r}; known tools: {names}"
                raise DataError(text, code="data.unknown-tool")
            return dict(self.schemas[tool])
        schema = _parse_tools(tool, location) if isinstance(tool, str) else tool
        function = schema.get("function") if isinstance(schema, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{location}: column {TOOLS_COLUMN!r} has {tool!r:.120}; a tool is its name, or its schema "
                '{"type": "function", "function": {"name", "description", "parameters"}}',
                code="data.tool-schema",
            )
        return {"type": "function", **clean_messages([schema])[0]}


class ModelVocabulary:
    """The tokens of a model, of which a tokenizer may have more.

    Such tokenizers exist (Gemma 3's has a token for images, which its text models lack), so rows are checked.

    Args:
        vocab_size: tokens of the model; None = unknown.

    Attributes:
        limit: the number of tokens, if the tokenizer has one beyond; None = rows need no check.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None) -> None:
        self.tokenizer = tokenizer
        exceeds = vocab_size is not None and max(tokenizer.get_vocab().values(), default=-1) >= vocab_size
        self.limit = vocab_size if exceeds else None

    def check(self, ids: Sequence[int], location: str) -> None:
        """Check the tokens of a row.

        Raises:
            DataError: the model lacks one; names the row.
        """
        largest = max(ids, default=-1)
        if self.limit is not None and largest >= self.limit:
            raise DataError(
                f"{location}: token {largest} ({self.tokenizer.convert_ids_to_tokens(largest)!r}) is beyond the "
                f"model's vocabulary of {self.limit} tokens; remove its text, or correct the model's tokenizer_path",
                code="tokenizer.beyond-vocabulary",
            )


class PromptEncoder:
    """Tokenizes prompts: messages by the chat template up to the start of the response, texts as they are.

    Args:
        generation_prompt: False renders complete conversations instead, including the last response.
        max_tokens: tokens of a prompt that are used, at most; a prompt that is several times longer by its length is
            tokenized without its middle, unless it has images. None = all are used.
        image_token: the model's image token, which becomes the tokens of an image; None = the model takes no images.

    Raises:
        DataError: the tokenizer has no chat template, or lacks the image token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        generation_prompt: bool = True,
        vocab_size: int | None = None,
        max_tokens: int | None = None,
        image_token: int | None = None,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            name = getattr(tokenizer, "name_or_path", "")
            text = f"the tokenizer {name!r} has no chat template; add one to its tokenizer_config.json"
            raise DataError(text, code="tokenizer.no-chat-template")
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})
        self.generation_prompt = generation_prompt
        self.vocabulary = ModelVocabulary(tokenizer, vocab_size)
        self._measured = None if max_tokens is None else measured_tokens(max_tokens)
        self.image_token = image_token
        self._image_text = "" if image_token is None else _text_of_token(tokenizer, image_token)

    def encode(self, prompt: Prompt, location: str) -> list[int]:
        """Tokenize one prompt.

        Raises:
            DataError: the template or the tokenizer rejects the prompt, or the model lacks one of its tokens.
        """
        with _named(prompt, location):
            if prompt.text is not None:
                ids = self._encode_text(self._shorten(prompt.text))
            else:
                (text,) = self._render([prompt.messages], prompt.tools)
                ids = self.encode_rendered(text if prompt.images else self._shorten(text))
        return self._checked(ids, prompt, location)

    def encode_rendered(self, text: str) -> list[int]:
        """Tokenize a rendered text, which has its special tokens."""
        return control_tokens(self.tokenizer).encode(text)

    def render(self, prompt: Prompt, location: str) -> str:
        """Render the messages of a prompt with the chat template; errors as in :meth:`encode`."""
        with _named(prompt, location):
            return self._render([prompt.messages], prompt.tools)[0]

    def encode_all(self, prompts: Sequence[Prompt], locations: Sequence[str]) -> list[list[int]]:
        """Tokenize many prompts, with one tokenizer call for all prompts with the same tools.

        Raises:
            DataError: as :meth:`encode`, for the first rejected prompt.
        """
        by_tools: dict[str, list[int]] = {}
        ids: list[list[int]] = [[] for _ in prompts]
        for index, prompt in enumerate(prompts):
            if prompt.text is not None:
                ids[index] = self.encode(prompt, locations[index])
                continue
            by_tools.setdefault("" if prompt.tools is None else json.dumps(prompt.tools), []).append(index)
        for group in by_tools.values():
            try:
                texts = self._render([prompts[index].messages for index in group], prompts[group[0]].tools)
                texts = [
                    text if prompts[index].images else self._shorten(text)
                    for index, text in zip(group, texts, strict=True)
                ]
                encoded = control_tokens(self.tokenizer).encode_all(texts)
            except Exception:  # repeat row by row, to name the row
                for index in group:
                    ids[index] = self.encode(prompts[index], locations[index])
                continue
            for index, prompt_ids in zip(group, encoded, strict=True):
                ids[index] = self._checked(prompt_ids, prompts[index], locations[index])
        return ids

    def check_vocabulary(self, prompts: Sequence[Prompt], location: str) -> None:
        """Check that the tokenizer knows the text of at least one of the first prompts.

        Raises:
            DataError: their text becomes no tokens, or unknown ones only.
        """
        texts = [text[:_SHOWN_CHARACTERS] for text in map(_text_of, prompts) if text[:_SHOWN_CHARACTERS].strip()]
        if not texts:
            return
        ids = {number for text in texts for number in self.tokenizer(text, add_special_tokens=False)["input_ids"]}
        if ids <= {self.tokenizer.unk_token_id}:
            raise DataError(
                f"{location}: the tokenizer {self.tokenizer.name_or_path!r} knows nothing of the first prompts, such "
                f"as {texts[0][:60]!r}; set the model's tokenizer_path to the tokenizer of the model",
                code="tokenizer.unknown-text",
            )

    def describe(self, tokens: int) -> str:
        """Return the number of encoded tokens as text; a large one may be a lower bound."""
        return str(tokens) if self._measured is None or tokens < self._measured else f"at least {tokens}"

    @property
    def identity(self) -> str:
        """Fingerprint of everything except the prompts that determines the token ids."""
        core = getattr(self.tokenizer, "backend_tokenizer", None)
        vocabulary = core.to_str() if core is not None else json.dumps(self.tokenizer.get_vocab(), sort_keys=True)
        parts = [vocabulary, str(self.tokenizer.chat_template), json.dumps(self.template_kwargs, default=str)]
        parts.append(f"{self.generation_prompt} {_ENCODING}{self.vocabulary.limit or ''} {self._measured}")
        if self.image_token is not None:
            parts.append(str(self.image_token))
        return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()

    def _encode_text(self, text: str) -> list[int]:
        """Tokenize a text with the tokenizer's first token (BOS), unless the text begins with it, as rendered ones."""
        ids, plain = (list(self.tokenizer(text, add_special_tokens=added)["input_ids"]) for added in (True, False))
        first = next((n for n in range(len(ids)) if ids[n : n + len(plain)] == plain), 0)
        return ids[first:] if first and plain[:first] == ids[:first] else ids

    def _checked(self, ids: list[int], prompt: Prompt, location: str) -> list[int]:
        """Check a prompt's tokens, and insert those of its images."""
        self.vocabulary.check(ids, location)
        return ids if self.image_token is None else with_image_tokens(ids, prompt.images, self.image_token, location)

    def _shorten(self, text: str) -> str:
        return text if self._measured is None else cut_middle(self.tokenizer, text, self._measured)

    def _render(self, messages: list[list[dict[str, Any]]], tools: list[dict[str, Any]] | None) -> list[str]:
        if self._image_text:  # only an image may become an image token
            messages = control_tokens(self.tokenizer).hide_token(messages, self._image_text)
        texts: list[str] = self.tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            add_generation_prompt=self.generation_prompt,
            tokenize=False,
            **self.template_kwargs,
        )
        return texts


@contextmanager
def _named(prompt: Prompt, location: str) -> Iterator[None]:
    """Name the row in errors of the template and the tokenizer."""
    try:
        yield
    except Exception as error:  # a template is a program and may raise any error
        roles = [message.get("role") for message in prompt.messages]
        raise DataError(
            f"{location}: the chat template rejects a prompt with roles {roles}: {error}; "
            "change the messages to a form that the model's template accepts",
            code="tokenizer.template-rejects",
        ) from error


def _text_of(prompt: Prompt) -> str:
    contents = [message.get("content") for message in prompt.messages]
    parts = (part for content in contents if isinstance(content, list) for part in content)
    texts = (*contents, *(part.get("text") for part in parts))
    return prompt.text or "\n".join(text for text in texts if isinstance(text, str))


def _text_of_token(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    text = tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else None
    if text is None:
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path!r} has no token {token}, the image token of the model; set the "
            "model's tokenizer_path to the tokenizer of the model",
            code="tokenizer.no-image-token",
        )
    return str(text)


def _user_message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def clean_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Drop null fields of messages or tools, which columnar files add if other rows have the field.

    Nulls further inside stay: JSON has them, and the rows of columnar files have lost them already.
    """
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def check_truncation(truncation: str) -> None:
    """Raise DataError for an unknown truncation."""
    if truncation not in TRUNCATIONS:
        text = f"data.truncation={truncation} must be one of {', '.join(TRUNCATIONS)}"
        raise DataError(text, code="data.unknown-truncation")


def truncate(ids: list[int], limit: int, truncation: str) -> list[int]:
    """Truncate ids to ``limit`` at the left, right or middle (for an odd limit the end keeps one more).

    Raises:
        DataError: the ids exceed the limit and ``truncation`` is ``error``.
    """
    if len(ids) <= limit:
        return ids
    if truncation == "error":
        raise DataError(f"{len(ids)} tokens, at most {limit} allowed", code="data.prompt-too-long")
    head = {"left": 0, "right": limit, "middle": limit // 2}[truncation]
    return ids[:head] + ids[len(ids) - (limit - head) :]


def _parse_tools(text: str, location: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{location}: column {TOOLS_COLUMN!r} is not JSON ({error})", code="data.not-json") from error


class EncodedResponse(NamedTuple):
    """Token ids of a response, with 1 in ``mask`` for trained tokens."""

    ids: list[int]
    mask: list[int]


class ResponseEncoder:
    """Tokenizes responses piece by piece.

    Args:
        key: column of the response's text or pieces.
        max_tokens: tokens that are used, at most, as in :class:`PromptEncoder`, for each piece.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, key: str, vocab_size: int | None, max_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.key = key
        self.vocabulary = ModelVocabulary(tokenizer, vocab_size)
        self._measured = measured_tokens(max_tokens)

    def encode(self, rows: Sequence[Mapping[str, Any]], locations: Sequence[str]) -> list[EncodedResponse]:
        """Tokenize the responses of rows.

        Raises:
            DataError: a response has no trained piece, a piece is malformed, or the model lacks a token; names its row.
        """
        pieces = [self._pieces(row[self.key], location) for row, location in zip(rows, locations, strict=True)]
        texts = [cut_middle(self.tokenizer, piece["content"], self._measured) for row in pieces for piece in row]
        encoded = iter(self.tokenizer(texts, add_special_tokens=False)["input_ids"])
        responses = []
        for row, location in zip(pieces, locations, strict=True):
            ids, mask = [], []
            for piece in row:
                piece_ids = next(encoded)
                ids += piece_ids
                mask += [int(piece["role"] == TRAINED_ROLE)] * len(piece_ids)
            ids.append(self.tokenizer.eos_token_id)
            self.vocabulary.check(ids, location)
            responses.append(EncodedResponse(ids, [*mask, 1]))
        return responses

    @staticmethod
    def _pieces(response: str | Sequence[Mapping[str, str]], location: str) -> list[Mapping[str, str]]:
        if isinstance(response, str):
            return [{"role": TRAINED_ROLE, "content": response}]
        pieces = list(response)
        if any(piece["role"] is None or piece["content"] is None for piece in pieces):
            text = f"{location}: a piece of the response lacks role or content; each needs both as strings"
            raise DataError(text, code="data.response-piece")
        if not any(piece["role"] == TRAINED_ROLE for piece in pieces):
            roles = [piece["role"] for piece in pieces]
            text = f"{location}: no piece of the response has the trained role {TRAINED_ROLE!r}; roles {roles}"
            raise DataError(text, code="data.no-assistant-message")
        return pieces


class EncodedConversation(NamedTuple):
    """Token ids before the first assistant message, and of everything from it on."""

    prompt: list[int]
    response: EncodedResponse


class ConversationEncoder:
    """Tokenizes conversations by the chat template; trains on assistant messages with their closing tokens.

    The tokens before an assistant message equal a generation prompt's, and are not trained. No token extends
    over the end of one: a message that begins with a line break is encoded as the policy would write it. Each turn must
    be rendered in the same way whether or not others follow; a template that changes earlier turns is an error.

    Args:
        max_tokens: tokens of a conversation that are used, at most. A conversation that is several times longer by its
            length is refused: to cut it, all of it would have to be tokenized.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        reader: PromptReader,
        max_tokens: int,
        template_kwargs: Mapping[str, Any] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.reader = reader
        self.max_tokens = max_tokens
        self.before = PromptEncoder(tokenizer, template_kwargs, vocab_size=vocab_size)
        self.complete = PromptEncoder(tokenizer, template_kwargs, generation_prompt=False, vocab_size=vocab_size)

    @property
    def identity(self) -> str:
        """Fingerprint of tokenizer, template and columns."""
        return f"conversations|{self.before.identity}|{self.reader}"

    def encode(self, values: Mapping[str, Any], location: str) -> EncodedConversation:
        """Tokenize the conversation of a row.

        Raises:
            DataError: it is no list of messages, is far too long, has no assistant message or starts with one, or the
                template rejects it or renders earlier turns differently later on.
        """
        if isinstance(values[self.reader.key], str):
            problem = f"{location}: column {self.reader.key!r} holds a text, not the messages of a conversation"
            raise DataError(problem, code="data.not-messages")
        prompt = self.reader.read(values, location)
        fewest = fewest_tokens(self.before.tokenizer, [prompt.messages, prompt.tools or ()])
        if fewest > measured_tokens(self.max_tokens):
            raise DataError(
                f"{location}: the conversation has at least {fewest} tokens, data.max_length={self.max_tokens} allows "
                "no more, and data.truncation cuts no conversation that is this long; shorten the row, or remove it",
                code="data.conversation-too-long",
            )
        trained = [i for i, message in enumerate(prompt.messages) if message["role"] == TRAINED_ROLE]
        if not trained or trained[0] == 0:
            roles = [message["role"] for message in prompt.messages]
            problem = f"{location}: a conversation needs an {TRAINED_ROLE} message after its prompt; roles {roles}"
            raise DataError(problem, code="data.no-assistant-message")
        ids, mask, first, written = list[int](), list[int](), 0, ""
        for turn in trained:
            for encoder, end, is_trained in ((self.before, turn, 0), (self.complete, turn + 1, 1)):
                text = encoder.render(Prompt(prompt.messages[:end], prompt.tools), location)
                if not text.startswith(written):
                    raise DataError(
                        f"{location}: the chat template renders the turns before message {end - 1} differently once it "
                        "follows (as templates do that remove thinking); make one row per assistant message",
                        code="tokenizer.template-rewrites-turns",
                    )
                rendered = encoder.encode_rendered(text)
                if rendered[: len(ids)] != ids:  # a token would extend over the border, as two line breaks
                    rendered = ids + encoder.encode_rendered(text.removeprefix(written))
                mask += [is_trained] * (len(rendered) - len(ids))
                ids, written = rendered, text
                self.complete.vocabulary.check(ids, location)
                first = first or len(rendered)
        return EncodedConversation(ids[:first], EncodedResponse(ids[first:], mask[first:]))
