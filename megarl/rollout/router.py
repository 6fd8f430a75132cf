"""One door to many replicas: requests go where there is least to do, and on to others when a replica is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from megarl.errors import MegarlError, StepImpossible
from megarl.rollout.interface import Completion, Request, RolloutError, SamplingParams
from megarl.rollout.load_board import LoadBoard, Ticket
from megarl.rollout.marks import RequestMarks

logger = logging.getLogger(__name__)

# How long a replica may work before it reports and takes new requests. A report costs a few milliseconds.
SLICE_S = 0.1
# A request that so many replicas were lost with is likely to be why.
MOST_MOVES = 2
# A prompt's token is computed beside thousands of others, an answer's alone.
PROMPT_TOKEN_COST = 0.1


class ReplicaLost(RolloutError):
    """A replica's process is gone, or does not answer."""


class NoReplicaLeft(RolloutError, StepImpossible):
    """All replicas are lost."""


class RequestGivenUp(MegarlError):
    """Replicas were lost with a request again and again; others can be answered."""


class Replica(Protocol):
    """A replica as the router sees it."""

    async def exchange(self, requests: Sequence[Request], aborted: Sequence[str], slice_s: float) -> list[Completion]:
        """Hands in new requests, gives some up, lets the engine work, and brings what has ended.

        Args:
            requests: new ones.
            aborted: ids of those to give up.
            slice_s: comes back after about so long, earlier if something has ended or nothing is under way.

        Raises:
            ReplicaLost: it is gone; its requests are to be answered by others.
            Exception: anything else is the requests' or the model's fault, and would happen elsewhere, too.
        """


@dataclass
class Traffic:
    """What a router has seen.

    Attributes:
        lost: replicas that were lost, and why.
        moved: requests that went on to another replica.
        busy_s: seconds that each replica had something to do.
        idle_while_waiting_s: seconds that replicas had nothing to do while requests waited, over all replicas.
        seconds: since the router was opened, until it was closed.
    """

    lost: dict[int, str] = field(default_factory=dict)
    moved: int = 0
    busy_s: dict[int, float] = field(default_factory=dict)
    idle_while_waiting_s: float = 0.0
    seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """``rollout/*``: utilization of replicas, losses and moved requests."""
        shares = [busy / self.seconds for busy in self.busy_s.values()] if self.seconds else [0.0]
        return {
            "rollout/replica_utilization/mean": sum(shares) / len(shares),
            "rollout/replica_utilization/min": min(shares),
            "rollout/idle_while_waiting_s": self.idle_while_waiting_s,
            "rollout/replicas_lost": float(len(self.lost)),
            "rollout/requests_moved": float(self.moved),
        }


