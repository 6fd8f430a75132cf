"""Which replica is to answer which request: the one with least to do, the same for requests that share a prefix.

A pure data structure; :mod:`megarl.rollout.router` does what it says.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from megarl.rollout.expectation import Expectation

# A replica that knows a request's prefix is taken unless another has this much less to do: computing a prefix again
# costs less than waiting.
AFFINITY = 0.25


@dataclass(eq=False)
class Ticket:
    """A request on its way.

    Attributes:
        request: whatever is to be answered.
        key: requests of one key share a prefix.
        most: tokens that the answer may have.
        expected: tokens that it was thought to have; None = nobody knows.
        prompt: what computing its prompt costs, in tokens of an answer.
        moves: replicas that were lost while they had it.
        payload: the caller's own.
        cost: tokens that it counts for, once a replica has it.
        begun_at: when a replica was given it.
    """

    request: Any
    key: str
    most: float
    expected: float | None = None
    prompt: float = 0.0
    moves: int = 0
    payload: Any = None
    cost: float = 0.0
    begun_at: float = 0.0


class _Group(NamedTuple):
    """Requests of one key, to be given out together, and the cost of each."""

    key: str
    tickets: list[Ticket]
    cost: float


@dataclass
class _Replica:
    capacity: int
    held: set[Ticket] = field(default_factory=set)
    load: float = 0.0

    @property
    def free(self) -> int:
        return self.capacity - len(self.held)


class LoadBoard:
    """Who has what, and what waits.

    Every replica has at most ``capacity`` requests; the rest waits here, so that whoever is done first takes the
    next: no replica is idle while anything waits. Of what waits the longest goes first, since a long answer begun last
    would be waited for by all; where nothing is known of a key, one request of it goes before all others, to tell.

    Args:
        capacity: most requests of each replica.
        lengths: what is known of answers; empty = nothing yet.
    """

    def __init__(self, capacity: Sequence[int], lengths: Expectation | None = None) -> None:
        self._replicas = {number: _Replica(size) for number, size in enumerate(capacity)}
        self._lengths = lengths or Expectation()
        self._home: dict[str, int] = {}
        self._waiting: dict[str, list[Ticket]] = {}

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas that are there."""
        return tuple(self._replicas)

    @property
    def waiting(self) -> int:
        """Requests that no replica has."""
        return sum(map(len, self._waiting.values()))

    def held(self, replica: int) -> set[Ticket]:
        """Requests that a replica has."""
        return self._replicas[replica].held

    def add(self, tickets: Iterable[Ticket]) -> None:
        """New requests; they wait until :meth:`place`."""
        for ticket in tickets:
            self._waiting.setdefault(ticket.key, []).append(ticket)

    def withdraw(self, ticket: Ticket) -> None:
        """A request that waits is not wanted any more; one that does not wait stays where it is."""
        if ticket in self._waiting.get(ticket.key, ()):
            self._take([ticket])

    def place(self) -> dict[int, list[Ticket]]:
        """Gives out what waits, as far as there is room: ``{replica: its new requests}``."""
        placed: dict[int, list[Ticket]] = defaultdict(list)
        room = sum(replica.free for replica in self._replicas.values())
        for key, tickets, cost in self._next_groups(room):
            while tickets and room:
                number = self._choose(key, cost * len(tickets))
                fitting = tickets[: self._replicas[number].free]
                self._take(fitting)
                self._give(number, key, fitting, cost)
                placed[number] += fitting
                tickets = tickets[len(fitting) :]
                room -= len(fitting)
        return dict(placed)

    def release(self, replica: int, ticket: Ticket, tokens: int | None = None) -> None:
        """A replica has answered a request.

        Args:
            replica: which.
            ticket: the request's.
            tokens: length of the answer; None where it was cut short.
        """
        place = self._replicas[replica]
        place.held.remove(ticket)
        place.load = place.load - ticket.cost if place.held else 0.0
        if tokens is not None:
            self._lengths.end(ticket.key, ticket.begun_at, tokens)

    def lose(self, replica: int) -> list[Ticket]:
        """A replica is gone; returns what it had, which waits again only if it is added."""
        tickets = sorted(self._replicas.pop(replica).held, key=lambda ticket: -ticket.cost)
        self._home = {key: home for key, home in self._home.items() if home != replica}
        for ticket in tickets:
            ticket.moves += 1
        return tickets

    def _next_groups(self, room: int) -> list[_Group]:
        """What is to be given out next, in this order; enough for the room, perhaps more."""
        probes = self._probes(room) if self.waiting > room else []
        taken = {probe.tickets[0] for probe in probes}
        if len(probes) == room:
            return probes
        groups = (
            _Group(key, others, self._cost(tickets[0]))
            for key, tickets in self._waiting.items()
            if (others := [ticket for ticket in tickets if ticket not in taken])
        )
        return probes + heapq.nlargest(room, groups, key=lambda group: group.cost)

    def _probes(self, room: int) -> list[_Group]:
        """A request of each group of which nothing is known."""
        unknown = (
            tickets[0]
            for key, tickets in self._waiting.items()
            if not self._lengths.begun(key) and self._lengths.tokens(key, tickets[0].expected) is None
        )
        return [_Group(ticket.key, [ticket], self._cost(ticket)) for ticket in islice(unknown, room)]

    def _cost(self, ticket: Ticket) -> float:
        """Tokens that a request counts for."""
        tokens = self._lengths.tokens(ticket.key, ticket.expected)
        if tokens is None:
            tokens = self._lengths.mean
        return min(ticket.most if tokens is None else tokens, ticket.most) + ticket.prompt

    def _choose(self, key: str, cost: float) -> int:
        """The replica for a group that costs so much; there is room somewhere."""
        free = {number: replica.load for number, replica in self._replicas.items() if replica.free > 0}
        least = min(free, key=lambda number: (free[number], number))
        home = self._home.get(key)
        if home in free and free[home] <= (1 + AFFINITY) * free[least] + cost:
            return home
        return least

    def _take(self, tickets: Iterable[Ticket]) -> None:
        """These do not wait any more."""
        for ticket in tickets:
            group = self._waiting[ticket.key]
            group.remove(ticket)
            if not group:
                del self._waiting[ticket.key]

    def _give(self, number: int, key: str, tickets: Sequence[Ticket], cost: float) -> None:
        replica, now = self._replicas[number], self._lengths.begin(key)
        for ticket in tickets:
            ticket.cost, ticket.begun_at = cost, now
        replica.held.update(tickets)
        replica.load += cost * len(tickets)
        self._home[key] = number
