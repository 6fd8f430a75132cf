"""Tokenization of whole conversations for fine-tuning: every assistant message is trained on; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from megarl.base.errors import DataError
from megarl.data.rows import Rows
from megarl.data.text_bounds import fewest_tokens, measured_tokens
from megarl.data.tokenization import TRAINED_ROLE, EncodedResponse, Prompt, PromptEncoder, PromptReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class EncodedConversation(NamedTuple):
    """Token ids before the first assistant message, and of everything from it on."""

    prompt: list[int]
    response: EncodedResponse


class ConversationEncoder:
    """Tokenizes conversations by the chat template; trains on assistant messages with their closing tokens.

    The tokens before an assistant message are those of a generation prompt, and are not trained. No token extends
    over the end of one: a message that begins with a line break is encoded as the policy would write it. Each turn must
    be rendered in the same way whether or not others follow; a template that changes earlier turns is an error.

    Args:
        reader: reads the messages, system message and tools of a row.
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


class ConversationLengths:
    """Measures conversations in tokens: before the first assistant message, and from it on."""

    def __init__(self, encoder: ConversationEncoder) -> None:
        self.encoder = encoder

    @property
    def identity(self) -> str:
        """Fingerprint of everything except the rows that determines the counts."""
        return self.encoder.identity

    def __call__(self, rows: Rows, start: int, stop: int) -> Sequence[tuple[int, int]]:
        """Count the tokens of each conversation."""
        values = rows.slice(self.encoder.reader.columns, start, stop)
        encoded = [self.encoder.encode(row, rows.location(start + i)) for i, row in enumerate(values)]
        return [(len(conversation.prompt), len(conversation.response.ids)) for conversation in encoded]
