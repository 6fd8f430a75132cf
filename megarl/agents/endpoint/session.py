"""Sessions: the trajectory of an external agent's conversation over the chat endpoint.

Each request carries the whole message history, with the policy's turns as text. Generated turns are never re-tokenized:
a session keeps every turn as tokens in a tree, indexed by the digest of its history. A request continues the turn with
the longest matching history, so that only its new messages are tokenized. A request with a rewritten history, or from
another agent of the same program, matches none and starts a new branch. Branches share no mutable state, so requests
may be concurrent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, TypeVar

from megarl.agents.endpoint.chat_format import (
    AssistantTurn,
    ChatCompletion,
    ChatFormat,
    EncodedMessages,
    HistoryDigest,
    initial_digest,
    next_digest,
)
from megarl.agents.endpoint.request import CONTEXT_LENGTH, ApiError, ChatRequest
from megarl.agents.loop import Transcript, turn_seed
from megarl.agents.types import AgentError, Conversation, Generate, Trajectory, TrajectoryEnd
from megarl.base.errors import DataError
from megarl.base.seeds import derive_seed
from megarl.data.images import IMAGES
from megarl.rollout.interface import Completion, SamplingParams

_T = TypeVar("_T")


@dataclass(eq=False)
class _Turn:
    """A generated turn in the tree.

    Attributes:
        parent: turn before this one; None = start of a branch.
        ids: token ids of the prompt, or of the messages between the parent and this turn.
        number: number of turns completed earlier.
        refused: limit for which the last request after this turn was refused.
    """

    parent: _Turn | None
    ids: Sequence[int]
    completion: Completion
    number: int
    has_child: bool = False
    refused: TrajectoryEnd | None = None

    def path(self) -> list[_Turn]:
        """Return the turns from the start of the branch to this one."""
        turns = [self]
        while turns[-1].parent is not None:
            turns.append(turns[-1].parent)
        return turns[::-1]


@dataclass
class _Counts:
    """Counters for the metrics of :meth:`Session.trajectory`."""

    overridden: int = 0
    with_tools: bool = False
    calls: int = 0
    malformed: int = 0
    cut_off: int = 0
    met_limit: bool = False


class Session:
    """Serves the requests of one conversation within ``async with``; afterwards it refuses all requests.

    Args:
        conversation: the conversation; its sampling parameters and limits override the requests'.

    Attributes:
        failure: done with the exception of a failed generation, which no client can recover from.
    """

    def __init__(self, conversation: Conversation, generate: Generate, chat: ChatFormat) -> None:
        self._conversation, self._generate, self._chat = conversation, generate, chat
        self._turns: list[_Turn] = []
        self._by_history: dict[HistoryDigest, _Turn] = {}
        self._started = 0
        self._counts = _Counts()
        self._active: set[asyncio.Task[Any]] = set()
        self._closed = False
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._counts.cut_off += len(self._active)
        for task in self._active:
            task.cancel()
        await asyncio.gather(*self._active, return_exceptions=True)
        if self.failure.done():
            self.failure.exception()  # marks the exception as retrieved
        self.failure.cancel()

    @property
    def met_limit(self) -> bool:
        """Whether a request was refused because of the conversation's limit of tokens or turns."""
        return self._counts.met_limit

    async def complete(self, request: ChatRequest) -> ChatCompletion:
        """Generate the policy's next turn, or ``n`` choices of it.

        Raises:
            ApiError: the conversation is over, the request is invalid, or a limit is reached.
        """
        if self._closed:
            raise _closed_error()
        self._chat.check(request)
        parent, ids = await self._match(request)
        request.drop_files()
        if self._closed:  # meanwhile
            raise _closed_error()
        params = self._sampling(request)
        context = self._context(parent, ids)
        choices = [self._take_turn(parent, ids, request, params, choice) for choice in range(request.n)]
        return ChatCompletion(context.prompt_ids + context.response_ids, await self._all_or_none(choices))

    def trajectory(self) -> Trajectory:
        """Return the branch with the most generated tokens; among equal ones, the branch that ended last.

        Raises:
            AgentError: no turn was generated.
        """
        if not self._turns:
            raise AgentError("the agent got no turn of the policy: there is nothing to learn", code="agent.no-turn")
        leaves = [turn for turn in self._turns if not turn.has_child]
        leaf = max(leaves, key=lambda turn: (_generated_tokens(turn.path()), turn.number))
        path, counts = leaf.path(), self._counts
        finish: TrajectoryEnd = "length" if leaf.completion.finish_reason == "length" else "stop"
        metrics = {
            "branches_dropped": len(leaves) - 1,
            "turns_dropped": len(self._turns) - len(path),
            "tokens_dropped": _generated_tokens(self._turns) - _generated_tokens(path),
            "requests_cut_off": counts.cut_off,
            "sampling_overridden": counts.overridden,
            "ended_at_limit": int(self.met_limit),
        }
        if counts.with_tools:
            metrics |= {"tool_call_counts": counts.calls, "malformed_calls": counts.malformed}
        return self._replay(path).end(leaf.refused or finish, {name: float(value) for name, value in metrics.items()})

    async def _match(self, request: ChatRequest) -> tuple[_Turn | None, list[int]]:
        """Return the turn that a request continues and its further token ids; None and a prompt otherwise."""
        digest, parent, matched = initial_digest(request.tools), None, 0
        for number, message in enumerate(request.messages, 1):
            digest = next_digest(digest, message)
            if digest in self._by_history:
                parent, matched = self._by_history[digest], number
        try:
            if parent is None and self._is_prompt(request):
                new = EncodedMessages(list(self._conversation.prompt_ids), ())
            elif parent is None:
                new = await self._chat.encoded_prompt(request)
            else:
                new = await self._chat.encoded_frame(request, matched, parent.completion)
        except ApiError as error:
            if error.code == CONTEXT_LENGTH:
                self._note_limit("length", parent)
            raise
        self._check_limits(parent, new.ids)
        try:
            self._conversation.add_images(new.images)
        except DataError as error:
            raise ApiError(400, error.text, code=error.code, param="messages") from error
        return parent, new.ids

    def _is_prompt(self, request: ChatRequest) -> bool:
        """Whether the request is the row's unchanged prompt, so that the dataset's encoding is used."""
        conversation = self._conversation
        keys = iter([image.key for image in conversation.facts.get(IMAGES) or ()])
        row = [{"role": m["role"], "content": _with_keys(m["content"], keys)} for m in conversation.messages]
        messages = [{**m, "content": _with_keys(m["content"], None)} for m in request.messages]
        return bool(conversation.prompt_ids) and not request.tools and row == messages

    def _check_limits(self, parent: _Turn | None, ids: Sequence[int]) -> None:
        """Apply the conversation's limits to a branch."""
        limits = self._conversation.limits
        if parent is None:
            try:
                Transcript(self._conversation, ids)
            except AgentError as error:
                raise self._limit_error("length", str(error), parent) from error
            return
        transcript = self._replay(parent.path())
        if limits.assistant_turns is not None and transcript.assistant_turns >= limits.assistant_turns:
            raise self._limit_error("turns", f"max_assistant_turns={limits.assistant_turns} turns were taken", parent)
        if limits.user_turns is not None and transcript.user_turns >= limits.user_turns:
            raise self._limit_error("turns", f"max_user_turns={limits.user_turns} turns were taken", parent)
        room = transcript.room
        if not transcript.observe(ids):
            text = (
                f"of this conversation's {self._conversation.response_tokens} tokens after the prompt {room} are left, "
                f"and the new messages have {len(ids)}"
            )
            raise self._limit_error("length", text, parent)

    def _limit_error(self, reason: TrajectoryEnd, message: str, parent: _Turn | None) -> ApiError:
        self._note_limit(reason, parent)
        code = CONTEXT_LENGTH if reason == "length" else "max_turns_exceeded"
        return ApiError(400, message, code=code, param="messages")

    def _note_limit(self, reason: TrajectoryEnd, parent: _Turn | None) -> None:
        self._counts.met_limit = True
        if parent is not None:
            parent.refused = reason

    def _sampling(self, request: ChatRequest) -> SamplingParams:
        """Return the conversation's parameters: log-probs of another temperature could not be compared in training."""
        params = self._conversation.params
        pairs = (
            (request.temperature, params.temperature),
            (request.top_p, params.top_p),
            (request.top_k, params.top_k),
        )
        self._counts.overridden += any(value is not None and value != configured for value, configured in pairs)
        limit = params.max_new_tokens
        tokens = limit if request.max_tokens is None else min(request.max_tokens, limit)
        return replace(params, max_new_tokens=tokens, stop=(*params.stop, *request.stop))

    async def _take_turn(
        self, parent: _Turn | None, ids: Sequence[int], request: ChatRequest, params: SamplingParams, choice: int
    ) -> AssistantTurn:
        seed, transcript = self._seed(request.seed, choice), self._context(parent, ids)
        try:
            completion = await transcript.generate(self._generate, params, seed)
        except Exception as error:
            if not self.failure.done():
                self.failure.set_exception(error)
            raise ApiError(500, f"the rollout engine failed: {type(error).__name__}: {error}") from error
        answer = self._chat.turn(completion, request)
        self._record(_Turn(parent, ids, completion, len(self._turns)), request, answer)
        return answer

    def _record(self, turn: _Turn, request: ChatRequest, answer: AssistantTurn) -> None:
        digest = initial_digest(request.tools)
        for message in (*request.messages, answer.history()):
            digest = next_digest(digest, message)
        self._turns.append(turn)
        self._by_history[digest] = turn  # among equal histories the newest: they are indistinguishable to the client
        if turn.parent is not None:
            turn.parent.has_child = True
        self._counts.with_tools |= request.reads_calls
        self._counts.calls += len(answer.calls) + answer.malformed
        self._counts.malformed += answer.malformed

    def _seed(self, requested: int | None, choice: int) -> int:
        """Derive the seed of a turn; a requested seed is mixed with the conversation's, so that samples differ."""
        if requested is None:
            self._started += 1
            return turn_seed(self._conversation.seed, self._started - 1)
        return derive_seed(self._conversation.seed, f"request {requested}", choice)

    def _context(self, parent: _Turn | None, ids: Sequence[int]) -> Transcript:
        """Return the transcript of a branch up to a turn, followed by ``ids``."""
        if parent is None:
            return Transcript(self._conversation, ids)
        transcript = self._replay(parent.path())
        transcript.observe(ids)
        return transcript

    def _replay(self, path: Sequence[_Turn]) -> Transcript:
        transcript = Transcript(self._conversation, path[0].ids)
        for turn in path:
            if turn.parent is not None:
                transcript.observe(turn.ids)
            transcript.append(turn.completion)
        return transcript

    async def _all_or_none(self, work: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
        """Run coroutines concurrently; cancel all if one fails or the session ends."""
        tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
        self._active.update(tasks)
        try:
            return await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            if self._closed:
                raise _closed_error() from None
            raise
        finally:
            for task in tasks:
                task.cancel()
            self._active.difference_update(tasks)


def _with_keys(content: Any, keys: Iterator[int] | None) -> Any:
    """Return a content with an image's digest in place of its part: of ``keys`` in order, or the part's own."""
    if isinstance(content, str):
        return content
    return [part if part["type"] != "image" else part["key"] if keys is None else next(keys, None) for part in content]


def _generated_tokens(turns: Sequence[_Turn]) -> int:
    return sum(len(turn.completion.token_ids) for turn in turns)


def _closed_error() -> ApiError:
    return ApiError(410, "the conversation is over; nothing more is generated for it", code="session_closed")
