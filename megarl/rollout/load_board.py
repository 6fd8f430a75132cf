"""Which replica is to answer which request: the one with least to do, the same for requests that share a prefix.

A pure data structure; :mod:`megarl.rollout.router` does what it says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

# A replica that knows a request's prefix is taken unless another has this much less to do: computing a prefix again
# costs less than waiting.
AFFINITY = 0.25


@dataclass(eq=False)
class Ticket:
    """A request on its way.

    Attributes:
        request: whatever is to be answered.
        key: requests of one key share a prefix.
        cost: tokens that answering it is expected to take.
        moves: replicas that were lost while they had it.
        payload: the caller's own.
    """

    request: Any
    key: str
    cost: float
    moves: int = 0
    payload: Any = None


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
    would be waited for by all.

    Args:
        capacity: most requests of each replica.
    """

    def __init__(self, capacity: Sequence[int]) -> None:
        self._replicas = {number: _Replica(size) for number, size in enumerate(capacity)}
        self._home: dict[str, int] = {}
        self._waiting: list[Ticket] = []

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas that are there."""
        return tuple(self._replicas)

    @property
    def waiting(self) -> int:
        """Requests that no replica has."""
        return len(self._waiting)

    def held(self, replica: int) -> set[Ticket]:
        """Requests that a replica has."""
        return self._replicas[replica].held

    def add(self, tickets: Iterable[Ticket]) -> None:
        """New requests; they wait until :meth:`place`."""
        self._waiting += tickets

    def withdraw(self, ticket: Ticket) -> None:
        """A request that waits is not wanted any more; one that does not wait stays where it is."""
        if ticket in self._waiting:
            self._waiting.remove(ticket)

    def place(self) -> dict[int, list[Ticket]]:
        """Gives out what waits, as far as there is room: ``{replica: its new requests}``."""
        placed: dict[int, list[Ticket]] = defaultdict(list)
        left: list[Ticket] = []
        for key, group in self._groups():
            cost = group[0].cost
            while group and (replica := self._choose(key, cost * len(group))) is not None:
                room = self._replicas[replica].free
                placed[replica] += group[:room]
                self._give(replica, key, group[:room])
                group = group[room:]
            left += group
        self._waiting = left
        return dict(placed)

    def release(self, replica: int, ticket: Ticket) -> None:
        """A replica has answered a request."""
        place = self._replicas[replica]
        place.held.remove(ticket)
        place.load = place.load - ticket.cost if place.held else 0.0

    def lose(self, replica: int) -> list[Ticket]:
        """A replica is gone; returns what it had, which waits again only if it is added."""
        tickets = sorted(self._replicas.pop(replica).held, key=lambda ticket: -ticket.cost)
        self._home = {key: home for key, home in self._home.items() if home != replica}
        for ticket in tickets:
            ticket.moves += 1
        return tickets

    def _groups(self) -> list[tuple[str, list[Ticket]]]:
        """What waits, by key, the group with the longest first."""
        groups: dict[str, list[Ticket]] = defaultdict(list)
        for ticket in sorted(self._waiting, key=lambda ticket: -ticket.cost):
            groups[ticket.key].append(ticket)
        return list(groups.items())

    def _choose(self, key: str, cost: float) -> int | None:
        """The replica for a group that costs so much; None if all are full."""
        free = {number: replica.load for number, replica in self._replicas.items() if replica.free > 0}
        if not free:
            return None
        least = min(free, key=lambda number: (free[number], number))
        home = self._home.get(key)
        if home in free and free[home] <= (1 + AFFINITY) * free[least] + cost:
            return home
        return least

    def _give(self, number: int, key: str, tickets: Sequence[Ticket]) -> None:
        replica = self._replicas[number]
        replica.held.update(tickets)
        replica.load += sum(ticket.cost for ticket in tickets)
        self._home[key] = number
