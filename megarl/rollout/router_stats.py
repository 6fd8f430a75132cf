"""Statistics of a router, and the timeline of its requests."""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megarl.base.reductions import Smallest, Total
from megarl.rollout.request_scheduler import RequestScheduler
from megarl.tracing import TRACER, counter, past_span


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


class RequestSpans:
    """Timeline of requests at replicas, if one records: a span per request, counters of busy slots and of the queue."""

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

    def count(self, scheduler: RequestScheduler) -> None:
        """Record the number of running requests of each replica, and of waiting ones."""
        if TRACER.recording:
            for replica in scheduler.replicas:
                counter(f"replica {replica} requests", busy=len(scheduler.held(replica)))
            counter("requests waiting", waiting=scheduler.waiting)

    def _take_lane(self, replica: int) -> int:
        """Return the lowest free lane, so that spans do not overlap."""
        if self._free[replica]:
            return heapq.heappop(self._free[replica])
        self._lanes[replica] += 1
        return self._lanes[replica] - 1
