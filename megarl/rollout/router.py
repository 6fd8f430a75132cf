"""The router: sends requests to the least loaded replica, and moves them to another one if a replica is lost."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from megarl.base.errors import MegarlError, StepImpossible
from megarl.base.image_tokens import Image, shown_images
from megarl.base.reductions import Smallest, Total
from megarl.rollout.interface import Completion, Request, RolloutError, SamplingParams
from megarl.rollout.request_scheduler import PendingRequest, RequestScheduler
from megarl.tracing import TRACER, counter, past_span

logger = logging.getLogger(__name__)

WAIT_S = 1.0
"""Seconds after which a replica without a completion reports that it works."""
REST_S = 0.02
"""Seconds between two reports of a replica. A completion leaves at once, but several requests often end together, and
each report costs as much as a decoding step of a small model."""
MOST_MOVES = 2
"""A request that this many replicas were lost with is probably the cause."""
PROMPT_TOKEN_COST = 0.1
"""Cost of a prompt token relative to a response token: prompt tokens are computed thousands at a time."""


@dataclass
class RouterStats:
    """Statistics of a router.

    Attributes:
        lost: reasons by lost replica.
        handled: lost replicas that have left, or that another process has replaced.
        discarded_tokens: generated tokens of interrupted requests that an engine could not continue and began again.
        served_s: seconds in which each replica was connected.
        idle_while_waiting_s: seconds that replicas were idle while requests waited, over all replicas.
    """

    lost: dict[int, str] = field(default_factory=dict)
    moved: int = 0
    discarded_tokens: int = 0
    busy_s: dict[int, float] = field(default_factory=dict)
    served_s: dict[int, float] = field(default_factory=dict)
    idle_while_waiting_s: float = 0.0
    runners_lost: int = 0
    handled: set[int] = field(default_factory=set)

    @property
    def to_replace(self) -> set[int]:
        """Lost replicas that were neither replaced nor removed."""
        return self.lost.keys() - self.handled

    @classmethod
    def merged(cls, parts: Sequence[RouterStats], runners_lost: int) -> RouterStats:
        """Join the statistics of routers that shared the replicas.

        A replica counts as busy as the router that used it longest: routers with even shares use it at the same time.
        """
        merged = cls(runners_lost=runners_lost)
        for part in parts:
            for longest, seconds in ((merged.busy_s, part.busy_s), (merged.served_s, part.served_s)):
                longest |= {replica: max(used, longest.get(replica, 0.0)) for replica, used in seconds.items()}
            merged.lost |= part.lost
            merged.handled |= part.handled
            merged.moved += part.moved
            merged.discarded_tokens += part.discarded_tokens
            merged.idle_while_waiting_s += part.idle_while_waiting_s
        return merged

    def metrics(self) -> dict[str, float]:
        """Return ``rollout/*`` metrics; without time or replicas there is no utilization."""
        shares = [self.busy_s[replica] / seconds for replica, seconds in self.served_s.items() if seconds > 0]
        metrics: dict[str, float] = {
            "rollout/idle_while_waiting_s": Total(self.idle_while_waiting_s),
            "rollout/replicas_lost": Total(len(self.lost)),
            "rollout/requests_moved": Total(self.moved),
            "rollout/runners_lost": Total(self.runners_lost),
            "rollout/discarded_tokens": Total(self.discarded_tokens),
        }
        if shares:
            metrics["rollout/replica_utilization/mean"] = sum(shares) / len(shares)
            metrics["rollout/replica_utilization/min"] = Smallest(min(shares))
        return metrics


class _RequestSpans:
    """Timeline of requests at replicas, if one records: a span per request, counters of running and waiting ones."""

    def __init__(self) -> None:
        self._started: dict[tuple[int, str], tuple[int, int]] = {}
        self._free: dict[int, list[int]] = defaultdict(list)
        self._lanes: dict[int, itertools.count[int]] = defaultdict(itertools.count)

    def started(self, replica: int, requests: Iterable[str]) -> None:
        if TRACER.recording:
            now, free = time.monotonic_ns(), self._free[replica]
            for request in requests:  # in the lowest free lane, so that spans do not overlap
                self._started[replica, request] = now, heapq.heappop(free) if free else next(self._lanes[replica])

    def finished(self, replica: int, request: str, prompt: int, tokens: int | None) -> None:
        """Record the end of a request; ``tokens`` is None if the replica lost or aborted it."""
        if (started := self._started.pop((replica, request), None)) is not None:
            start, lane = started
            heapq.heappush(self._free[replica], lane)
            name = f"replica {replica} place {lane}"
            past_span("request", "rollout", start, name, request=request, prompt_tokens=prompt, tokens=tokens)

    def lost(self, replica: int) -> None:
        for number, request in [key for key in self._started if key[0] == replica]:
            self.finished(number, request, 0, None)

    def count(self, scheduler: RequestScheduler) -> None:
        if TRACER.recording:
            for replica in scheduler.replicas:
                counter(f"replica {replica} requests", busy=len(scheduler.held(replica)))
            counter("requests waiting", waiting=scheduler.waiting)


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
        """Take new requests and abort others."""

    async def completions(self, client: str, wait_s: float) -> list[Completion]:
        """Wait for completions; empty after ``wait_s`` seconds, or at once if no request is running."""


@dataclass
class _Connection:
    """Connection to one replica.

    Attributes:
        pump: sends and receives; None before the router is entered.
        leaves: whether its requests move to other replicas.
    """

    replica: Replica
    inbox: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    has_calls: asyncio.Event = field(default_factory=asyncio.Event)
    accepted: asyncio.Event = field(default_factory=asyncio.Event)
    pump: asyncio.Task[None] | None = None
    leaves: bool = False

    def abort(self, entries: Iterable[PendingRequest]) -> None:
        self.aborted += [entry.request.request_id for entry in entries]
        self.has_calls.set()


class Router:
    """Serves requests with replicas; used as ``async with``.

    A lost replica is ignored from then on, so no request is answered twice. On leaving the block no replica has running
    requests: requests without a waiting caller are aborted.

    Args:
        capacity: maximum running requests of a replica; further requests wait for the next free replica.
        timeout_s: a replica that reports this many seconds late counts as lost.
        client: name of the router at the replicas, which may serve several routers; empty = a random one.
        waits_for_replicas: without a replica, requests wait for :meth:`set_replicas`; else they fail.

    Attributes:
        no_replica: the loss of the last replica, while requests wait for another one; None = there are replicas.
        stats: statistics since the opening, or since the last :meth:`take_stats`.
    """

    def __init__(
        self,
        replicas: Mapping[int, Replica],
        capacity: int,
        timeout_s: float,
        client: str = "",
        *,
        waits_for_replicas: bool = False,
    ) -> None:
        self.client = client or secrets.token_hex(8)
        self._capacity, self._timeout_s = capacity, timeout_s
        self._scheduler = RequestScheduler([])
        self._connections: dict[int, _Connection] = {}
        self._numbers: set[int] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._entries: dict[str, PendingRequest] = {}
        self._arrived: list[PendingRequest] = []
        self._failure: Exception | None = None
        self._waits = waits_for_replicas
        self.no_replica: NoReplicaLeft | None = None
        self._interrupts = False
        self._changed = asyncio.Event()
        self._count = self.finished = 0
        self._since = time.perf_counter()
        self.stats = RouterStats()
        self._spans = _RequestSpans()
        for number, replica in replicas.items():
            self._join(number, replica)

    async def __aenter__(self) -> Self:
        self._since = time.perf_counter()
        for number in self._connections:
            self._start_pump(number)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                await self._drain()
        finally:
            self._account()
            for pump in self._pumps:
                pump.cancel()
            await asyncio.gather(*self._pumps, return_exceptions=True)

    async def set_replicas(self, replicas: Mapping[int, Replica]) -> None:
        """Serve with these replicas from now on, while requests run.

        The requests of a replica that leaves continue on the others after their last token. Those of a lost one, in
        whose place another process serves, begin again. Returns when no leaving replica has a request.

        Args:
            replicas: all replicas by number; at least one.
        """
        self._account()
        leaving = [number for number in self._connections if number not in replicas]
        for number in leaving:
            self._connections[number].leaves = True
            self._connections[number].abort(self._scheduler.held(number))
            self._scheduler.close(number)
        for number, replica in replicas.items():
            if (connection := self._connections.get(number)) is not None:
                if connection.replica == replica:
                    continue
                self._requeue(number, "another process has taken its place")
            self._join(number, replica)
            self._start_pump(number)
        self.no_replica = None
        self._dispatch()
        await self._drain(leaving)
        for number in leaving:
            if number in self._connections:  # it was not lost meanwhile
                self._disconnect(number)
        self.stats.handled |= self.stats.lost.keys()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        key: str = "",
        routes_from: int | None = None,
        prior: Completion | None = None,
        images: Sequence[Image] = (),
    ) -> Completion:
        """Generate one response. Cancelling the call aborts the request.

        Args:
            key: requests with one key share a prefix; empty = no shared prefix.
            routes_from, prior: see :class:`~megarl.rollout.interface.Request`.
            images: images of the conversation; the request has those whose tokens are in the prompt.

        Raises:
            NoReplicaLeft: all replicas are lost.
            RequestGivenUp: several replicas were lost with this request.
            RequestRefused: no engine can serve this request.
            Exception: an error of the engine.
        """
        if self._failure is not None:
            raise self._failure
        self._count += 1
        name = f"{self.client}-{self._count}"
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        entry = PendingRequest(
            Request(name, prompt_ids, params, seed, prior, routes_from, shown_images(prompt_ids, images)),
            key or name,
            params.max_new_tokens,
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
        self._scheduler.begin_interval()  # no prefix of the old weights is cached any more
        taken = self.stats
        self.stats = RouterStats(busy_s=dict.fromkeys(self._scheduler.replicas, 0.0))
        return taken

    @contextlib.asynccontextmanager
    async def interrupted(self) -> AsyncIterator[list[Request]]:
        """Interrupt all requests within the block, and yield them; their ``prior`` has their tokens so far."""
        self._interrupts = True
        for number in self._scheduler.replicas:
            self._connections[number].abort(self._scheduler.held(number))
        try:
            await self._drain()
            yield [entry.request for entry in self._entries.values() if not entry.payload.done()]
        finally:
            self._interrupts = False
            self._dispatch()

    async def _drain(self, replicas: Collection[int] | None = None) -> None:
        """Wait until replicas (None = all) have ended or aborted all requests that they have."""
        while self._failure is None:
            numbers = self._scheduler.replicas
            if not any(self._scheduler.held(number) for number in numbers if replicas is None or number in replicas):
                return
            self._changed.clear()
            await self._changed.wait()

    def _admit(self) -> None:
        arrived, self._arrived = self._arrived, []
        self._account()
        self._scheduler.add(arrived)
        self._dispatch()

    def _dispatch(self) -> None:
        if self._interrupts:
            return
        for number, entries in self._scheduler.dispatch().items():
            self._connections[number].inbox += [entry.request for entry in entries]
            self._connections[number].has_calls.set()
            self._spans.started(number, (entry.request.request_id for entry in entries))
        self._spans.count(self._scheduler)

    def _abort(self, entry: PendingRequest) -> None:
        if entry in self._arrived:
            self._arrived.remove(entry)
        self._scheduler.withdraw(entry)
        for number in self._scheduler.replicas:
            if entry in self._scheduler.held(number):
                self._connections[number].abort([entry])

    def _join(self, number: int, replica: Replica) -> None:
        self._connections[number] = _Connection(replica)
        self._numbers.add(number)
        self._scheduler.join(number, self._capacity)
        self.stats.busy_s.setdefault(number, 0.0)

    def _start_pump(self, number: int) -> None:
        pump = asyncio.create_task(self._pump(number))
        self._connections[number].pump = pump
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)

    def _disconnect(self, number: int) -> list[PendingRequest]:
        pump = self._connections.pop(number).pump
        if pump is not None and pump is not asyncio.current_task():
            pump.cancel()
        return self._scheduler.remove(number)

    async def _pump(self, number: int) -> None:
        connection = self._connections[number]
        tasks = [asyncio.create_task(self._send(connection)), asyncio.create_task(self._fetch(number, connection))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        except ReplicaLost as error:
            self._lose(number, error.text)
        except Exception as error:
            self._fail(error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, connection: _Connection) -> None:
        while True:
            await connection.has_calls.wait()
            connection.has_calls.clear()
            new, connection.inbox = connection.inbox, []
            aborted, connection.aborted = connection.aborted, []
            async with self._answer_within(self._timeout_s):
                await connection.replica.accept(self.client, new, aborted)
            del new  # until the next requests, it would keep the files of images in the object store
            connection.accepted.set()

    async def _fetch(self, number: int, connection: _Connection) -> None:
        while True:
            await connection.accepted.wait()
            connection.accepted.clear()
            while self._scheduler.held(number):
                async with self._answer_within(WAIT_S + self._timeout_s):
                    completions = await connection.replica.completions(self.client, WAIT_S)
                self._receive(number, completions)
                if completions and self._scheduler.held(number):
                    await asyncio.sleep(REST_S)

    @contextlib.asynccontextmanager
    async def _answer_within(self, seconds: float) -> AsyncIterator[None]:
        """Declare a replica lost if the call within the context does not end in time."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise ReplicaLost(f"no answer within {self._timeout_s:g} s", code="rollout.replica-silent") from None

    def _receive(self, number: int, completions: Sequence[Completion]) -> None:
        if not completions or self._failure is not None:
            return
        TRACER.progress()
        self._account()
        for completion in completions:
            entry = self._entries[completion.request_id]
            tokens = None if completion.finish_reason == "abort" else len(completion.token_ids)
            self._scheduler.release(number, entry, tokens)
            self._spans.finished(number, completion.request_id, len(entry.request.prompt_ids), tokens)
            self.stats.discarded_tokens += completion.discarded_tokens
            moves = (self._interrupts or self._connections[number].leaves) and not completion.refusal
            if tokens is None and moves and not entry.payload.done():
                entry.request = replace(entry.request, prior=completion if completion.token_ids else None)
                self._scheduler.add([entry])
                continue
            del self._entries[completion.request_id]
            self.finished += 1
            with contextlib.suppress(asyncio.InvalidStateError):  # cancelled by its caller
                if completion.refusal:
                    entry.payload.set_exception(completion.refusal)
                else:
                    entry.payload.set_result(completion)
        self._dispatch()
        self._changed.set()

    def _lose(self, number: int, reason: str) -> None:
        self._requeue(number, reason)
        if self._scheduler.replicas:
            self._dispatch()
        else:
            count = len(self._numbers)
            lost = f"all {count} rollout replicas are lost; the last" if count > 1 else "the only replica is lost"
            self.no_replica = NoReplicaLeft(f"{lost}: {reason}", code="rollout.no-replica-left")
            if not self._waits:
                self._fail(self.no_replica)
        self._changed.set()

    def _requeue(self, number: int, reason: str) -> None:
        TRACER.progress()
        self._account()
        entries = self._disconnect(number)
        self._spans.lost(number)
        self.stats.lost[number] = reason
        self.stats.handled.discard(number)
        self.stats.moved += len(entries)
        logger.warning("rollout replica %d is lost, %d requests go to others: %s", number, len(entries), reason)
        for entry in entries:
            entry.moves += 1
            if entry.moves > MOST_MOVES:
                del self._entries[entry.request.request_id]
                text = f"{entry.moves} rollout replicas were lost while they had this request; last: {reason}"
                entry.payload.set_exception(RequestGivenUp(text, code="rollout.request-given-up"))
        self._scheduler.add(entry for entry in entries if not entry.payload.done())

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._changed.set()
        for entry in self._entries.values():
            if not entry.payload.done():
                entry.payload.set_exception(error)
        self._entries = {}

    def _account(self) -> None:
        now = time.perf_counter()
        passed, self._since = now - self._since, now
        for number in self._scheduler.replicas:
            self.stats.served_s[number] = self.stats.served_s.get(number, 0.0) + passed
            if self._scheduler.held(number):
                self.stats.busy_s[number] += passed
            elif self._scheduler.waiting:
                self.stats.idle_while_waiting_s += passed
