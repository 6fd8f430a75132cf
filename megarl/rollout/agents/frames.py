"""What the chat template puts around the environment's turns, as text and as tokens.

A multi-turn conversation is never rendered as a whole: rendering and tokenizing again what the model wrote could give
other tokens than those it wrote. Only the piece between the end of the model's turn and the begin of its next one is
taken from the template: a short conversation is rendered whose assistant turn is a mark, and the text behind the mark
is that piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from megarl.rollout.agents.loop import AgentError, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "@@megarl-turn@@"


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a prompt up to where the answer begins.

    Args:
        tokenizer: with a chat template.
        messages: chat messages.
        tools: schemas of the tools that the prompt declares.
        template_kwargs: extra arguments for the template.

    Raises:
        AgentError: the template refuses the messages.
    """
    text = _render(tokenizer, messages, tools=list(tools) if tools else None, **(template_kwargs or {}))
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def turn_frame(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    last_token: int | None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of the environment's messages, from the end of the model's turn to the begin of its next.

    Args:
        tokenizer: with a chat template.
        messages: what the environment says, such as a message of role ``tool`` for each result.
        last_token: the last token that the model wrote: where it closed its turn itself, that is not done again.
        template_kwargs: extra arguments for the template.

    Raises:
        AgentError: the template refuses such messages, or does not show an assistant's text as it is.
    """
    start = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    text = _render(tokenizer, [*start, *messages], **(template_kwargs or {}))
    before, mark, frame = text.partition(_MARK)
    if not mark or _MARK in frame or _MARK in before:
        raise AgentError("the chat template does not show an assistant's text once, as it is; no turn can be appended")
    if last_token is not None and last_token in tokenizer.all_special_ids:
        frame = _without_close(frame, tokenizer.all_special_tokens)
    return list(tokenizer(frame, add_special_tokens=False)["input_ids"])


def plain_text(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """A text from outside without the tokenizer's special tokens, which would let it pass for a turn of the chat."""
    for token in tokenizer.all_special_tokens:
        text = text.replace(token, "")
    return text


def _without_close(frame: str, special: Sequence[str]) -> str:
    """The frame without the special token that closes the model's turn, which the model wrote itself.

    It may have written another one, as Llama 3 does after a call of a tool.
    """
    stripped = frame.lstrip()
    close = max((token for token in special if stripped.startswith(token)), key=len, default="")
    return stripped[len(close) :] if close else frame


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **kwargs: Any) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=False, **kwargs
            )
        )
    except TemplateError as error:
        roles = [message.get("role") for message in messages]
        raise AgentError(f"the chat template refuses messages of roles {roles}: {error}") from error