class Router:
    """Answers requests by replicas, each of which it asks by a task of its own; used as ``async with``.

    What is lost is not answered twice: a replica that is given up is not listened to any more. When the block is left,
    replicas have nothing under way: what nobody waits for any more is given up.

    Args:
        replicas: who answers.
        capacity: requests that a replica has at a time; the rest waits for whoever is done first.
        timeout_s: a replica that reports so much later than it should is lost.
    """

    def __init__(self, replicas: Sequence[Replica], capacity: int, timeout_s: float) -> None:
        self._replicas, self._timeout_s = list(replicas), timeout_s
        self._board = LoadBoard([capacity] * len(self._replicas))
        self._inbox: list[list[Request]] = [[] for _ in self._replicas]
        self._aborted: list[list[str]] = [[] for _ in self._replicas]
        self._calls = [asyncio.Event() for _ in self._replicas]
        self._tickets: dict[str, Ticket] = {}
        self._arrived: list[Ticket] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._failure: Exception | None = None
        self._changed = asyncio.Event()
        self._count = 0
        self._since = time.perf_counter()
        self.traffic = Traffic(busy_s=dict.fromkeys(range(len(self._replicas)), 0.0))
        self._opened = self._since
        self._marks = RequestMarks()

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
            self.traffic.seconds = time.perf_counter() - self._opened
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
    ) -> Completion:
        """One answer. A caller that is cancelled gives its request up.

        Args:
            prompt_ids: what to continue.
            params: how.
            seed: source of its random numbers.
            key: requests of one key share a prefix; empty: it is like no other.
            expected_tokens: how long the answer is likely to be; None = nobody knows.

        Raises:
            NoReplicaLeft: all replicas are lost.
            RequestGivenUp: replicas were lost with this request again and again.
            Exception: what an engine raised.
        """
        if self._failure is not None:
            raise self._failure
        self._count += 1
        name = f"{self._count}"
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        ticket = Ticket(
            Request(name, prompt_ids, params, seed),
            key or name,
            params.max_new_tokens,
            expected_tokens,
            PROMPT_TOKEN_COST * len(prompt_ids),
            payload=future,
        )
        self._tickets[name] = ticket
        if not self._arrived:
            # After all that arrive in this turn of the event loop, to see which of them is the longest.
            asyncio.get_running_loop().call_soon(self._let_in)
        self._arrived.append(ticket)
        try:
            return await future
        except asyncio.CancelledError:
            self._give_up(ticket)
            raise

    async def _drain(self) -> None:
        """Waits until replicas have given up what callers have."""
        while self._failure is None and any(self._board.held(number) for number in self._board.replicas):
            self._changed.clear()
            await self._changed.wait()

    def _let_in(self) -> None:
        arrived, self._arrived = self._arrived, []
        self._account()
        self._board.add(arrived)
        self._hand_out()

    def _hand_out(self) -> None:
        for number, tickets in self._board.place().items():
            self._inbox[number] += [ticket.request for ticket in tickets]
            self._calls[number].set()
            self._marks.given(number, (ticket.request.request_id for ticket in tickets))
        self._marks.count(self._board)

    def _give_up(self, ticket: Ticket) -> None:
        if ticket in self._arrived:
            self._arrived.remove(ticket)
        self._board.withdraw(ticket)
        for number in self._board.replicas:
            if ticket in self._board.held(number):
                self._aborted[number].append(ticket.request.request_id)

    async def _pump(self, number: int) -> None:
        """Exchanges with one replica until it is lost."""
        try:
            while True:
                if not self._board.held(number):
                    self._calls[number].clear()
                    await self._calls[number].wait()
                new, self._inbox[number] = self._inbox[number], []
                aborted, self._aborted[number] = self._aborted[number], []
                self._receive(number, await self._exchange(number, new, aborted))
        except ReplicaLost as error:
            self._lose(number, str(error))
        except Exception as error:
            self._fail(error)

    async def _exchange(self, number: int, new: Sequence[Request], aborted: Sequence[str]) -> list[Completion]:
        try:
            async with asyncio.timeout(SLICE_S + self._timeout_s):
                return await self._replicas[number].exchange(new, aborted, SLICE_S)
        except TimeoutError:
            raise ReplicaLost(f"no answer within {self._timeout_s:g} s") from None

    def _receive(self, number: int, completions: Sequence[Completion]) -> None:
        if not completions or self._failure is not None:
            return
        self._account()
        for completion in completions:
            ticket = self._tickets.pop(completion.request_id)
            tokens = None if completion.finish_reason == "abort" else len(completion.token_ids)
            self._board.release(number, ticket, tokens)
            self._marks.ended(number, completion.request_id, len(ticket.request.prompt_ids), tokens)
            with contextlib.suppress(asyncio.InvalidStateError):  # cancelled by its caller
                ticket.payload.set_result(completion)
        self._hand_out()
        self._changed.set()

    def _lose(self, number: int, reason: str) -> None:
        self._account()
        tickets = self._board.lose(number)
        self._marks.lost(number)
        self._inbox[number] = []
        self.traffic.lost[number] = reason
        self.traffic.moved += len(tickets)
        logger.warning("rollout replica %d is lost, %d requests go to others: %s", number, len(tickets), reason)
        if not self._board.replicas:
            self._fail(NoReplicaLeft(f"all {len(self._replicas)} rollout replicas are lost; the last: {reason}"))
            return
        for ticket in [ticket for ticket in tickets if ticket.moves > MOST_MOVES]:
            tickets.remove(ticket)
            del self._tickets[ticket.request.request_id]
            ticket.payload.set_exception(
                RequestGivenUp(f"{ticket.moves} rollout replicas were lost while they had this request; last: {reason}")
            )
        self._board.add(ticket for ticket in tickets if not ticket.payload.done())
        self._hand_out()
        self._changed.set()

    def _fail(self, error: Exception) -> None:
        """Nothing can be answered any more."""
        self._failure = error
        self._changed.set()
        for ticket in self._tickets.values():
            if not ticket.payload.done():
                ticket.payload.set_exception(error)
        self._tickets = {}

    def _account(self) -> None:
        """Books the time since the last change."""
        now = time.perf_counter()
        passed, self._since = now - self._since, now
        for number in self._board.replicas:
            if self._board.held(number):
                self.traffic.busy_s[number] += passed
            elif self._board.waiting:
                self.traffic.idle_while_waiting_s += passed
