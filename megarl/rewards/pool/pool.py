"""The reward pool: processes that call reward functions under time limits; imports no torch.

A call that exceeds its time limit is killed with its process, and the process is replaced; only that sample fails. The
standard library's executors have no such limit. A hanging call, for example in a regular expression, holds the
interpreter lock of its process, so nothing inside that process can end it.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait

from megarl.base.child_process import ChildEnvironment
from megarl.base.errors import RewardError
from megarl.base.logs import ProcessLogs, tail
from megarl.rewards.calling import FunctionSpec, serialize_task, timeout_outcome
from megarl.rewards.outcome import INFRASTRUCTURE, Outcome, failed_outcome
from megarl.rewards.pool.jobs import RewardJob, RewardStream, RunCounts, retry_delay_s
from megarl.rewards.pool.process import OUT_OF_MEMORY, RewardProcess
from megarl.rewards.registry import FunctionTraits

LARGEST_CHUNK = 64
CHUNKS_PER_PROCESS = 4
"""Chunks of a batch per process: more chunks balance unequal durations, fewer chunks need fewer messages."""
MAX_FAILED_STARTS = 3
EXIT_GRACE_S = 1.0
"""Seconds for a process that closed its connection to end, so that its exit status is known."""
ASYNC_GRACE_S = 5.0
"""Seconds added to the limit of a coroutine function, which its process enforces unless its event loop is blocked."""


@dataclass(eq=False)
class _OpenJob:
    """An unfinished job."""

    index: int
    job: RewardJob
    attempts: int = 0
    alone: bool = False  # it was in a chunk of several whose process hung or died; run alone to find the cause
    not_before: float = 0.0

    @functools.cached_property
    def task(self) -> bytes | Outcome:
        """The serialized task, or the outcome of a sample that cannot be serialized."""
        return serialize_task(self.job.task)


class RewardPool:
    """Processes that live for the whole run.

    Args:
        max_retries: further attempts after an infrastructure failure, such as a dead process.
        logs: log folder of the run, for ``reward-<number>.log``; None = output of this process.
        first: number of the first process in the names of log files.
    """

    def __init__(
        self,
        functions: Sequence[FunctionSpec],
        traits: Sequence[FunctionTraits],
        processes: int,
        max_retries: int = 3,
        preload: Sequence[int] = (),
        logs: ProcessLogs | None = None,
        first: int = 0,
        environment: ChildEnvironment | None = None,
    ) -> None:
        self.functions = [_with_grace(spec, kind) for spec, kind in zip(functions, traits, strict=True)]
        self._specs = list(functions)
        self._traits = list(traits)
        self.processes = processes
        self.max_retries = max_retries
        self._preload = list(preload)
        self._workers: list[RewardProcess] = []
        self._logs, self._first, self._environment = logs, first, environment
        self._failed_starts = 0
        self._threads: ThreadPoolExecutor | None = None
        self._stream: RewardStream | None = None

    @property
    def traits(self) -> Sequence[FunctionTraits]:
        """Calling convention of each function."""
        return self._traits

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [worker.pid for worker in self._workers]

    def start(self) -> None:
        """Start all processes without waiting for them."""
        while len(self._workers) < self.processes:
            self._workers.append(self._new_process(len(self._workers)))

    def _new_process(self, number: int) -> RewardProcess:
        log = (str(self._logs.file("reward", self._first + number)), self._logs.level) if self._logs else None
        return RewardProcess(self._specs, self._preload, log, self._environment)

    def close(self) -> None:
        """End all processes, and a stream that is open."""
        if self._stream is not None:
            self._stream.end()
        self._end_processes()
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def _end_processes(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers = []

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, jobs: Sequence[RewardJob]) -> tuple[list[Outcome], RunCounts]:
        """Return the outcome of each job, in order; infrastructure failures are retried first.

        Raises:
            RewardError: a process cannot load its functions, or several processes in a row did not start.
        """
        outcomes: dict[int, Outcome] = {}
        batch = _Batch(self, outcomes.__setitem__, RunCounts())
        batch.add(jobs)
        self._run(batch)
        return [outcomes[index] for index in range(len(jobs))], batch.counts

    def stream(self) -> RewardStream | None:
        """Run jobs as they arrive until the pool closes; no other run may overlap. None if a function takes batches."""
        if any(traits.batch for traits in self._traits):
            return None
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="reward-pool")
        self._stream = RewardStream(self._threads, lambda new: self._run(_Batch(self, new.put, new.counts), new))
        return self._stream

    def _run(self, batch: _Batch, source: RewardStream | None = None) -> None:
        """Run the jobs of a batch, and those that a source adds to it."""
        try:
            self.start()
            while source is not None or batch.is_open:
                if source is not None:
                    batch.add(source.take())
                batch.assign(self._workers)
                if source is not None or batch.is_open:
                    self._receive(batch, [] if source is None else [source.wake_handle])
        except BaseException:
            self._end_processes()  # the running calls belong to an abandoned batch
            raise

    def _receive(self, batch: _Batch, more: Sequence[int] = ()) -> None:
        """Wait for the next message, exit, deadline or readable handle of ``more``, and process messages."""
        handles = [handle for worker in self._workers for handle in (worker.connection, worker.exit_handle)]
        wait([*handles, *more], batch.wait_s(self._workers))
        for at, worker in enumerate(self._workers):
            try:
                dead = worker.is_dead()  # before receiving: messages sent before the death count
                for index, outcome in worker.receive():
                    batch.take(index, outcome)
                if worker.loaded:
                    self._failed_starts = 0
            except EOFError:
                dead = True
            if dead:
                self._replace(at, batch, overdue=False)
            elif worker.deadline is not None and time.monotonic() >= worker.deadline:
                self._replace(at, batch, overdue=True)

    def _replace(self, at: int, batch: _Batch, overdue: bool) -> None:
        worker = self._workers[at]
        manner = worker.end(0.0 if overdue else EXIT_GRACE_S)
        batch.counts.replaced += 1
        if not worker.loaded:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                del self._workers[at]
                started = f"{self._failed_starts} reward processes in a row did not start"
                log = f"\n--- end of its log, {worker.log} ---\n{tail(worker.log)}" if worker.log else ""
                text = f"{started}; the last {manner}{log}"
                raise RewardError(text, code="reward.processes-die")
        self._workers[at] = self._new_process(at)
        batch.reassign(worker, overdue, manner)


class _Batch:
    """The unfinished jobs of a run.

    Args:
        report: receives the outcome of each job, by its number in the order of :meth:`add`.
        counts: gets the retries and replacements.
    """

    def __init__(self, pool: RewardPool, report: Callable[[int, Outcome], None], counts: RunCounts) -> None:
        self.pool, self.counts = pool, counts
        self.queues = [deque[_OpenJob]() for _ in pool.functions]
        self.totals = [0 for _ in pool.functions]
        self.running: dict[int, _OpenJob] = {}
        self._report = report
        self._added = self._ended = 0

    def add(self, jobs: Sequence[RewardJob]) -> None:
        """Queue further jobs."""
        for number, queue in enumerate(self.queues):
            if not queue:  # the jobs of earlier chunks do not count
                self.totals[number] = 0
        for index, job in enumerate(jobs, self._added):
            self.queues[job.function].append(_OpenJob(index, job))
            self.totals[job.function] += 1
        self._added += len(jobs)

    @property
    def is_open(self) -> bool:
        """Whether a job is unfinished."""
        return self._ended < self._added

    def _end(self, index: int, outcome: Outcome) -> None:
        self._ended += 1
        self._report(index, outcome)

    def _chunk_size(self, number: int) -> int:
        if self.pool.traits[number].batch:
            return self._added
        chunks = self.pool.processes * CHUNKS_PER_PROCESS
        return max(1, min(LARGEST_CHUNK, -(-self.totals[number] // chunks)))

    def assign(self, workers: Sequence[RewardProcess]) -> None:
        """Send chunks to idle processes."""
        for worker in workers:
            while worker.is_idle and (next_chunk := self._next_chunk()):
                number, chunk = next_chunk
                tasks: dict[int, bytes] = {}
                for open_job in chunk:
                    if isinstance(open_job.task, Outcome):
                        self._end(open_job.index, open_job.task)
                    else:
                        tasks[open_job.index] = open_job.task
                        self.running[open_job.index] = open_job
                if tasks:
                    worker.send(list(tasks), number, self.pool.functions[number], list(tasks.values()))

    def _next_chunk(self) -> tuple[int, list[_OpenJob]] | None:
        now = time.monotonic()
        for number, queue in enumerate(self.queues):
            due = [open_job for open_job in queue if open_job.not_before <= now] if queue else []
            if due:
                size = self._chunk_size(number)
                chunk = due[:1] if due[0].alone else [o for o in due[:size] if not o.alone]
                for open_job in chunk:
                    queue.remove(open_job)
                return number, chunk
        return None

    def take(self, index: int, outcome: Outcome) -> None:
        """Record the outcome of a job, or retry it."""
        open_job = self.running.pop(index)
        if outcome.kind == INFRASTRUCTURE:
            self._retry(open_job, outcome)
        else:
            self._end(index, outcome)

    def _retry(self, open_job: _OpenJob, outcome: Outcome) -> None:
        """Queue another attempt, or record the failure after the last one."""
        open_job.attempts += 1
        if open_job.attempts > self.pool.max_retries:
            self._end(open_job.index, outcome)
            return
        self.counts.retries += 1
        open_job.not_before = time.monotonic() + retry_delay_s(open_job.attempts)
        self.queues[open_job.job.function].append(open_job)

    def reassign(self, worker: RewardProcess, overdue: bool, manner: str) -> None:
        """Handle the unanswered jobs of an ended process: the job at fault fails or is retried, others run again."""
        if not worker.pending:
            return
        open_jobs = [self.running.pop(index) for index in worker.pending]
        number = open_jobs[0].job.function
        traits, spec = self.pool.traits[number], self.pool._specs[number]
        at_fault = open_jobs if traits.batch else open_jobs[:1]
        if traits.is_async and len(open_jobs) > 1:
            at_fault = []  # any of the concurrent calls: each is run alone to find it
            for open_job in open_jobs:
                open_job.alone = True
        for open_job in at_fault:
            if overdue:
                self._end(open_job.index, timeout_outcome(spec))
            elif manner == OUT_OF_MEMORY and worker.has_answered:  # earlier calls may have kept the memory
                open_job.alone = not traits.batch
                self.queues[number].appendleft(open_job)
            else:
                open_job.alone = not traits.batch
                self._retry(open_job, failed_outcome(INFRASTRUCTURE, f"the process that called {spec.spec} {manner}"))
        for open_job in reversed(open_jobs[len(at_fault) :]):
            self.queues[number].appendleft(open_job)

    def wait_s(self, workers: Sequence[RewardProcess]) -> float | None:
        """Return the seconds until the next deadline or retry; None = none is due."""
        moments = [worker.deadline for worker in workers if worker.deadline is not None]
        if any(worker.is_idle for worker in workers):
            moments += [open_job.not_before for queue in self.queues for open_job in queue]
        return max(0.0, min(moments) - time.monotonic()) if moments else None


def _with_grace(spec: FunctionSpec, traits: FunctionTraits) -> FunctionSpec:
    if not traits.is_async or spec.timeout_s is None:
        return spec
    return FunctionSpec(spec.spec, spec.kwargs, spec.timeout_s + ASYNC_GRACE_S, spec.max_concurrency)
