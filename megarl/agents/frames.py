"""Chat template rendering for multi-turn conversations: the prompt, and the frame between two turns of the policy.

A multi-turn conversation is never rendered as a whole, because re-tokenizing generated text could give other token ids.
Only the frame, from the end of one assistant turn to the start of the next, comes from the chat template. To get it, a
short conversation with a marker as assistant turn is rendered; the text after the marker is the frame.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from megarl.agents.types import AgentError, Message
from megarl.base.image_tokens import Image
from megarl.data.images import with_image_tokens
from megarl.data.tokenizers import MARK, control_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = f"{MARK}turn@@"


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    images: Sequence[Image] = (),
    image_token: int | None = None,
) -> list[int]:
    """Encode a prompt with the generation prompt of the assistant's turn.

    Args:
        images: one for each part of type ``image`` in the messages.
        image_token: the policy's image token; needed with images.

    Raises:
        AgentError: the template refuses the messages.
        DataError: the template writes another number of image tokens.
    """
    control = control_tokens(tokenizer)
    if image_token is not None:  # only an image may become an image token
        messages = control.hide_token(messages, str(tokenizer.convert_ids_to_tokens(image_token)))
    text = _render(tokenizer, messages, tools=list(tools) if tools else None, **(template_kwargs or {}))
    ids = control.encode(text)
    return ids if image_token is None else with_image_tokens(ids, images, image_token, "the conversation")


def turn_frame(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    last_token: int | None,
    template_kwargs: Mapping[str, Any] | None = None,
    images: Sequence[Image] = (),
    image_token: int | None = None,
) -> list[int]:
    """Encode the environment's messages, from an assistant turn's end to the next one's start.

    The messages are external text: none of their characters becomes a control token.

    Args:
        messages: messages of the environment, such as one of role ``tool`` per result.
        last_token: last generated token; if it is a special token, the model closed its turn, and the frame starts
            after the closing token.
        images, image_token: see :func:`encode_prompt`.

    Raises:
        AgentError: the template refuses the messages, or does not render an assistant's text verbatim.
        DataError: the template writes another number of image tokens.
    """
    control = control_tokens(tokenizer)
    start = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    messages = control.hide_messages(messages)
    if image_token is not None:
        messages = control.hide_token(messages, str(tokenizer.convert_ids_to_tokens(image_token)))
    text = _render(tokenizer, [*start, *messages], **(template_kwargs or {}))
    before, mark, frame = text.partition(_MARK)
    if not mark or _MARK in frame or _MARK in before:
        problem = "the chat template does not show an assistant's text once and verbatim, so no turn can be appended"
        raise AgentError(problem, code="tokenizer.template-hides-turns")
    if last_token in control.special_ids:
        frame = _without_close(frame, control.special)
    ids = control.encode(frame)
    return ids if image_token is None else with_image_tokens(ids, images, image_token, "the new messages")


def _without_close(frame: str, special: Collection[str]) -> str:
    """Remove the special token that closes the assistant turn from the start of a frame.

    The generated closing token may be another one: Llama 3 ends a tool call with ``<|eom_id|>``.
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
        text = f"the chat template refuses messages of roles {roles}: {error}"
        raise AgentError(text, code="tokenizer.template-rejects") from error
