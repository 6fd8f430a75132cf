"""A pool of processes that call reward functions under time limits; imports no torch.

What runs out of its time is killed with its process, which is replaced, and only the sample at fault is lost. The
standard library's executor has no such limit: a call that hangs there, in a regular expression for instance, holds the
interpreter's lock of its process for ever, and nothing inside of that process can end it.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait

from megarl.errors import RewardError
from megarl.logs import ProcessLogs, tail
from megarl.rewards.calling import FunctionSpec, Task, timed_out
from megarl.rewards.outcome import BAD_SAMPLE, INFRASTRUCTURE, Outcome, failed
from megarl.rewards.pool.process import WorkerProcess
from megarl.rewards.pool.runner import Counts, Job, retry_delay_s
from megarl.rewards.registry import Traits

LARGEST_CHUNK = 64
CHUNKS_PER_PROCESS = 4
"""Into which a batch is cut: more even out how long samples take, fewer make fewer messages."""
MAX_FAILED_STARTS = 3
EXIT_GRACE_S = 1.0
"""For a process that has hung up to be gone, so that it can be said how it ended."""
ASYNC_GRACE_S = 5.0
"""Beyond the limit that a coroutine function has in its own process, where a loop that is blocked cannot keep it."""


@dataclass(eq=False)
class _Open:
    """A job that is not done."""

    place: int
    job: Job
    attempts: int = 0
    alone: bool = False  # it was in a process that hung or died with several, so that it must show itself
    not_before: float = 0.0


class RewardPool:
    """Processes that live from batch to batch.

    Args:
        functions: by number.
        traits: how each is called.
        processes: at most.
        max_retries: further attempts after an infrastructure failure, such as a process that died.
        first: functions that processes load as they start; the others when they are first called.
        logs: of the run, for ``reward-<number>.log``; None = they print where this process does.
    """

    def __init__(
        self,
        functions: Sequence[FunctionSpec],
        traits: Sequence[Traits],
        processes: int,
        max_retries: int = 3,
        first: Sequence[int] = (),
        logs: ProcessLogs | None = None,
    ) -> None:
        self.functions = [_with_grace(spec, kind) for spec, kind in zip(functions, traits, strict=True)]
        self._specs = list(functions)
        self._traits = list(traits)
        self.processes = processes
        self.max_retries = max_retries
        self._first = list(first)
        self._workers: list[WorkerProcess] = []
        self._logs = logs
        self._failed_starts = 0

    @property
    def traits(self) -> Sequence[Traits]:
        """As the protocol says."""
        return self._traits

    @property
    def pids(self) -> list[int]:
        """Of its processes."""
        return [worker.pid for worker in self._workers]

    def start(self) -> None:
        """Start all processes, and wait for none."""
        while len(self._workers) < self.processes:
            self._workers.append(self._new_process(len(self._workers)))

    def _new_process(self, number: int) -> WorkerProcess:
        log = (str(self._logs.file("reward", number)), self._logs.level) if self._logs else None
        return WorkerProcess(self._specs, self._first, log)

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.end()
        self._workers = []

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, jobs: Sequence[Job]) -> tuple[list[Outcome], Counts]:
        """As the protocol says."""
        batch = _Batch(self, jobs)
        self.start()
        try:
            while batch.is_open:
                batch.assign(self._workers)
                self._listen(batch)
        except BaseException:
            self.close()  # whatever is still under way belongs to a batch that is given up
            raise
        return batch.result(), batch.counts

    def _listen(self, batch: _Batch) -> None:
        """Wait until something happens, and take it in."""
        handles = [handle for worker in self._workers for handle in (worker.connection, worker.exit_handle)]
        wait(handles, batch.wait_s(self._workers))
        for at, worker in enumerate(self._workers):
            try:
                dead = worker.is_dead()  # before it is heard: what it said before it died counts
                for place, outcome in worker.hear():
                    batch.take(place, outcome)
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
        how = worker.end(0.0 if overdue else EXIT_GRACE_S)
        batch.counts.replaced += 1
        if not worker.loaded:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                del self._workers[at]
                told = f"{self._failed_starts} processes for rewards in a row did not start; the last {how}"
                raise RewardError(told + _end_of_log(worker.log))
        self._workers[at] = self._new_process(at)
        batch.lost(worker, overdue, how)


def _end_of_log(path: str | None) -> str:
    return f"\n--- end of its log, {path} ---\n{tail(path)}" if path else ""


class _Batch:
    """The jobs of one run, and what is known of them."""

    def __init__(self, pool: RewardPool, jobs: Sequence[Job]) -> None:
        self.pool = pool
        self.jobs = jobs
        self.counts = Counts()
        self.queues = [deque[_Open]() for _ in pool.functions]
        self.under_way: dict[int, _Open] = {}
        self.outcomes: dict[int, Outcome] = {}
        for place, job in enumerate(jobs):
            self.queues[job.function].append(_Open(place, job))
        self.chunks = [self._chunk_size(number) for number in range(len(pool.functions))]

    @property
    def is_open(self) -> bool:
        """Whether a job is not done."""
        return len(self.outcomes) < len(self.jobs)

    def result(self) -> list[Outcome]:
        """Outcomes in the order of the jobs."""
        return [self.outcomes[place] for place in range(len(self.jobs))]

    def _chunk_size(self, number: int) -> int:
        if self.pool.traits[number].batch:
            return len(self.jobs)
        pieces = self.pool.processes * CHUNKS_PER_PROCESS
        return max(1, min(LARGEST_CHUNK, -(-len(self.queues[number]) // pieces)))

    def assign(self, workers: Sequence[WorkerProcess]) -> None:
        """Give idle processes something to do."""
        for worker in workers:
            while worker.is_idle and (found := self._next_chunk()):
                number, chunk = found
                if self._can_travel(chunk):
                    self.under_way |= {open_job.place: open_job for open_job in chunk}
                    tasks = [open_job.job.task for open_job in chunk]
                    worker.send([o.place for o in chunk], number, self.pool.functions[number], tasks)

    def _next_chunk(self) -> tuple[int, list[_Open]] | None:
        now = time.monotonic()
        for number, queue in enumerate(self.queues):
            due = [open_job for open_job in queue if open_job.not_before <= now] if queue else []
            if due:
                size = self.chunks[number]
                chunk = due[:1] if due[0].alone else [o for o in due[:size] if not o.alone]
                for open_job in chunk:
                    queue.remove(open_job)
                return number, chunk
        return None

    def _can_travel(self, chunk: Sequence[_Open]) -> bool:
        """Whether tasks can be sent to another process; those that cannot are failed, the others put back."""
        try:
            pickle.dumps([open_job.job.task for open_job in chunk])
            return True
        except Exception:
            for open_job in reversed(chunk):
                problem = _why_not(open_job.job.task)
                if problem:
                    self.outcomes[open_job.place] = failed(BAD_SAMPLE, problem)
                else:
                    self.queues[open_job.job.function].appendleft(open_job)
            return False

    def take(self, place: int, outcome: Outcome) -> None:
        """Take in what a process said of a job."""
        open_job = self.under_way.pop(place)
        if outcome.kind == INFRASTRUCTURE:
            self._again(open_job, outcome)
        else:
            self.outcomes[place] = outcome

    def _again(self, open_job: _Open, outcome: Outcome) -> None:
        """Try once more, or give up."""
        open_job.attempts += 1
        if open_job.attempts > self.pool.max_retries:
            self.outcomes[open_job.place] = outcome
            return
        self.counts.retries += 1
        open_job.not_before = time.monotonic() + retry_delay_s(open_job.attempts)
        self.queues[open_job.job.function].append(open_job)

    def lost(self, worker: WorkerProcess, overdue: bool, how: str) -> None:
        """What a process that is gone had not answered: the job at fault pays, the others run elsewhere."""
        if not worker.places:
            return
        open_jobs = [self.under_way.pop(place) for place in worker.places]
        number = open_jobs[0].job.function
        traits, spec = self.pool.traits[number], self.pool._specs[number]
        blamed = open_jobs if traits.batch else open_jobs[:1]
        if traits.is_async and len(open_jobs) > 1:
            blamed = []  # any of them: each is called alone, and shows itself
            for open_job in open_jobs:
                open_job.alone = True
        for open_job in blamed:
            if overdue:
                self.outcomes[open_job.place] = timed_out(spec)
            else:
                open_job.alone = not traits.batch
                self._again(open_job, failed(INFRASTRUCTURE, f"the process that called {spec.spec} {how}"))
        for open_job in reversed(open_jobs[len(blamed) :]):
            self.queues[number].appendleft(open_job)

    def wait_s(self, workers: Sequence[WorkerProcess]) -> float | None:
        """Seconds until a process runs out of its time, or a job may be tried again; None = nothing is due."""
        moments = [worker.deadline for worker in workers if worker.deadline is not None]
        if any(worker.is_idle for worker in workers):
            moments += [open_job.not_before for queue in self.queues for open_job in queue]
        return max(0.0, min(moments) - time.monotonic()) if moments else None


def _with_grace(spec: FunctionSpec, traits: Traits) -> FunctionSpec:
    if not traits.is_async or spec.timeout_s is None:
        return spec
    return FunctionSpec(spec.spec, spec.kwargs, spec.timeout_s + ASYNC_GRACE_S, spec.max_concurrency)


def _why_not(task: Task) -> str | None:
    """Why a task cannot be sent to another process; None: it can."""
    try:
        pickle.dumps(task)
        return None
    except Exception as error:
        return f"the sample cannot be sent to the process that scores it: {type(error).__name__}: {error}"
