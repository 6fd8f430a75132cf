"""Agent loops: base class, registry, the single-turn loop, and the transcript of a trajectory's tokens.

Token in, token out: generated token ids stay in the context unchanged and are never re-tokenized. Only the
environment's messages are tokenized, separately, and appended with mask 0 (:class:`Transcript`).
"""

from __future__ import annotations

import abc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from megarl.agents.event_loop import in_image_thread, in_tokenizer_thread
from megarl.agents.frames import encode_prompt, turn_frame
from megarl.agents.types import (
    AgentError,
    Conversation,
    Generate,
    Message,
    SessionProvider,
    Trajectory,
    TrajectoryEnd,
)
from megarl.base.errors import DataError
from megarl.base.image_files import decode_image
from megarl.base.image_tokens import Image
from megarl.base.registry import Registry
from megarl.base.seeds import derive_seed
from megarl.base.user_code import load_user_class
from megarl.data.images import IMAGES, ImageReader, read_parts
from megarl.data.tokenizers import fewest_tokens
from megarl.rollout.interface import NO_VERSION, Completion, SamplingParams, no_support

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.config import GenerationJobConfig


class AgentLoop(abc.ABC):
    """Base class of agent loops: generates the turns of a conversation and returns its trajectory.

    One object leads many conversations concurrently, so per-conversation state belongs in :meth:`run`.

    Attributes:
        endpoint: chat endpoint of the run, for loops that external agents drive; None = the run serves no endpoint.
    """

    endpoint: SessionProvider | None = None

    @classmethod  # noqa: B027 -- most loops have no requirements
    def check(cls, config: GenerationJobConfig, **options: Any) -> None:
        """Check the requirements of :meth:`create` before any process starts and without a tokenizer.

        Raises:
            ConfigError: a requirement is missing; names the key or the option.
        """

    @classmethod
    def create(cls, config: GenerationJobConfig, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Self:
        """Build the loop.

        Args:
            options: keys of the loop's entry in ``agent_loop_config_path``, without ``name`` and ``_target_``.
        """
        return cls(**options)

    @abc.abstractmethod
    async def run(self, conversation: Conversation, generate: Generate) -> Trajectory:
        """Lead one conversation to its end.

        An exception fails this conversation only. Run blocking calls in a thread (``asyncio.to_thread``): a blocking
        call in the event loop stops all conversations.
        """


# These built-in loops are imported on first use, because tools and search import further packages.
AGENT_LOOPS: Registry[type[AgentLoop]] = Registry(
    "agent_loop",
    lazy={
        "tool_agent": "megarl.agents.tool_agent",
        "search_agent": "megarl.agents.search_agent",
        "external_agent": "megarl.agents.external_agent",
    },
    loader=lambda spec, key: load_user_class(spec, AgentLoop, key),
    hint="or write path.py:Class",
)


register_agent_loop = AGENT_LOOPS.register
"""Decorator that registers an agent loop under the name used in rows and configuration."""


async def encode_messages(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Encode the messages of a conversation outside the event loop, unless their bytes prove that they are too long.

    Raises:
        AgentError: the prompt is too long, or the template refuses it.
    """
    texts, longest = [conversation.messages, json.dumps(tools, ensure_ascii=False)], conversation.limits.prompt_tokens
    if longest is not None and (tokens := fewest_tokens(tokenizer, texts)) > longest:
        text = f"the prompt has at least {tokens} tokens; data.max_prompt_length={longest} allows no more"
        raise AgentError(text, code="agent.prompt-too-long")
    images, image_token = conversation.facts.get(IMAGES) or (), conversation.image_token
    return await in_tokenizer_thread(
        partial(encode_prompt, tokenizer, conversation.messages, tools, template_kwargs, images, image_token)
    )


async def read_images(
    messages: Sequence[Message],
    reader: ImageReader | None,
    location: str,
    first: int = 0,
    *,
    check_tokens: Callable[[int], object],
) -> tuple[list[dict[str, Any]], list[Image]]:
    """Read the images of messages in threads, and decode them to find damages; see :func:`read_parts`.

    Args:
        check_tokens: called with the number of their tokens before any is decoded; raises if there is no room for them.

    Raises:
        DataError: an image cannot be read.
    """
    shown, images = await in_image_thread(partial(read_parts, messages, reader, location, first))
    check_tokens(sum(image.rows * image.columns for image in images.values()))
    for where, image in images.items():
        await in_image_thread(partial(decode_image, image.data, where))
    return shown, list(images.values())


class _NoRoomError(Exception):
    """The images of a turn have no room."""


class Transcript:
    """Tokens of a conversation with mask, log-probs and weight versions, in order.

    Args:
        prompt_ids: encoded prompt, if it differs from the conversation's.

    Raises:
        AgentError: the prompt is too long.
    """

    def __init__(self, conversation: Conversation, prompt_ids: Sequence[int] | None = None) -> None:
        self.conversation = conversation
        self.prompt_ids = list(conversation.prompt_ids if prompt_ids is None else prompt_ids)
        longest = conversation.limits.prompt_tokens
        if longest is not None and len(self.prompt_ids) > longest:
            raise AgentError(
                f"the prompt has {len(self.prompt_ids)} tokens, with the tools that it declares; "
                f"data.max_prompt_length={longest} allows no more, raise it",
                code="agent.prompt-too-long",
            )
        self.response_ids: list[int] = []
        self.response_mask: list[int] = []
        self.log_probs: list[float] = []
        self.assistant_turns = 0
        self.user_turns = 0
        self._versions: list[int] = []
        self._support: list[np.ndarray] = []
        self._last_token: int | None = None

    @property
    def room(self) -> int:
        """Number of response tokens left."""
        return self.conversation.response_tokens - len(self.response_ids)

    async def generate(
        self, generate: Generate, params: SamplingParams | None = None, seed: int | None = None
    ) -> Completion:
        """Generate the policy's next turn and append it.

        Args:
            params: sampling parameters of this turn, ``max_new_tokens`` capped by :attr:`room`; None = the
                conversation's.
            seed: seed of this turn; None = :func:`turn_seed`.

        Raises:
            AgentError: no token is left, or the engine aborted the turn.
        """
        params, room = params or self.conversation.params, self.room
        if room < 1:
            raise AgentError(f"all {len(self.response_ids)} response tokens are used up", code="agent.no-tokens-left")
        if params.max_new_tokens > room:
            params = replace(params, max_new_tokens=room)
        completion = await generate(
            self.prompt_ids + self.response_ids,
            params,
            seed=turn_seed(self.conversation.seed, self.assistant_turns) if seed is None else seed,
            key=self.conversation.key,
        )
        if completion.finish_reason == "abort":
            raise AgentError(f"the engine aborted turn {self.assistant_turns + 1}", code="agent.engine-aborted")
        self.append(completion)
        return completion

    def append(self, completion: Completion) -> None:
        """Append a turn of the policy (mask 1)."""
        tokens = len(completion.token_ids)
        self.response_ids += completion.token_ids
        self.response_mask += [1] * tokens
        self.log_probs += completion.log_probs
        self._versions += completion.weight_versions or [completion.weight_version] * tokens
        self._support.append(self._no_support(tokens) if completion.support is None else completion.support)
        self._last_token = completion.token_ids[-1] if tokens else None
        self.assistant_turns += 1

    def observe(self, ids: Sequence[int]) -> bool:
        """Append a turn of the environment (mask 0) if it leaves room for a token of the policy; return whether."""
        if len(ids) >= self.room:
            return False
        self.response_ids += ids
        self.response_mask += [0] * len(ids)
        self.log_probs += [0.0] * len(ids)
        self._versions += [self._versions[-1] if self._versions else NO_VERSION] * len(ids)
        self._support.append(self._no_support(len(ids)))
        self.user_turns += 1
        return True

    def _no_support(self, tokens: int) -> np.ndarray:
        return no_support(tokens, self.conversation.params.support)

    async def observe_messages(
        self,
        tokenizer: PreTrainedTokenizerBase,
        messages: Sequence[Message],
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> bool:
        """Append messages of the environment as a turn if it leaves room for a token of the policy; return whether.

        Args:
            messages: such as one of role ``tool`` per result; a content is a text, or a list of parts with images, see
                :func:`megarl.data.images.read_parts`.

        Raises:
            AgentError: an image cannot be read, or the chat template refuses the messages.
        """
        location, images = f"turn {self.user_turns + 1} of the environment, message {{}}, part {{}}", list[Image]()
        reader, token = self.conversation.image_reader, self.conversation.image_token
        try:
            if not all(isinstance(message.get("content"), str) for message in messages):
                messages, images = await read_images(messages, reader, location, check_tokens=self._check_room)
                self.conversation.add_images(images)
            frame = partial(turn_frame, tokenizer, messages, self._last_token, template_kwargs, images, token)
            return self.observe(await in_tokenizer_thread(frame))
        except _NoRoomError:
            return False
        except DataError as error:
            raise AgentError(error.text, code=error.code) from error

    def _check_room(self, tokens: int) -> None:
        if tokens >= self.room:
            raise _NoRoomError

    def end(
        self,
        reason: TrajectoryEnd,
        metrics: Mapping[str, float] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        """Return the trajectory of the conversation so far."""
        versions = {version for version in self._versions if version != NO_VERSION}
        return Trajectory(
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
            response_mask=self.response_mask,
            log_probs=self.log_probs,
            finish_reason=reason,
            num_turns=1 + self.assistant_turns + self.user_turns,
            weight_version=min(versions, default=NO_VERSION),
            weight_versions=self._versions if len(versions) > 1 else (),
            metrics=dict(metrics or {}),
            fields=dict(fields or {}),
            support=np.concatenate(self._support) if self.conversation.params.support and self._support else None,
        )


@register_agent_loop("single_turn_agent")
class SingleTurnLoop(AgentLoop):
    """Generates one response per prompt; without a tokenizer, all prompts must be encoded."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None = None, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})

    @classmethod
    def create(cls, config: GenerationJobConfig, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Self:
        """Build the loop with the configured template arguments."""
        return cls(tokenizer, config.data.apply_chat_template_kwargs, **options)

    async def run(self, conversation: Conversation, generate: Generate) -> Trajectory:
        """Generate one turn; without a transcript, for speed at thousands of conversations per second."""
        prompt_ids = conversation.prompt_ids or await self._encode(conversation)
        completion = await generate(prompt_ids, conversation.params, seed=conversation.seed, key=conversation.key)
        if completion.finish_reason == "abort":
            raise AgentError("the engine aborted the response", code="agent.engine-aborted")
        return Trajectory(
            prompt_ids=prompt_ids,
            response_ids=completion.token_ids,
            response_mask=[1] * len(completion.token_ids),
            log_probs=completion.log_probs,
            finish_reason=completion.finish_reason,
            num_turns=2,
            weight_version=completion.weight_version,
            weight_versions=completion.weight_versions,
            support=completion.support,
        )

    async def _encode(self, conversation: Conversation) -> list[int]:
        if self.tokenizer is None:
            raise AgentError("single_turn_agent has no tokenizer to encode messages with", code="agent.no-tokenizer")
        return await encode_messages(self.tokenizer, conversation, template_kwargs=self.template_kwargs)


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn: the conversation's for turn 0, a derived one for later turns."""
    return seed if turn == 0 else derive_seed(seed, f"turn {turn}")
