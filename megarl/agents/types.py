"""Types of the agents: conversation in, trajectory out, and the interfaces between loops, engine and chat endpoint.

This module imports no other module of the package ``agents``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from megarl.base.errors import MegarlError
from megarl.base.image_files import MAX_BYTES
from megarl.base.image_tokens import Image, equal_keys_error
from megarl.data.images import ImageReader
from megarl.rewards.outcome import Outcome
from megarl.rollout.interface import NO_VERSION, Completion, FinishReason, SamplingParams

if TYPE_CHECKING:
    from megarl.rewards.pool import RunCounts
    from megarl.rollout.router import Replica, RouterStats

AGENT_NAME = "agent_name"
"""Column with the name of a row's agent loop."""
TRAINING_REWARD, VALIDATION_REWARD = "training", "validation"
"""Names of the scorers of training and of validation samples."""
LARGEST_BODY = 2 * MAX_BYTES
"""Largest body that the chat endpoint reads, in bytes: room for the largest image in base64, and for texts."""
Message: TypeAlias = Mapping[str, Any]
Integers: TypeAlias = Sequence[int] | np.ndarray
TrajectoryEnd: TypeAlias = Literal["stop", "length", "turns", "error"]


class AgentError(MegarlError):
    """The failure of one conversation."""


class Generate(Protocol):
    """Generate one turn of the policy; the router of the rollout engines implements it."""

    async def __call__(self, prompt_ids: Sequence[int], params: SamplingParams, *, seed: int, key: str) -> Completion:
        """Return the policy's continuation of ``prompt_ids``.

        Args:
            prompt_ids: the whole context, prompt and earlier turns.
            key: name of the conversation's prompt; the router sends requests with the same key (a shared prefix) to the
                same replica.
        """


class GenerateWithImages(Protocol):
    """Generate one turn outside a conversation."""

    async def __call__(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, seed: int, key: str, images: Sequence[Image]
    ) -> Completion:
        """See :class:`Generate`; ``images`` has those of the prompt."""


def narrow_ids(ids: Integers) -> np.ndarray:
    """Return token ids as int32; as int64 if some are of images, which are negative and large."""
    wide = np.asarray(ids, np.int64)
    return wide if wide.min(initial=0) < 0 else wide.astype(np.int32)


@dataclass(frozen=True)
class ConversationLimits:
    """Limits of one conversation in tokens, turns and time.

    Attributes:
        response_tokens: tokens after the prompt, including the environment's; None = ``max_new_tokens`` of the sampling
            parameters.
        assistant_turns: turns of the policy; None = no limit.
        user_turns: turns of the environment; None = no limit.
        seconds: wall time, above which the conversation fails; None = no limit.
        prompt_tokens: tokens of the prompt with its tool declarations, above which the conversation fails; None = no
            limit.
    """

    response_tokens: int | None = None
    assistant_turns: int | None = None
    user_turns: int | None = None
    seconds: float | None = None
    prompt_tokens: int | None = None


@dataclass(frozen=True)
class Conversation:
    """One sample of a prompt before its rollout: the input of an agent loop.

    Attributes:
        prompt_ids: prompt as encoded by the dataset; empty: the loop encodes ``messages``.
        seed: seed of the first turn; later turns use :func:`megarl.agents.loop.turn_seed`.
        key: name of the prompt, the same for all samples of its group.
        facts: the other columns of the data row, such as ``data_source`` and ``extra_info``; read-only.
        image_reader: reads the images of later turns; None = the policy reads text alone.
        images: images of the prompt, and those that later turns have added so far; requests have those of their ids.
    """

    messages: Sequence[Message]
    params: SamplingParams
    prompt_ids: Sequence[int] = ()
    seed: int = 0
    key: str = ""
    agent_name: str = "single_turn_agent"
    facts: Mapping[str, Any] = field(default_factory=dict)
    limits: ConversationLimits = ConversationLimits()
    image_reader: ImageReader | None = None
    images: list[Image] = field(default_factory=list)

    @property
    def image_token(self) -> int | None:
        """The policy's image token; None if it reads text alone."""
        return None if self.image_reader is None else self.image_reader.token

    def add_images(self, images: Iterable[Image]) -> None:
        """Add images that later turns show; known ones are ignored.

        Raises:
            DataError: an image shares its key with another one.
        """
        known = {image.key: image for image in self.images}
        for image in images:
            if (other := known.get(image.key)) is None:
                known[image.key] = image
                self.images.append(image)
            elif other != image or len(other.file) != len(image.file):
                raise equal_keys_error(image.key)

    @property
    def response_tokens(self) -> int:
        """Maximum number of tokens after the prompt."""
        limit = self.limits.response_tokens
        return self.params.max_new_tokens if limit is None else limit


