"""A conversation that somebody else's program leads, turn by turn over the endpoint, and what it comes to.

Requests carry whole histories of messages, and the policy's own words come back in them as text. They are never
tokenized again: every turn is kept as the tokens it was, in a tree, under the history that led to it. A request goes
on from the turn with the longest history that it begins with, so that only messages which are new are tokenized. One
that rewrote its history, or that belongs to another agent of the same program, finds none and begins a branch of its
own. Branches share nothing that changes, so requests may come at the same time.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self, TypeVar

from megarl.rollout.agents.loop import (
    AgentError,
    Conversation,
    Generate,
    Trajectory,
    TrajectoryEnd,
    Transcript,
    turn_seed,
)
from megarl.rollout.endpoint.answer import Answer
from megarl.rollout.endpoint.errors import ApiError
from megarl.rollout.endpoint.request import ChatRequest
from megarl.rollout.endpoint.translation import AssistantTurn, ChatFormat, Digest, begin_digest, next_digest
from megarl.rollout.interface import Completion, SamplingParams

_T = TypeVar("_T")


@dataclass(eq=False)
class _Turn:
    """A turn of the policy in the tree.

    Attributes:
        before: the turn that it goes on from; None = it begins a branch.
        ids: the prompt, or what stands between that turn and this one.
        completion: what the policy wrote.
        number: turns that ended earlier.
        goes_on: another turn goes on from it.
    """

    before: _Turn | None
    ids: Sequence[int]
    completion: Completion
    number: int
    goes_on: bool = False

    def path(self) -> list[_Turn]:
        """From the begin of the branch to here."""
        turns = [self]
        while turns[-1].before is not None:
            turns.append(turns[-1].before)
        return turns[::-1]


@dataclass
class _Counts:
    """What :meth:`Session.trajectory` tells besides its tokens."""

    overridden: int = 0
    with_tools: bool = False
    calls: int = 0
    malformed: int = 0
    cut_off: int = 0
    limits: list[TrajectoryEnd] = field(default_factory=list)


class Session:
    """Answers the requests of one conversation; used as ``async with``, after which it answers none.

    Args:
        conversation: that is led; its sampling and its limits hold whatever a request says.
        generate: where to ask for turns.
        chat: how the policy is talked to.

    Attributes:
        failure: the exception of a generation that failed, which no client could mend.
    """

    def __init__(self, conversation: Conversation, generate: Generate, chat: ChatFormat) -> None:
        self._conversation, self._generate, self._chat = conversation, generate, chat
        self._turns: list[_Turn] = []
        self._by_history: dict[Digest, _Turn] = {}
        self._begun = 0
        self._counts = _Counts()
        self._under_way: set[asyncio.Task[Any]] = set()
        self._closed = False
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._counts.cut_off += len(self._under_way)
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        if self.failure.done():
            self.failure.exception()  # somebody has looked at it
        self.failure.cancel()

    @property
    def met_limit(self) -> bool:
        """Whether a request was refused because the conversation's tokens or turns were used up."""
        return bool(self._counts.limits)

    async def answer(self, request: ChatRequest) -> Answer:
        """The policy's next turn, or ``n`` of them.

        Raises:
            ApiError: the conversation is over, the request cannot be served, or a limit is met.
        """
        if self._closed:
            raise _over()
        self._chat.check(request)
        before, ids = self._place(request)
        params = self._sampling(request)
        shown = self._context(before, ids)
        choices = [self._take_turn(before, ids, request, params, choice) for choice in range(request.n)]
        return Answer(shown.prompt_ids + shown.response_ids, await self._all(choices))

    def trajectory(self) -> Trajectory:
        """The branch in which the policy wrote most tokens, of several such the one that ended last.

        Raises:
            AgentError: the policy was asked for no turn.
        """
        if not self._turns:
            raise AgentError("the agent got no turn of the policy, so that there is nothing to learn from")
        ends = [turn for turn in self._turns if not turn.goes_on]
        chosen = max(ends, key=lambda turn: (_written(turn.path()), turn.number))
        transcript = self._replayed(chosen.path())
        stopped: TrajectoryEnd = "length" if chosen.completion.finish_reason == "length" else "stop"
        counts, path = self._counts, chosen.path()
        metrics = {
            "branches_dropped": len(ends) - 1,
            "turns_dropped": len(self._turns) - len(path),
            "tokens_dropped": _written(self._turns) - _written(path),
            "requests_cut_off": counts.cut_off,
            "sampling_overridden": counts.overridden,
            "ended_at_limit": int(self.met_limit),
        }
        if counts.with_tools:
            metrics |= {"tool_call_counts": counts.calls, "malformed_calls": counts.malformed}
        reason = counts.limits[-1] if counts.limits else stopped
        return transcript.end(reason, {name: float(value) for name, value in metrics.items()})

    def _place(self, request: ChatRequest) -> tuple[_Turn | None, list[int]]:
        """The turn that a request goes on from, and what follows it; None and a prompt where it begins a branch."""
        digest, before, said = begin_digest(request.tools), None, 0
        for number, message in enumerate(request.messages, 1):
            digest = next_digest(digest, message)
            if digest in self._by_history:
                before, said = self._by_history[digest], number
        if before is None:
            ids = self._prompt_ids(request)
        else:
            ids = self._chat.frame_ids(request.messages[said:], before.completion)
        self._check_limits(before, ids)
        return before, ids

    def _prompt_ids(self, request: ChatRequest) -> list[int]:
        """As the data set encoded it, where the request is the row's own prompt."""
        own = self._conversation
        row = [{"role": m["role"], "content": m["content"]} for m in own.messages]
        if own.prompt_ids and not request.tools and row == list(request.messages):
            return list(own.prompt_ids)
        return self._chat.prompt_ids(request)

    def _check_limits(self, before: _Turn | None, ids: Sequence[int]) -> None:
        """The conversation's limits hold for each branch."""
        limits = self._conversation.limits
        if before is None:
            try:
                Transcript(self._conversation, ids)
            except AgentError as error:
                raise self._limit("length", str(error)) from error
            return
        transcript = self._replayed(before.path())
        if limits.assistant_turns is not None and transcript.assistant_turns >= limits.assistant_turns:
            raise self._limit("turns", f"max_assistant_turns={limits.assistant_turns} turns were taken")
        if limits.user_turns is not None and transcript.user_turns >= limits.user_turns:
            raise self._limit("turns", f"max_user_turns={limits.user_turns} turns were taken")
        room = transcript.room
        if not transcript.observe(ids):
            text = (
                f"of this conversation's {self._conversation.response_tokens} tokens after the prompt {room} are left, "
                f"and the new messages have {len(ids)}"
            )
            raise self._limit("length", text)

    def _limit(self, reason: TrajectoryEnd, message: str) -> ApiError:
        self._counts.limits.append(reason)
        code = "context_length_exceeded" if reason == "length" else "max_turns_exceeded"
        return ApiError(400, message, code=code, param="messages")

    def _sampling(self, request: ChatRequest) -> SamplingParams:
        """The conversation's own: log-probs of other temperatures could not be compared in training."""
        own = self._conversation.params
        asked = ((request.temperature, own.temperature), (request.top_p, own.top_p), (request.top_k, own.top_k))
        self._counts.overridden += any(value is not None and value != held for value, held in asked)
        most = own.max_new_tokens if request.max_tokens is None else min(request.max_tokens, own.max_new_tokens)
        return replace(own, max_new_tokens=most, stop=(*own.stop, *request.stop))

    async def _take_turn(
        self, before: _Turn | None, ids: Sequence[int], request: ChatRequest, params: SamplingParams, choice: int
    ) -> AssistantTurn:
        seed, transcript = self._seed(request.seed, choice), self._context(before, ids)
        try:
            completion = await transcript.generate(self._generate, params, seed)
        except Exception as error:
            if not self.failure.done():
                self.failure.set_exception(error)
            raise ApiError(500, f"the rollout engine failed: {type(error).__name__}: {error}") from error
        said = self._chat.turn(completion, request)
        self._keep(_Turn(before, ids, completion, len(self._turns)), request, said)
        return said

    def _keep(self, turn: _Turn, request: ChatRequest, said: AssistantTurn) -> None:
        digest = begin_digest(request.tools)
        for message in (*request.messages, said.history()):
            digest = next_digest(digest, message)
        self._turns.append(turn)
        self._by_history[digest] = turn  # of equal histories the newest: none of them says more than another
        if turn.before is not None:
            turn.before.goes_on = True
        self._counts.with_tools |= request.reads_calls
        self._counts.calls += len(said.calls) + said.malformed
        self._counts.malformed += said.malformed

    def _seed(self, asked: int | None, choice: int) -> int:
        """Of one turn. A seed in a request is mixed with the conversation's, so that samples of a prompt differ."""
        if asked is None:
            self._begun += 1
            return turn_seed(self._conversation.seed, self._begun - 1)
        text = f"{self._conversation.seed}/request {asked}/{choice}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def _context(self, before: _Turn | None, ids: Sequence[int]) -> Transcript:
        """What the policy is shown: everything up to a turn, and then ``ids``."""
        if before is None:
            return Transcript(self._conversation, ids)
        transcript = self._replayed(before.path())
        transcript.observe(ids)
        return transcript

    def _replayed(self, path: Sequence[_Turn]) -> Transcript:
        """The tokens of a branch, from its begin."""
        transcript = Transcript(self._conversation, path[0].ids)
        for turn in path:
            if turn.before is not None:
                transcript.observe(turn.ids)
            transcript.append(turn.completion)
        return transcript

    async def _all(self, work: Sequence[Coroutine[Any, Any, _T]]) -> list[_T]:
        """All of it, or, when one fails or the session ends, none."""
        tasks = [asyncio.ensure_future(one) for one in work]
        self._under_way.update(tasks)
        try:
            return await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            if self._closed:
                raise _over() from None
            raise
        finally:
            for task in tasks:
                task.cancel()
            self._under_way.difference_update(tasks)


def _written(turns: Sequence[_Turn]) -> int:
    return sum(len(turn.completion.token_ids) for turn in turns)


def _over() -> ApiError:
    return ApiError(410, "the conversation is over; nothing more is generated for it", code="session_closed")
