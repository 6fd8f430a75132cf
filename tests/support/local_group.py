"""Workers of this process, called as the processes of a worker group are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Together:
    """Futures of several workers as one call in progress."""

    def __init__(self, futures: Sequence[Future[Any]]) -> None:
        self.futures = futures

    def result(self, timeout_s: float | None = None) -> list[Any]:
        return [future.result(timeout_s) for future in self.futures]


class LocalGroup:
    """Workers with a thread each, which runs the calls of its worker one after another.

    A call that starts with ``fail_at`` raises on the last worker. ``seen`` has the completed calls of each worker, and
    ``log`` those of worker 0 with the role; several groups may share it. A worker stands for ``width`` ranks.
    """

    def __init__(self, role: str, workers: Sequence[Any], log: list[Any] | None = None, width: int = 1) -> None:
        self.role, self.workers, self.log = role, workers, [] if log is None else log
        self.width = width
        self.ranks, self.threads = list(range(len(workers))), [ThreadPoolExecutor(1) for _ in workers]
        self.seen: dict[int, list[Any]] = defaultdict(list)
        self.fail_at: tuple[Any, ...] | None = None

    def submit_on(self, ranks: Iterable[int], verb: str, *arguments: Any, after_failure: bool = False) -> Together:
        return Together([self.threads[rank].submit(self._call, rank, verb, arguments) for rank in ranks])

    def submit_scatter(self, verb: str, receivers: Any, width: int, *arguments: Any) -> Together:
        return self.submit_on(self.ranks, verb, *arguments)

    def submit_gather(
        self, verb: str, payloads: Together, index: int, *, receivers: Mapping[int, int], places: Iterable[int]
    ) -> Together:
        """``verb(index, messages to the worker's ranks)`` on the receivers at these places, after ``payloads``."""

        def gather(place: int) -> None:
            messages = [message for export in payloads.result() for message in export.values()]
            own = [message for message in messages if message.dst_rank // self.width == place]
            self._call(receivers[place], verb, (index,), own)

        return Together([self.threads[receivers[place]].submit(gather, place) for place in places])

    def _call(self, rank: int, verb: str, arguments: tuple[Any, ...], *payloads: Any) -> Any:
        call = (verb, *arguments)
        if self.fail_at is not None and call[: len(self.fail_at)] == self.fail_at and rank == self.ranks[-1]:
            raise RuntimeError("lost rank")
        result = getattr(self.workers[rank], verb)(*arguments, *payloads)
        self.seen[rank].append(call)
        if rank == 0:
            self.log.append((self.role, *call))
        return result

    def settle(self) -> None:
        """Wait for all submitted calls."""
        Together([thread.submit(int) for thread in self.threads]).result()

    def close(self) -> None:
        for thread in self.threads:
            thread.shutdown()