@dataclass(frozen=True)
class Trajectory:
    """Result of a conversation: token ids with masks and log-probs, one entry per response token.

    Attributes:
        response_ids: token ids after the prompt, including the environment's turns.
        response_mask: 1 = generated by the policy, 0 = written by the environment; all 0 if ``error`` is set.
        log_probs: log-probs of the generated tokens as sampled by the engine; 0.0 for the environment's tokens.
        finish_reason: ``stop``: the policy or the loop ended the conversation; ``length``, ``turns``: the limit of
            tokens or turns was reached; ``error``: the conversation failed.
        num_turns: number of messages: the prompt, the policy's turns and the environment's turns.
        weight_version: oldest version of the weights that generated a token.
        weight_versions: version per response token if several versions occur (an environment's token has the version of
            the turn before it); else empty.
        metrics: numbers of this conversation, see :func:`megarl.agents.trajectories.trajectory_metrics`.
        error: cause of the failure; None: the conversation succeeded.
        unmasked: ``response_mask`` before the failure was recorded; empty without a failure.
        routes: int16 ``[tokens, expert layers, per token]``, experts of the first tokens, prompt and response; None
            without routing replay R3, and if the engine has computed nothing.
        support: int32 ``[response tokens, SamplingParams.support]``, the tokens that each generated token was sampled
            from; -1 = none. None if the conversation's parameters have no ``support``.
        outcome: score of the reward functions; None: not scored yet.
        images: images in the tokens besides those of the data row, each once.
    """

    prompt_ids: Integers
    response_ids: Integers
    response_mask: Integers
    log_probs: Sequence[float] | np.ndarray
    finish_reason: TrajectoryEnd
    num_turns: int
    weight_version: int = NO_VERSION
    weight_versions: Integers = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    unmasked: Integers = ()
    routes: np.ndarray | None = field(default=None, compare=False, repr=False)
    support: np.ndarray | None = field(default=None, compare=False, repr=False)
    outcome: Outcome | None = None
    images: Sequence[Image] = ()

    @property
    def generated_mask(self) -> Integers:
        """1 = generated by the policy, for failed conversations too."""
        return self.unmasked if self.error is not None else self.response_mask

    def failed(self, error: str) -> Trajectory:
        """Return a copy marked as failed, with a response mask of zeros."""
        length = len(self.response_ids)
        unmasked = self.response_mask if len(self.response_mask) == length else [0] * length
        log_probs = self.log_probs if len(self.log_probs) == length else [0.0] * length
        return replace(
            self, response_mask=[0] * length, unmasked=unmasked, log_probs=log_probs, finish_reason="error", error=error
        )


class SampleId(NamedTuple):
    """Name of a sample: the number of its group, unique among running ones, and its number within the group."""

    group: int
    sample: int


@dataclass(frozen=True)
class StoredTurn:
    """A turn of an unfinished conversation, which a checkpoint stores.

    Attributes:
        context: digest of the turn's prompt and seed, see :func:`megarl.agents.turns.context_digest`.
        token_ids: int32 ``[n]`` generated tokens.
        log_probs: float32 ``[n]``.
        versions: int32 ``[n]`` weight version of each token.
        finish_reason: see :class:`~megarl.rollout.interface.Completion`; ``abort``: the turn is unfinished.
        routes: see :class:`~megarl.rollout.interface.Completion`; likewise ``support``.
    """

    context: str
    token_ids: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason
    routes: np.ndarray | None = None
    support: np.ndarray | None = None

    @classmethod
    def of(cls, context: str, completion: Completion) -> StoredTurn:
        """Build the turn of a completion."""
        return cls(
            context,
            np.array(completion.token_ids, np.int32),
            np.array(completion.log_probs, np.float32),
            np.array(completion.versions, np.int32),
            completion.finish_reason,
            completion.routes,
            completion.support,
        )

    @property
    def completion(self) -> Completion:
        """The turn as a completion."""
        versions = self.versions.tolist()
        return Completion(
            request_id=self.context,
            token_ids=self.token_ids.tolist(),
            log_probs=self.log_probs.tolist(),
            finish_reason=self.finish_reason,
            weight_version=min(versions, default=NO_VERSION),
            weight_versions=tuple(versions) if len(set(versions)) > 1 else (),
            routes=self.routes,
            support=self.support,
        )


