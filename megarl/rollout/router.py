"""The router: sends requests to the least loaded replica, and moves them to another one if a replica is lost."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Protocol, Self

from megarl.base.errors import MegarlError, StepImpossible
from megarl.rollout.interface import Completion, Request, RolloutEngine, RolloutError, SamplingParams
from megarl.rollout.load_board import LoadBoard, PendingRequest
from megarl.rollout.serving import EngineServer
from megarl.tracing import TRACER, counter, past_span

logger = logging.getLogger(__name__)

WAIT_S = 1.0
"""Seconds after which a replica without a completion reports that it works."""
REST_S = 0.02
"""Seconds between two reports of a replica. A completion leaves at once, but several requests often end together, and
each report costs as much as a decoding step of a small model."""

# A request that this many replicas were lost with is probably the cause.
MOST_MOVES = 2

# Cost of a prompt token relative to a response token: prompt tokens are computed thousands at a time.
PROMPT_TOKEN_COST = 0.1


class ReplicaLost(RolloutError):
    """A replica's process has ended or does not answer."""


class NoReplicaLeft(RolloutError, StepImpossible):
    """All replicas are lost."""


class RequestGivenUp(MegarlError):
    """Several replicas were lost with one request; other requests can still be served."""


class Replica(Protocol):
    """A replica as seen by the router; see :class:`megarl.rollout.serving.EngineServer`.

    Both methods raise :class:`ReplicaLost` if the replica is lost, so that other replicas take over its requests. Any
    other error is caused by a request or the model, and would occur on another replica too.
    """

    async def accept(self, client: str, requests: Sequence[Request], aborted: Sequence[str]) -> None:
        """Take new requests and abort others.

        Args:
            client: name of the router.
            requests: new requests.
            aborted: ids of requests to abort.
        """

    async def completions(self, client: str, wait_s: float) -> list[Completion]:
        """Wait for completions; empty after ``wait_s`` seconds, or at once if no request is running.

        Args:
            client: name of the router.
            wait_s: seconds to wait for the first completion.
        """


