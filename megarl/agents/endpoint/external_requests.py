"""External requests: chat completions outside any conversation of the run.

The current policy serves them while the run generates; they are never trained on.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from megarl.agents.endpoint.chat_format import AssistantTurn, ChatCompletion, ChatFormat, EncodedMessages
from megarl.agents.endpoint.request import CONTEXT_LENGTH, ApiError, ChatRequest
from megarl.agents.types import GenerateWithImages
from megarl.base.errors import MegarlError
from megarl.base.reductions import Total
from megarl.rollout.interface import RequestRefused, SamplingParams

_RETRY_S = 30


@dataclass(frozen=True)
class ExternalRequestLimits:
    """Limits and defaults of external requests.

    Attributes:
        sampling: defaults of the sampling parameters; ``max_new_tokens`` is also the upper limit.
        tokens: maximum number of tokens of prompt and response together.
        wait_s: total seconds that a request waits for the run to generate.
    """

    sampling: SamplingParams
    tokens: int
    wait_s: float


@dataclass
class _Counts:
    requests: int = 0
    refused: int = 0
    unserved: int = 0
    cut_off: int = 0
    tokens: int = 0
    waited_s: float = 0.0


class ExternalRequests:
    """Serves external requests within :meth:`serving`; at other times they wait."""

    def __init__(self, chat: ChatFormat, limits: ExternalRequestLimits) -> None:
        self._chat, self._limits = chat, limits
        self._generate: GenerateWithImages | None = None
        self._open = asyncio.Event()
        self._closed = False
        self._active: set[asyncio.Task[ChatCompletion]] = set()
        self._cut_off: set[asyncio.Task[ChatCompletion]] = set()
        self._counts = _Counts()

    @asynccontextmanager
    async def serving(self, generate: GenerateWithImages) -> AsyncIterator[None]:
        """Serve requests within the block; unfinished ones restart in the next block."""
        self._generate = generate
        self._open.set()
        try:
            yield
        finally:
            self._open.clear()
            self._generate = None
            self._cut_off |= self._active
            for task in self._active:
                task.cancel()
            await asyncio.gather(*self._active, return_exceptions=True)

    def close(self) -> None:
        """Refuse all waiting requests, since the run has ended."""
        self._closed = True
        self._open.set()

    def take_metrics(self) -> dict[str, float]:
        """Return the ``endpoint/*`` metrics since the last call.

        - ``endpoint/requests``: served requests; ``endpoint/tokens``: tokens generated for them;
          ``endpoint/waited_s/mean``: seconds that they waited for the run to generate.
        - ``endpoint/refused``: invalid requests (4xx); ``endpoint/unserved``: failed or timed-out requests (5xx);
          ``endpoint/cut_off``: requests restarted because generation had ended.
        """
        counts, self._counts = self._counts, _Counts()
        names = ("requests", "refused", "unserved", "cut_off", "tokens")
        metrics = {f"endpoint/{name}": Total(getattr(counts, name)) for name in names}
        return metrics | {"endpoint/waited_s/mean": counts.waited_s / max(counts.requests, 1)}

    def count(self, error: ApiError) -> None:
        """Count a request that was not served."""
        if error.status >= 500:
            self._counts.unserved += 1
        else:
            self._counts.refused += 1

    async def complete(self, request: ChatRequest) -> ChatCompletion:
        """Generate the response to a request.

        Raises:
            ApiError: the request is invalid, or the run did not generate in time.
        """
        self._chat.check(request)
        prompt = await self._chat.encoded_prompt(request)
        request.drop_files()
        params = self._sampling(request, len(prompt.ids))
        waited_s = 0.0
        while True:
            waited_s += await self._wait_for_generation(self._limits.wait_s - waited_s)
            task = asyncio.ensure_future(self._generate_choices(request, prompt, params))
            self._active.add(task)
            try:
                completion = await task
            except asyncio.CancelledError:
                if task not in self._cut_off:  # the client disconnected
                    raise
                self._counts.cut_off += 1
                continue
            finally:
                self._active.discard(task)
                self._cut_off.discard(task)
            self._counts.requests += 1
            self._counts.tokens += sum(len(turn.completion.token_ids) for turn in completion.turns)
            self._counts.waited_s += waited_s
            return completion

    async def _wait_for_generation(self, wait_s: float) -> float:
        """Wait until the run generates; return the seconds waited."""
        start = time.monotonic()
        try:
            async with asyncio.timeout(max(wait_s, 0.0)):
                await self._open.wait()
        except TimeoutError:
            text = f"the run did not generate within {self._limits.wait_s:g} s; retry later"
            raise ApiError(503, text, code="not_generating", retry_after_s=_RETRY_S) from None
        if self._closed:
            raise ApiError(503, "the run has ended", code="run_ended")
        return time.monotonic() - start

    def _sampling(self, request: ChatRequest, prompt_tokens: int) -> SamplingParams:
        limits, defaults = self._limits, self._limits.sampling
        room = min(limits.tokens - prompt_tokens, defaults.max_new_tokens)
        if room < 1 or (request.max_tokens or 0) > room:
            text = (
                f"a prompt of {prompt_tokens} tokens and max_tokens={request.max_tokens} are more than is served: "
                f"{limits.tokens} together, of which {defaults.max_new_tokens} to generate"
            )
            raise ApiError(400, text, code=CONTEXT_LENGTH, param="messages")
        requested = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k")}
        overrides = {name: value for name, value in requested.items() if value is not None}
        return replace(defaults, max_new_tokens=request.max_tokens or room, stop=request.stop, **overrides)

    async def _generate_choices(
        self, request: ChatRequest, prompt: EncodedMessages, params: SamplingParams
    ) -> ChatCompletion:
        assert self._generate is not None
        generate = self._generate
        seed = secrets.randbits(62) if request.seed is None else request.seed
        key = f"external {secrets.token_hex(8)}"

        async def turn(choice: int) -> AssistantTurn:
            completion = await generate(prompt.ids, params, seed=(seed + choice) % 2**63, key=key, images=prompt.images)
            if completion.finish_reason == "abort":
                raise ApiError(500, "the rollout engine aborted the response")
            return self._chat.turn(completion, request)

        try:
            return ChatCompletion(prompt.ids, await asyncio.gather(*map(turn, range(request.n))))
        except RequestRefused as error:
            raise ApiError(400, f"the rollout engine refuses the request: {error}") from error
        except MegarlError as error:
            raise ApiError(503, f"the rollout engine failed: {error}", retry_after_s=_RETRY_S) from error
