"""Load balancing of requests over replicas: the least loaded replica first, prefix affinity, longest request first.

Response lengths differ by orders of magnitude between prompts, but little between samples of one prompt. Therefore the
first finished sample of a prompt predicts the length of the rest. Until then its length so far does: for heavy-tailed
lengths the expected total is about twice the elapsed part.

Pure data structures; :mod:`megarl.rollout.router` acts on them.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

SURVIVAL = 2.0
"""Expected length of a response, relative to its length so far."""


@dataclass
class _LengthStatistics:
    """Statistics of the requests that share a key."""

    started_at: float
    finished: int = 0
    tokens: int = 0


class LengthEstimator:
    """Estimates response lengths by key; requests with one key have similar lengths.

    Args:
        clock: time in seconds; estimates the length so far of unfinished responses.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._groups: dict[str, _LengthStatistics] = {}
        self._finished = self._tokens = 0
        self._seconds = 0.0

    def start(self, key: str) -> float:
        """Record that a replica got a request of this key; return the time."""
        now = self._clock()
        self._groups.setdefault(key, _LengthStatistics(now))
        return now

    def finish(self, key: str, started_at: float, tokens: int) -> None:
        """Record the length of a finished response and its start time."""
        group = self._groups[key]
        group.finished += 1
        group.tokens += tokens
        self._finished += 1
        self._tokens += tokens
        self._seconds += self._clock() - started_at

    def expected_tokens(self, key: str) -> float | None:
        """Return the expected response length of a key in tokens; None if unknown."""
        group = self._groups.get(key)
        if group is not None and group.finished:
            return group.tokens / group.finished
        if group is None or not self._seconds:
            return None
        return SURVIVAL * (self._clock() - group.started_at) * self._tokens / self._seconds

    def started(self, key: str) -> bool:
        """Return whether a replica has got any request of this key."""
        return key in self._groups

    def keep(self, keys: Collection[str]) -> None:
        """Forget the statistics of all other keys."""
        self._groups = {key: group for key, group in self._groups.items() if key in keys}

    @property
    def mean(self) -> float | None:
        """Mean length of all finished responses; None before the first."""
        return self._tokens / self._finished if self._finished else None


# Prefix affinity: a replica with the cached prefix is chosen unless another one has this much less load. Recomputing a
# prefix costs less than waiting.
AFFINITY = 0.25


@dataclass(eq=False)
class PendingRequest:
    """A request waiting in the queue or running at a replica.

    Attributes:
        request: the request itself.
        key: requests with one key share a prefix.
        most: maximum response tokens.
        prompt: cost of the prompt, in response tokens.
        moves: number of replicas that were lost with this request.
        payload: data of the caller.
        cost: estimated tokens, set when a replica gets it.
        started_at: time when a replica got it.
    """

    request: Any
    key: str
    most: float
    prompt: float = 0.0
    moves: int = 0
    payload: Any = None
    cost: float = 0.0
    started_at: float = 0.0


class _Group(NamedTuple):
    """Requests of one key that are dispatched together, and the cost of each."""

    key: str
    entries: list[PendingRequest]
    cost: float


@dataclass
class _Replica:
    capacity: int
    held: set[PendingRequest] = field(default_factory=set)
    load: float = 0.0

    @property
    def free(self) -> int:
        return max(0, self.capacity - len(self.held))