class EngineReplica:
    """A replica in this process: an engine behind the router's interface.

    Args:
        engine: the engine, used by no one else while requests run.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._server = EngineServer(engine)

    async def accept(self, client: str, requests: Sequence[Request], aborted: Sequence[str]) -> None:
        """See :meth:`Replica.accept`."""
        self._server.accept(client, requests, aborted)

    async def completions(self, client: str, wait_s: float) -> list[Completion]:
        """See :meth:`Replica.completions`."""
        return await asyncio.to_thread(self._server.completions, client, wait_s)


@dataclass
class RouterStats:
    """Statistics of a router.

    Attributes:
        lost: reasons by lost replica.
        moved: requests that were moved to another replica.
        busy_s: busy seconds of each replica.
        idle_while_waiting_s: seconds that replicas were idle while requests waited, over all replicas.
        seconds: seconds between opening and closing the router.
        runners_lost: agent runners that were lost, with their routers.
    """

    lost: dict[int, str] = field(default_factory=dict)
    moved: int = 0
    busy_s: dict[int, float] = field(default_factory=dict)
    idle_while_waiting_s: float = 0.0
    seconds: float = 0.0
    runners_lost: int = 0

    @classmethod
    def merged(cls, parts: Sequence[RouterStats], runners_lost: int) -> RouterStats:
        """Join the statistics of routers that shared the replicas.

        A replica counts as busy as the router that used it longest: routers with even shares use it at the same time.
        """
        busy: dict[int, float] = {}
        lost: dict[int, str] = {}
        for part in parts:
            busy |= {replica: max(seconds, busy.get(replica, 0.0)) for replica, seconds in part.busy_s.items()}
            lost |= part.lost
        return cls(
            lost=lost,
            moved=sum(part.moved for part in parts),
            busy_s=busy,
            idle_while_waiting_s=sum(part.idle_while_waiting_s for part in parts),
            seconds=max((part.seconds for part in parts), default=0.0),
            runners_lost=runners_lost,
        )

    def metrics(self) -> dict[str, float]:
        """Return ``rollout/*`` metrics: utilization of replicas, lost replicas and runners, and moved requests.

        Without time or replicas there is no utilization.
        """
        shares = [busy / self.seconds for busy in self.busy_s.values()] if self.seconds else []
        metrics = {
            "rollout/idle_while_waiting_s": self.idle_while_waiting_s,
            "rollout/replicas_lost": float(len(self.lost)),
            "rollout/requests_moved": float(self.moved),
            "rollout/runners_lost": float(self.runners_lost),
        }
        if shares:
            metrics["rollout/replica_utilization/mean"] = sum(shares) / len(shares)
            metrics["rollout/replica_utilization/min"] = min(shares)
        return metrics


class RequestSpans:
    """Timeline of requests at replicas: a span per request, counters of busy slots and of the queue.

    Without a recording timeline it does nothing.
    """

    def __init__(self) -> None:
        self._started: dict[tuple[int, str], tuple[int, int]] = {}
        self._free: dict[int, list[int]] = defaultdict(list)
        self._lanes: dict[int, int] = defaultdict(int)

    def started(self, replica: int, requests: Iterable[str]) -> None:
        """Record that a replica got requests."""
        if TRACER.recording:
            now = time.monotonic_ns()
            for request in requests:
                self._started[replica, request] = (now, self._take_lane(replica))

    def finished(self, replica: int, request: str, prompt: int, tokens: int | None) -> None:
        """Record that a replica finished a request, or lost or aborted it (``tokens`` None)."""
        started = self._started.pop((replica, request), None)
        if started is not None:
            start, lane = started
            heapq.heappush(self._free[replica], lane)
            name = f"replica {replica} place {lane}"
            past_span("request", "rollout", start, name, request=request, prompt_tokens=prompt, tokens=tokens)

    def lost(self, replica: int) -> None:
        """Record that a replica is lost with its requests."""
        for number, request in [key for key in self._started if key[0] == replica]:
            self.finished(number, request, 0, None)

    def count(self, board: LoadBoard) -> None:
        """Record the number of running requests of each replica, and of waiting ones."""
        if TRACER.recording:
            for replica in board.replicas:
                counter(f"replica {replica} requests", busy=len(board.held(replica)))
            counter("requests waiting", waiting=board.waiting)

    def _take_lane(self, replica: int) -> int:
        """Return the lowest free lane, so that spans do not overlap."""
        if self._free[replica]:
            return heapq.heappop(self._free[replica])
        self._lanes[replica] += 1
        return self._lanes[replica] - 1


class Router:
    """Serves requests with replicas; used as ``async with``.

    A lost replica is ignored from then on, so no request is answered twice. On leaving the block no replica has running
    requests: requests without a waiting caller are aborted.

    Args:
        replicas: the replicas.
        capacity: maximum running requests of a replica; further requests wait for the next free replica.
        timeout_s: a replica that reports this many seconds late counts as lost.
        client: name of the router at the replicas, which may serve several routers; empty = a random one.

    Attributes:
        stats: statistics since the opening, or since the last :meth:`take_stats`.
        finished: number of requests that have ended.
    """

    def __init__(self, replicas: Sequence[Replica], capacity: int, timeout_s: float, client: str = "") -> None:
        self.client = client or secrets.token_hex(8)
        self._replicas, self._timeout_s = list(replicas), timeout_s
        self._board = LoadBoard([capacity] * len(self._replicas))
        self._inbox: list[list[Request]] = [[] for _ in self._replicas]
        self._aborted: list[list[str]] = [[] for _ in self._replicas]
        self._calls = [asyncio.Event() for _ in self._replicas]
        self._accepted = [asyncio.Event() for _ in self._replicas]
        self._entries: dict[str, PendingRequest] = {}
        self._arrived: list[PendingRequest] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._failure: Exception | None = None
        self._interrupts = False
        self._changed = asyncio.Event()
        self._count = self.finished = 0
        self._since = time.perf_counter()
        self.stats = RouterStats(busy_s=dict.fromkeys(range(len(self._replicas)), 0.0))
        self._opened = self._since
        self._spans = RequestSpans()

    async def __aenter__(self) -> Self:
        self._opened = self._since = time.perf_counter()
        self._pumps = [asyncio.create_task(self._pump(number)) for number in range(len(self._replicas))]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self._drain()
        finally:
            self._account()
            self.stats.seconds = time.perf_counter() - self._opened
            for pump in self._pumps:
                pump.cancel()
            await asyncio.gather(*self._pumps, return_exceptions=True)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        key: str = "",
        expected_tokens: float | None = None,
        routes_from: int | None = None,
        prior: Completion | None = None,
    ) -> Completion:
        """Generate one response. Cancelling the call aborts the request.

        Args:
            prompt_ids: token ids of the prompt.
            params: sampling parameters.
            seed: seed of the request.
            key: requests with one key share a prefix; empty = no shared prefix.
            expected_tokens: expected length of the response; None = unknown.
            routes_from: see :class:`~megarl.rollout.interface.Request`.
            prior: see :class:`~megarl.rollout.interface.Request`.

        Raises:
            NoReplicaLeft: all replicas are lost.
            RequestGivenUp: several replicas were lost with this request.
            Exception: an error of the engine.
        """
        if self._failure is not None:
            raise self._failure
        self._count += 1
        name = f"{self.client}-{self._count}"
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        entry = PendingRequest(
            Request(name, prompt_ids, params, seed, prior, routes_from),
            key or name,
            params.max_new_tokens,
            expected_tokens,
            PROMPT_TOKEN_COST * len(prompt_ids),
            payload=future,
        )
        self._entries[name] = entry
        if not self._arrived:
            # Admit all requests of this event loop iteration together, so that the longest of them goes first.
            asyncio.get_running_loop().call_soon(self._admit)
        self._arrived.append(entry)
        try:
            return await future
        except asyncio.CancelledError:
            self._abort(entry)
            raise

    def take_stats(self) -> RouterStats:
        """Return the statistics since the last call, while requests run on; to be called once per weight sync."""
        self._account()
        self._board.forget_idle_keys()  # no prefix of the old weights is cached any more
        taken = self.stats
        taken.seconds, self._opened = self._since - self._opened, self._since
        self.stats = RouterStats(busy_s=dict.fromkeys(self._board.replicas, 0.0))
        return taken

    @contextlib.asynccontextmanager
    async def interrupted(self) -> AsyncIterator[list[Request]]:
        """Interrupt all requests for the duration of the block, and yield them.

        The ``prior`` of a request has its tokens so far. Afterwards the requests continue.
        """
        self._interrupts = True
        for number in self._board.replicas:
            self._aborted[number] += [entry.request.request_id for entry in self._board.held(number)]
            self._calls[number].set()
        try:
            await self._drain()
            yield [entry.request for entry in self._entries.values() if not entry.payload.done()]
        finally:
            self._interrupts = False
            self._dispatch()

    async def _drain(self) -> None:
        """Wait until the replicas have ended or aborted all requests that they have."""
        while self._failure is None and any(self._board.held(number) for number in self._board.replicas):
            self._changed.clear()
            await self._changed.wait()

    def _admit(self) -> None:
        arrived, self._arrived = self._arrived, []
        self._account()
        self._board.add(arrived)
        self._dispatch()

    def _dispatch(self) -> None:
        if self._interrupts:
            return
        for number, entries in self._board.dispatch().items():
            self._inbox[number] += [entry.request for entry in entries]
            self._calls[number].set()
            self._spans.started(number, (entry.request.request_id for entry in entries))
        self._spans.count(self._board)

    def _abort(self, entry: PendingRequest) -> None:
        if entry in self._arrived:
            self._arrived.remove(entry)
        self._board.withdraw(entry)
        for number in self._board.replicas:
            if entry in self._board.held(number):
                self._aborted[number].append(entry.request.request_id)
                self._calls[number].set()

    async def _pump(self, number: int) -> None:
        """Send requests to one replica and receive completions, until it is lost."""
        tasks = [asyncio.create_task(self._send(number)), asyncio.create_task(self._fetch(number))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        except ReplicaLost as error:
            self._lose(number, str(error))
        except Exception as error:
            self._fail(error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, number: int) -> None:
        """Send new and aborted requests to a replica at once."""
        while True:
            await self._calls[number].wait()
            self._calls[number].clear()
            new, self._inbox[number] = self._inbox[number], []
            aborted, self._aborted[number] = self._aborted[number], []
            async with self._answer_within(self._timeout_s):
                await self._replicas[number].accept(self.client, new, aborted)
            self._accepted[number].set()

    async def _fetch(self, number: int) -> None:
        """Fetch completions from a replica while it has requests."""
        while True:
            await self._accepted[number].wait()
            self._accepted[number].clear()
            while self._board.held(number):
                async with self._answer_within(WAIT_S + self._timeout_s):
                    completions = await self._replicas[number].completions(self.client, WAIT_S)
                self._receive(number, completions)
                if completions and self._board.held(number):
                    await asyncio.sleep(REST_S)

    @contextlib.asynccontextmanager
    async def _answer_within(self, seconds: float) -> AsyncIterator[None]:
        """Declare a replica lost if the call within the context does not end in time."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise ReplicaLost(f"no answer within {self._timeout_s:g} s") from None

    def _receive(self, number: int, completions: Sequence[Completion]) -> None:
        if not completions or self._failure is not None:
            return
        TRACER.progress()
        self._account()
        for completion in completions:
            entry = self._entries[completion.request_id]
            tokens = None if completion.finish_reason == "abort" else len(completion.token_ids)
            self._board.release(number, entry, tokens)
            self._spans.finished(number, completion.request_id, len(entry.request.prompt_ids), tokens)
            if tokens is None and self._interrupts and not entry.payload.done():
                entry.request = replace(entry.request, prior=completion if completion.token_ids else None)
                self._board.add([entry])
                continue
            del self._entries[completion.request_id]
            self.finished += 1
            with contextlib.suppress(asyncio.InvalidStateError):  # cancelled by its caller
                entry.payload.set_result(completion)
        self._dispatch()
        self._changed.set()

    def _lose(self, number: int, reason: str) -> None:
        TRACER.progress()
        self._account()
        entries = self._board.lose(number)
        self._spans.lost(number)
        self._inbox[number] = []
        self.stats.lost[number] = reason
        self.stats.moved += len(entries)
        logger.warning("rollout replica %d is lost, %d requests go to others: %s", number, len(entries), reason)
        if not self._board.replicas:
            count = len(self._replicas)
            lost = f"all {count} rollout replicas are lost; the last" if count > 1 else "the only replica is lost"
            self._fail(NoReplicaLeft(f"{lost}: {reason}"))
            return
        for entry in [entry for entry in entries if entry.moves > MOST_MOVES]:
            entries.remove(entry)
            del self._entries[entry.request.request_id]
            entry.payload.set_exception(
                RequestGivenUp(f"{entry.moves} rollout replicas were lost while they had this request; last: {reason}")
            )
        self._board.add(entry for entry in entries if not entry.payload.done())
        self._dispatch()
        self._changed.set()

    def _fail(self, error: Exception) -> None:
        """Fail all requests with this error."""
        self._failure = error
        self._changed.set()
        for entry in self._entries.values():
            if not entry.payload.done():
                entry.payload.set_exception(error)
        self._entries = {}

    def _account(self) -> None:
        """Account for the time since the last change."""
        now = time.perf_counter()
        passed, self._since = now - self._since, now
        for number in self._board.replicas:
            if self._board.held(number):
                self.stats.busy_s[number] += passed
            elif self._board.waiting:
                self.stats.idle_while_waiting_s += passed
