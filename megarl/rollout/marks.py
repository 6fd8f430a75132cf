"""Requests at the replicas, for the timeline: a bar for each, and the places that are taken and the queue as curves."""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Iterable

from megarl.rollout.load_board import LoadBoard
from megarl.tracing import TRACER, counter, past_span


class RequestMarks:
    """Where requests are and since when; without effect while no timeline is recorded."""

    def __init__(self) -> None:
        self._begun: dict[tuple[int, str], tuple[int, int]] = {}
        self._free: dict[int, list[int]] = defaultdict(list)
        self._places: dict[int, int] = defaultdict(int)

    def given(self, replica: int, requests: Iterable[str]) -> None:
        """A replica has got requests."""
        if TRACER.recording:
            now = time.monotonic_ns()
            for request in requests:
                self._begun[replica, request] = (now, self._take_place(replica))

    def ended(self, replica: int, request: str, prompt: int, tokens: int | None) -> None:
        """A replica has answered a request, or cut it short (``tokens`` None)."""
        begun = self._begun.pop((replica, request), None)
        if begun is not None:
            start, place = begun
            heapq.heappush(self._free[replica], place)
            lane = f"replica {replica} place {place}"
            past_span("request", "rollout", start, lane, request=request, prompt_tokens=prompt, tokens=tokens)

    def lost(self, replica: int) -> None:
        """A replica is gone with what it had."""
        for number, request in [key for key in self._begun if key[0] == replica]:
            self.ended(number, request, 0, None)

    def count(self, board: LoadBoard) -> None:
        """How many places are taken at each replica, and how many requests wait."""
        if TRACER.recording:
            for replica in board.replicas:
                counter(f"replica {replica} requests", busy=len(board.held(replica)))
            counter("requests waiting", waiting=board.waiting)

    def _take_place(self, replica: int) -> int:
        """The lowest lane that is free, so that bars do not overlap."""
        if self._free[replica]:
            return heapq.heappop(self._free[replica])
        self._places[replica] += 1
        return self._places[replica] - 1
