"""Workers of this process, called as the processes of a worker group are."""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor


class Together:
    """Futures of several workers as one call in progress."""

    def __init__(self, futures):
        self.futures = futures

    def result(self, timeout_s=None):
        return [future.result(timeout_s) for future in self.futures]


class LocalGroup:
    """Workers with a thread each, which runs the calls of its worker one after another.

    A call that starts with ``fail_at`` raises on the last worker. ``seen`` has the completed calls of each worker, and
    ``log`` those of worker 0 with the role; several groups may share it. A worker stands for ``width`` ranks.
    """

    def __init__(self, role, workers, log=None, width=1):
        self.role, self.workers, self.log = role, workers, [] if log is None else log
        self.width = width
        self.ranks, self.threads = list(range(len(workers))), [ThreadPoolExecutor(1) for _ in workers]
        self.seen, self.fail_at = defaultdict(list), None

    def submit_on(self, ranks, verb, *arguments, after_failure=False):
        return Together([self.threads[rank].submit(self._call, rank, verb, arguments) for rank in ranks])

    def submit_scatter(self, verb, destinations, *arguments):
        return self.submit_on(self.ranks, verb, *arguments)

    def submit_gather(self, verb, payloads, index, *, receivers, places):
        """``verb(index, messages to the worker's ranks)`` on the receivers at these places, after ``payloads``."""

        def gather(place):
            messages = [message for export in payloads.result() for message in export.values()]
            own = [message for message in messages if message.dst_rank // self.width == place]
            self._call(receivers[place], verb, (index,), own)

        return Together([self.threads[receivers[place]].submit(gather, place) for place in places])

    def _call(self, rank, verb, arguments, *payloads):
        call = (verb, *arguments)
        if self.fail_at is not None and call[: len(self.fail_at)] == self.fail_at and rank == self.ranks[-1]:
            raise RuntimeError("lost rank")
        result = getattr(self.workers[rank], verb)(*arguments, *payloads)
        self.seen[rank].append(call)
        if rank == 0:
            self.log.append((self.role, *call))
        return result

    def settle(self):
        """Wait for all submitted calls."""
        Together([thread.submit(int) for thread in self.threads]).result()

    def close(self):
        for thread in self.threads:
            thread.shutdown()