class RequestScheduler:
    """The replicas' running requests, and the queue of waiting ones.

    A replica has at most ``capacity`` requests. The rest waits here, and the next free replica takes it. So no replica
    is idle while requests wait. The longest expected requests go first, since a long response started last would delay
    the whole batch. Before them goes one probe request of each key with unknown length. Keys that have waited since an
    earlier weight sync go before all newer ones: their batch is trained first.
    """

    def __init__(self, capacity: Sequence[int], lengths: LengthEstimator | None = None) -> None:
        self._replicas = {number: _Replica(size) for number, size in enumerate(capacity)}
        self._lengths = lengths or LengthEstimator()
        self._prefix_replica: dict[str, int] = {}
        self._waiting: dict[str, list[PendingRequest]] = {}
        self._interval = 0
        self._first_interval: dict[str, int] = {}  # of each key

    @property
    def replicas(self) -> tuple[int, ...]:
        """Numbers of the live replicas."""
        return tuple(self._replicas)

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return sum(map(len, self._waiting.values()))

    def held(self, replica: int) -> set[PendingRequest]:
        """Return the running requests of a replica."""
        return self._replicas[replica].held

    def add(self, entries: Iterable[PendingRequest]) -> None:
        """Add new requests to the queue; :meth:`dispatch` dispatches them."""
        for entry in entries:
            self._waiting.setdefault(entry.key, []).append(entry)
            self._first_interval.setdefault(entry.key, self._interval)

    def withdraw(self, entry: PendingRequest) -> None:
        """Remove a request from the queue; a no-op if it is not waiting."""
        if entry in self._waiting.get(entry.key, ()):
            self._dequeue([entry])

    def dispatch(self) -> dict[int, list[PendingRequest]]:
        """Dispatch waiting requests as far as replicas have room; return ``{replica: its new requests}``."""
        dispatched: dict[int, list[PendingRequest]] = defaultdict(list)
        room = sum(replica.free for replica in self._replicas.values())
        for key, entries, cost in self._next_groups(room):
            while entries and room:
                number = self._choose(key, cost * len(entries))
                fitting = entries[: self._replicas[number].free]
                self._dequeue(fitting)
                self._start(number, key, fitting, cost)
                dispatched[number] += fitting
                entries = entries[len(fitting) :]
                room -= len(fitting)
        return dict(dispatched)

    def release(self, replica: int, entry: PendingRequest, tokens: int | None = None) -> None:
        """Record that a replica has finished a request, with a response of ``tokens``; None = aborted."""
        state = self._replicas[replica]
        state.held.remove(entry)
        state.load = state.load - entry.cost if state.held else 0.0
        if tokens is not None:
            self._lengths.finish(entry.key, entry.started_at, tokens)

    def join(self, replica: int, capacity: int) -> None:
        """Add a replica under an unused number."""
        self._replicas[replica] = _Replica(capacity)

    def close(self, replica: int) -> None:
        """Dispatch no further requests to a replica."""
        self._replicas[replica].capacity = 0

    def remove(self, replica: int) -> list[PendingRequest]:
        """Remove a replica; return its requests, which wait again only after :meth:`add`."""
        entries = sorted(self._replicas.pop(replica).held, key=lambda entry: -entry.cost)
        self._prefix_replica = {key: number for key, number in self._prefix_replica.items() if number != replica}
        return entries

    def begin_interval(self) -> None:
        """Begin the interval after a weight sync; lengths and prefixes of keys without requests are forgotten."""
        held = {entry.key for replica in self._replicas.values() for entry in replica.held}
        keys = held | self._waiting.keys()
        self._lengths.keep(keys)
        self._prefix_replica = {key: number for key, number in self._prefix_replica.items() if key in keys}
        self._first_interval = {key: number for key, number in self._first_interval.items() if key in keys}
        self._interval += 1

    def _next_groups(self, room: int) -> list[_Group]:
        """Return the next groups to dispatch, in order; at least enough for the room."""
        if not room:
            return []
        probes = self._probes(room) if self.waiting > room else []
        taken = {probe.entries[0] for probe in probes}
        ranked = [((self._first_interval[probe.key], -math.inf), probe) for probe in probes]
        for key, entries in self._waiting.items():
            if rest := [entry for entry in entries if entry not in taken]:
                cost = self._cost(entries[0])
                ranked.append(((self._first_interval[key], -cost), _Group(key, rest, cost)))
        return [group for _, group in heapq.nsmallest(room, ranked, key=lambda pair: pair[0])]

    def _probes(self, room: int) -> list[_Group]:
        """Return one request of each key with unknown length."""
        unknown = (entries[0] for key, entries in self._waiting.items() if not self._lengths.started(key))
        return [_Group(entry.key, [entry], self._cost(entry)) for entry in islice(unknown, room)]

    def _cost(self, entry: PendingRequest) -> float:
        """Return the cost of a request in tokens."""
        tokens = self._lengths.expected_tokens(entry.key)
        if tokens is None:
            tokens = self._lengths.mean
        return min(entry.most if tokens is None else tokens, entry.most) + entry.prompt

    def _choose(self, key: str, cost: float) -> int:
        """Return the replica for a group of this cost; at least one has room."""
        free = {number: replica.load for number, replica in self._replicas.items() if replica.free > 0}
        least = min(free, key=lambda number: (free[number], number))
        cached = self._prefix_replica.get(key)
        if cached in free and free[cached] <= (1 + AFFINITY) * free[least] + cost:
            return cached
        return least

    def _dequeue(self, entries: Iterable[PendingRequest]) -> None:
        for entry in entries:
            group = self._waiting[entry.key]
            group.remove(entry)
            if not group:
                del self._waiting[entry.key]

    def _start(self, number: int, key: str, entries: Sequence[PendingRequest], cost: float) -> None:
        replica, now = self._replicas[number], self._lengths.start(key)
        for entry in entries:
            entry.cost, entry.started_at = cost, now
        replica.held.update(entries)
        replica.load += cost * len(entries)
        self._prefix_replica[key] = number
