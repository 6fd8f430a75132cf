"""Requests that belong to no conversation: answered by the current policy while the run generates, never trained on."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from megarl.errors import MegarlError
from megarl.rollout.agents.loop import Generate
from megarl.rollout.endpoint.answer import Answer
from megarl.rollout.endpoint.errors import ApiError
from megarl.rollout.endpoint.request import ChatRequest
from megarl.rollout.endpoint.translation import AssistantTurn, ChatFormat
from megarl.rollout.interface import SamplingParams

_RETRY_S = 30


@dataclass(frozen=True)
class OutsideLimits:
    """What is given to requests from outside.

    Attributes:
        sampling: where a request leaves it open; ``max_new_tokens`` is the most that it may ask for.
        tokens: most tokens of prompt and answer together.
        wait_s: seconds that a request waits in all for the run to generate.
    """

    sampling: SamplingParams
    tokens: int
    wait_s: float


@dataclass
class _Traffic:
    requests: int = 0
    refused: int = 0
    unserved: int = 0
    cut_off: int = 0
    tokens: int = 0
    waited_s: float = 0.0


class Outside:
    """Answers requests while :meth:`serving`; at other times they wait.

    Args:
        chat: how the policy is talked to.
        limits: of each request.
    """

    def __init__(self, chat: ChatFormat, limits: OutsideLimits) -> None:
        self._chat, self._limits = chat, limits
        self._generate: Generate | None = None
        self._open = asyncio.Event()
        self._over = False
        self._under_way: set[asyncio.Task[Answer]] = set()
        self._cut_off: set[asyncio.Task[Answer]] = set()
        self._traffic = _Traffic()

    @asynccontextmanager
    async def serving(self, generate: Generate) -> AsyncIterator[None]:
        """Requests are answered within the block; those that it leaves unfinished wait for the next."""
        self._generate = generate
        self._open.set()
        try:
            yield
        finally:
            self._open.clear()
            self._generate = None
            self._cut_off |= self._under_way
            for task in self._under_way:
                task.cancel()
            await asyncio.gather(*self._under_way, return_exceptions=True)

    def close(self) -> None:
        """Tells those who wait that the run is over."""
        self._over = True
        self._open.set()

    def take_metrics(self) -> dict[str, float]:
        """``endpoint/*`` since the last call.

        - ``endpoint/requests``: requests that were answered; ``endpoint/tokens``: what the policy wrote for them;
          ``endpoint/waited_s/mean``: how long they waited for the run to generate.
        - ``endpoint/refused``: requests that could not be served (4xx); ``endpoint/unserved``: those that failed, or
          waited too long (5xx); ``endpoint/cut_off``: times that one was begun anew since generation had ended.
        """
        told, self._traffic = self._traffic, _Traffic()
        names = ("requests", "refused", "unserved", "cut_off", "tokens")
        metrics = {f"endpoint/{name}": float(getattr(told, name)) for name in names}
        return metrics | {"endpoint/waited_s/mean": told.waited_s / max(told.requests, 1)}

    def count(self, error: ApiError) -> None:
        """Notes a request that was not answered."""
        if error.status >= 500:
            self._traffic.unserved += 1
        else:
            self._traffic.refused += 1

    async def answer(self, request: ChatRequest) -> Answer:
        """What the policy says.

        Raises:
            ApiError: the request cannot be served, or not in time.
        """
        self._chat.check(request)
        prompt_ids = self._chat.prompt_ids(request)
        params = self._sampling(request, len(prompt_ids))
        waited_s = 0.0
        while True:
            waited_s += await self._opened(self._limits.wait_s - waited_s)
            task = asyncio.ensure_future(self._ask(request, prompt_ids, params))
            self._under_way.add(task)
            try:
                answer = await task
            except asyncio.CancelledError:
                if task not in self._cut_off:  # its client is gone
                    raise
                self._traffic.cut_off += 1
                continue
            finally:
                self._under_way.discard(task)
                self._cut_off.discard(task)
            self._traffic.requests += 1
            self._traffic.tokens += sum(len(turn.completion.token_ids) for turn in answer.turns)
            self._traffic.waited_s += waited_s
            return answer

    async def _opened(self, wait_s: float) -> float:
        """Waits until the run generates; tells how long."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(max(wait_s, 0.0)):
                await self._open.wait()
        except TimeoutError:
            text = f"the run did not generate within {self._limits.wait_s:g} s; ask again later"
            raise ApiError(503, text, code="not_generating", retry_after_s=_RETRY_S) from None
        if self._over:
            raise ApiError(503, "the run has ended", code="run_ended")
        return time.monotonic() - began

    def _sampling(self, request: ChatRequest, prompt_tokens: int) -> SamplingParams:
        limits, own = self._limits, self._limits.sampling
        room = min(limits.tokens - prompt_tokens, own.max_new_tokens)
        if room < 1 or (request.max_tokens or 0) > room:
            text = (
                f"a prompt of {prompt_tokens} tokens and max_tokens={request.max_tokens} are more than is served: "
                f"{limits.tokens} together, of which {own.max_new_tokens} to generate"
            )
            raise ApiError(400, text, code="context_length_exceeded", param="messages")
        asked = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k")}
        given = {name: value for name, value in asked.items() if value is not None}
        return replace(own, max_new_tokens=request.max_tokens or room, stop=request.stop, **given)

    async def _ask(self, request: ChatRequest, prompt_ids: Sequence[int], params: SamplingParams) -> Answer:
        assert self._generate is not None
        generate = self._generate
        seed = secrets.randbits(62) if request.seed is None else request.seed
        key = f"outside {secrets.token_hex(8)}"

        async def turn(choice: int) -> AssistantTurn:
            completion = await generate(prompt_ids, params, seed=(seed + choice) % 2**63, key=key)
            if completion.finish_reason == "abort":
                raise ApiError(500, "the rollout engine gave the answer up")
            return self._chat.turn(completion, request)

        try:
            return Answer(prompt_ids, await asyncio.gather(*map(turn, range(request.n))))
        except MegarlError as error:
            raise ApiError(503, f"the rollout engine failed: {error}", retry_after_s=_RETRY_S) from error