@dataclass(frozen=True)
class ConversationGroup:
    """Conversations about one prompt, as they are submitted to an agent runner; see :class:`Conversation`.

    Attributes:
        prompt_ids: token ids of the prompt, int32 ``[P]``; int64 if there are images, see :func:`narrow_ids`.
        params: sampling parameters of each sample.
        seeds: seed of each sample's first turn.
        with_turns: record the turns, for :meth:`ConversationService.stored_turns`.
        reward: name of the scorer of its samples; empty = they are not scored here.
        samples: numbers of the samples to generate; None = all.
        turns: turns from a checkpoint, by sample; the last one of a sample may be unfinished.
    """

    number: int
    messages: Sequence[Message]
    prompt_ids: np.ndarray
    params: Sequence[SamplingParams]
    seeds: Sequence[int]
    key: str
    agent_name: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    with_routes: bool = False
    with_turns: bool = False
    reward: str = ""
    samples: Collection[int] | None = None
    turns: Mapping[int, Sequence[StoredTurn]] = field(default_factory=dict)

    @property
    def ids(self) -> list[SampleId]:
        """Names of the samples to generate."""
        samples = range(len(self.seeds))
        return [SampleId(self.number, sample) for sample in samples if self.samples is None or sample in self.samples]


class ConversationService(Protocol):
    """Leads conversations and returns their scored trajectories: an agent runner, or several in processes.

    Between :meth:`open` and :meth:`close`, groups may be submitted at any time.
    """

    def open(self, replicas: Mapping[int, Replica]) -> None:
        """Serve conversations with these rollout replicas, by number, from now on."""

    def set_replicas(self, replicas: Mapping[int, Replica]) -> None:
        """Replace the rollout replicas; conversations go on.

        Responses of a replica that leaves continue on the others after their last token; when the call returns, it has
        no request. Responses of a lost replica begin again.
        """

    def submit(self, groups: Sequence[ConversationGroup]) -> None:
        """Start conversations, in this order, without waiting for them."""

    def finished(self, wait_s: float) -> dict[SampleId, Trajectory]:
        """Return trajectories that have ended since the last call; wait for the first one, at most ``wait_s`` seconds.

        Raises:
            MegarlError: no conversation can go on, for example because all rollout replicas are lost.
        """

    def abort(self, names: Sequence[SampleId]) -> None:
        """End conversations without a result; unknown ones are ignored."""

    def take_reward_counts(self) -> RunCounts:
        """Return the rewards' retries and replaced processes since the last call."""

    def take_stats(self) -> RouterStats:
        """Return the statistics since the last call or since :meth:`open`; conversations go on."""

    def stored_turns(self) -> Mapping[SampleId, Sequence[StoredTurn]]:
        """Return the turns of the conversations that have not ended, for a checkpoint.

        The responses are interrupted for a moment and go on. Conversations of groups without ``with_turns`` are left
        out. An ended sample is left out too, even if :meth:`finished` has not returned it yet.
        """

    def close(self) -> RouterStats:
        """Abort the remaining conversations; when it returns, no replica has a request of this service."""

    def endpoint_metrics(self) -> dict[str, float]:
        """Return the ``endpoint/*`` metrics of external requests since the last call; empty without an endpoint."""


class AgentSession(Protocol):
    """Record of one external agent's conversation over the chat endpoint."""

    failure: asyncio.Future[None]
    """Done with an exception if a generation failed."""

    @property
    def met_limit(self) -> bool:
        """Whether a request was refused because of the conversation's limit of tokens or turns."""

    def trajectory(self) -> Trajectory:
        """Return the trajectory of the turns so far."""


@dataclass(frozen=True)
class SessionAccess:
    """Address and credentials of one session of the chat endpoint."""

    session: AgentSession
    base_url: str
    api_key: str
    model: str


class SessionProvider(Protocol):
    """Opens sessions for external agents; the run's chat endpoint implements it."""

    def session(self, conversation: Conversation, generate: Generate) -> AbstractAsyncContextManager[SessionAccess]:
        """Open a session for one conversation."""
