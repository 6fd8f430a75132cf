"""All processes of one role, called together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from megarl.cluster.failures import Task, WorkerFailed, failure_of, gather
from megarl.cluster.processes import nsight_options
from megarl.cluster.resources import PlacedPool
from megarl.cluster.split import Plan, collect, plan_rows, split
from megarl.cluster.worker_process import BusyResult, WorkerCard, WorkerProcess
from megarl.data import DataProto
from megarl.errors import ResourceError, WorkerError
from megarl.models.layout import ParallelLayout
from megarl.sharding import Routes
from megarl.workers.dispatch import Dispatch, VerbMark
from megarl.workers.settings import MicroBatchBudget

_Collect = Callable[[list[Any]], Any]


class PerRank:
    """An argument that differs by rank: ``values[rank]``, which may be a Ray reference, is what the rank receives."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.values = list(values)


class Pending:
    """A verb that runs on all processes of a group; see :meth:`WorkerGroup.submit`.

    Args:
        groups: the groups that the calls run on; one that fails is marked as unusable.
        tasks: the calls to wait for.
        collect: from their results, in order, to the verb's result.
    """

    def __init__(self, groups: Sequence[WorkerGroup], tasks: Sequence[Task], collect: _Collect) -> None:
        self.groups = tuple(groups)
        self.tasks = tuple(tasks)
        self._collect = collect
        self._outcome: tuple[Any] | None = None

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for all processes and put their results together; the same object when asked again.

        Raises:
            WorkerFailed: the first worker that failed, at once, even while its peers hang.
            WorkerSilent: ``timeout_s`` seconds have passed.
        """
        if self._outcome is None:
            self._outcome = (self._collect(_gather(self.groups, self.tasks, timeout_s)),)
        return self._outcome[0]


class Scattered(Pending):
    """Payloads that stay where they were made until the process they are for takes them.

    Its result is None, once every source rank has made its payloads.

    Attributes:
        refs: ``refs[source rank][destination]``, references to payloads that the driver never holds.
    """

    def __init__(self, group: WorkerGroup, tasks: Sequence[Task], refs: list[list[ray.ObjectRef]]) -> None:
        super().__init__([group], tasks, lambda results: None)
        self.refs = refs


class WorkerGroup:
    """One Ray actor per rank of a role, started in the background.

    The constructor returns at once, so that several groups start side by side; the first call, or
    :func:`wait_ready`, waits. A verb of the worker class is called as a method of the group and blocks;
    :meth:`submit` does not. After a failure the group refuses further calls.
    A verb cannot have the name of a public member of this class.

    Args:
        role: name of the role, used in every error.
        worker_cls: a plain class, best as ``"package.module.Class"`` so that the driver need not import it. Built on
            every rank as ``worker_cls(place, **worker_kwargs)``, ``place`` being its ``WorkerPlace``.
        worker_kwargs: the remaining constructor arguments, equal on all ranks.
        layout: parallel sizes; says how many ranks there are and which of them own results.
        pool: devices to live on, shared with other roles; with one device per process, rank ``r`` is on device
            ``r % devices``.
        env: environment variables of the processes, set before the class is imported.
        budgets: how the worker cuts a verb's rows into micro-batches, for the verbs that do.
        devices_per_process: neighbouring devices that each process computes on; it sees those GPUs and no others.

    Raises:
        ResourceError: the role needs more GPUs than the pool has, or a process's are on different nodes.
    """

    def __init__(
        self,
        role: str,
        worker_cls: str | type,
        worker_kwargs: Mapping[str, Any],
        layout: ParallelLayout,
        pool: PlacedPool,
        env: Mapping[str, str] | None = None,
        budgets: Mapping[str, MicroBatchBudget] | None = None,
        devices_per_process: int = 1,
    ) -> None:
        needed = layout.world_size * devices_per_process
        if pool.pool.device == "cuda" and needed > pool.pool.num_devices:
            raise ResourceError(
                f"{role} with {layout.describe()} needs {needed} GPUs, pool {pool.pool.name!r} has "
                f"{pool.pool.num_devices}, and two ranks of one role cannot share one: use a smaller layout or a "
                "larger pool"
            )
        self.role = role
        self.layout = layout
        self.budgets = dict(budgets or {})
        self._failure: WorkerFailed | None = None
        self._cards: list[WorkerCard] = []
        self._owners = [layout.rank(dp=dp, pp=layout.pp - 1) for dp in range(layout.dp)]
        self._pool, self._env, self._worker_cls = pool, dict(env or {}), worker_cls
        self._hosts: dict[int, WorkerCard] = {}
        self._busy: dict[str, list[float]] = {}
        self._span = devices_per_process
        self._actors: list[Any] = [self._host(rank) for rank in range(layout.world_size)]
        self._address = self._actors[0].reserve_address.remote()
        self._kwargs = ray.put(dict(worker_kwargs))
        self._described, self._starting = self._start(range(layout.world_size))
        pool.processes.groups.append(self)

    @property
    def world_size(self) -> int:
        """Processes of the role."""
        return self.layout.world_size

    @property
    def verbs(self) -> dict[str, VerbMark]:
        """The worker's verbs and their marks; waits for the start."""
        wait_ready([self])
        return self._cards[0].marks

    @property
    def processes(self) -> dict[int, WorkerCard]:
        """The processes that have said who they are, by rank; also those whose workers are not built yet."""
        return self._hosts

    def ask(self, rank: int, method: str, *args: Any) -> ray.ObjectRef:
        """Call a method of :class:`WorkerProcess` itself, which is no verb."""
        return getattr(self._actors[rank], method).remote(*args)

    def submit(self, verb: str, *args: Any, **kwargs: Any) -> Pending:
        """Start a verb on all processes, as its mark says.

        Args:
            verb: its name.
            args: as the verb takes them. For ``SPLIT``, every ``DataProto`` here is split like the first one; all must
                have the same rows. A :class:`PerRank` differs by rank. A Ray reference is resolved by the process
                that receives it.
            kwargs: same on every rank, neither split nor resolved.

        Raises:
            AttributeError: the worker has no such verb; lists those that it has.
            DataError: the batch cannot be split as the verb needs it.
            WorkerError: the group failed before.
        """
        mark = self._mark(verb)
        if mark.dispatch is Dispatch.RANK:
            raise TypeError(f"{self.role}.{verb} is for one rank: use call_on")
        if mark.dispatch is Dispatch.SPLIT:
            return self._submit_split(verb, mark, args, kwargs)
        # What may be large is stored once, for all processes to read.
        shared = [ray.put(arg) if isinstance(arg, DataProto | Routes) else arg for arg in args]
        owner = self._owners[0]
        keep = [mark.dispatch is Dispatch.ALL or rank == owner for rank in range(self.world_size)]
        refs = [
            actor.call.remote(verb, keep[rank], kwargs, *_for_rank(shared, rank))
            for rank, actor in enumerate(self._actors)
        ]
        collect_one: _Collect = list if mark.dispatch is Dispatch.ALL else lambda results: results[owner]
        return Pending([self], self._tasks(refs, verb, mark.phase), collect_one)

    def submit_on(self, ranks: Sequence[int], verb: str, *args: Any) -> Pending:
        """Start a verb on some processes only; the result is the list of what they returned.

        Raises:
            AttributeError, WorkerError: as :meth:`submit`.
        """
        mark = self._mark(verb)
        tasks = [
            self._task(self._actors[rank].call.remote(verb, True, {}, *args), rank, verb, mark.phase) for rank in ranks
        ]
        return Pending([self], tasks, list)

    async def call_on(self, rank: int, verb: str, *args: Any) -> Any:
        """Run a ``RANK`` verb on one process. A failure is that rank's alone: the group goes on.

        Raises:
            WorkerFailed: it raised, or its process died.
            AttributeError, WorkerError: as :meth:`submit`.
        """
        mark = self._mark(verb)
        ref = self._actors[rank].call.remote(verb, True, {}, *args)
        try:
            return await ref
        except RayError as error:
            raise failure_of(self._task(ref, rank, verb, mark.phase), error) from error

    def restart(self, ranks: Sequence[int]) -> None:
        """Replace processes, dead or alive, by new ones, and wait until their workers are built.

        For workers that do not meet each other in the constructor. The new ones know nothing of earlier verbs. A
        group that failed is usable again.

        Raises:
            WorkerFailed: one did not start.
        """
        self._failure = None
        for rank in ranks:
            ray.kill(self._actors[rank])
            self._actors[rank] = self._host(rank)
        described, starting = self._start(ranks)
        for rank, card in zip(ranks, _gather([self], described, None), strict=True):
            self._cards[rank] = self._hosts[rank] = card
        started = _gather([self], [replace(task, card=self._cards[task.rank]) for task in starting], None)
        for rank, card in zip(ranks, started[len(ranks) :], strict=True):
            self._cards[rank] = card

    def plan(self, verb: str, batch: DataProto) -> Plan:
        """The rows of ``batch`` that each data-parallel rank would get of a ``SPLIT`` verb.

        Raises:
            AttributeError, DataError, WorkerError: as :meth:`submit`.
        """
        return self._plan(verb, self._mark(verb), batch)

    def take_busy(self) -> dict[str, list[float]]:
        """Seconds that each DP rank was busy since the last call, by ``SPLIT`` verb: its busiest process, less the time
        in collectives. Empty where processes are not watched."""
        busy, self._busy = self._busy, {}
        return busy

    def submit_scatter(self, verb: str, destinations: int, *args: Any, **kwargs: Any) -> Scattered:
        """Start an ``ALL`` verb that returns ``{destination: payload}``, and leave the payloads where they are.

        Raises:
            AttributeError, WorkerError: as :meth:`submit`.
        """
        mark = self._mark(verb)
        refs = [
            actor.call_scatter.options(num_returns=destinations + 1).remote(
                verb, destinations, kwargs, *_for_rank(args, rank)
            )
            for rank, actor in enumerate(self._actors)
        ]
        # With one return value Ray gives the reference itself.
        refs = [[row] if isinstance(row, ray.ObjectRef) else list(row) for row in refs]
        tasks = self._tasks([row[-1] for row in refs], verb, mark.phase)
        return Scattered(self, tasks, [row[:-1] for row in refs])

    def submit_gather(self, verb: str, payloads: Scattered, *args: Any) -> Pending:
        """Start an ``ALL`` verb as ``verb(*args, list of this rank's payloads)`` when its payloads are there.

        Destinations are dealt out to the ranks in order, equally many to each. The payloads go from process to
        process. The result is None; it comes when sources and receivers are done.

        Raises:
            AttributeError, WorkerError: as :meth:`submit`.
        """
        mark = self._mark(verb)
        each = len(payloads.refs[0]) // self.world_size
        own = [slice(rank * each, (rank + 1) * each) for rank in range(self.world_size)]
        refs = [
            actor.call_gather.remote(verb, args, *[ref for row in payloads.refs for ref in row[own[rank]]])
            for rank, actor in enumerate(self._actors)
        ]
        tasks = [*payloads.tasks, *self._tasks(refs, verb, mark.phase)]
        return Pending([*payloads.groups, self], tasks, lambda results: None)

    def shutdown(self) -> None:
        """Kill the processes."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors, self._hosts = [], {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return functools.partial(self._call, name)

    def _call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        return self.submit(verb, *args, **kwargs).result()

    def _submit_split(self, verb: str, mark: VerbMark, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Pending:
        batches = [arg for arg in args if isinstance(arg, DataProto)]
        if not batches:
            raise TypeError(f"{self.role}.{verb} is split over DP and needs a DataProto argument")
        plan, mini_batch_rows = self._plan(verb, mark, batches[0]), _mini_batch_rows(mark, batches[0])
        # One object per chunk: the TP and PP ranks of a DP rank read the same copy.
        columns = [
            [ray.put(chunk) for chunk in split(mark.read(arg), plan, mini_batch_rows)]
            if isinstance(arg, DataProto)
            else [arg] * self.layout.dp
            for arg in args
        ]
        refs = []
        for rank, actor in enumerate(self._actors):
            chunk_args = [column[self.layout.coordinate(rank).dp] for column in columns]
            refs.append(actor.call_split.remote(verb, rank in self._owners, kwargs, *_for_rank(chunk_args, rank)))

        def collect_rows(answers: Sequence[BusyResult]) -> Any:
            self._note_busy(verb, [answer.busy_s for answer in answers])
            return collect([answers[owner].result for owner in self._owners], plan)

        return Pending([self], self._tasks(refs, verb, mark.phase), collect_rows)

    def _note_busy(self, verb: str, seconds: Sequence[float | None]) -> None:
        """Adds up the seconds of the busiest process of each DP rank."""
        busiest = [0.0] * self.layout.dp
        for rank, busy in enumerate(seconds):
            if busy is None:
                return
            dp = self.layout.coordinate(rank).dp
            busiest[dp] = max(busiest[dp], busy)
        before = self._busy.get(verb, [0.0] * self.layout.dp)
        self._busy[verb] = [sum(both) for both in zip(before, busiest, strict=True)]

    def _plan(self, verb: str, mark: VerbMark, batch: DataProto) -> Plan:
        rows, budget = _mini_batch_rows(mark, batch), self.budgets.get(verb)
        return plan_rows(batch, self.layout.dp, rows, equal=mark.equal_rows, budget=budget)

    def _mark(self, verb: str) -> VerbMark:
        if self._failure is not None:
            raise WorkerError(f"{self.role} cannot run {verb}: it failed before. {self._failure}") from self._failure
        if verb not in self.verbs:
            raise AttributeError(f"{self.role} has no verb {verb!r}; it has: {', '.join(sorted(self.verbs))}")
        return self.verbs[verb]

    def _host(self, rank: int) -> Any:
        """A process without a worker."""
        tracing = self._pool.processes.options
        options = self._pool.actor_options(rank * self._span) | nsight_options(tracing.profile(self.role, rank))
        host = ray.remote(WorkerProcess).options(**options)
        return host.remote(self.role, rank, self.world_size, self._environment(rank), tracing, self._pool.logs)

    def _start(self, ranks: Sequence[int]) -> tuple[list[Task], list[Task]]:
        """Starts building the workers of new processes: who they are, then what tells that they are built."""

        def tasks(refs: Sequence[ray.ObjectRef], verb: str) -> list[Task]:
            return [Task(ref, self.role, rank, verb, "") for rank, ref in zip(ranks, refs, strict=True)]

        actors = [self._actors[rank] for rank in ranks]
        described = tasks([actor.describe.remote() for actor in actors], "start")
        loaded = tasks([actor.load.remote(self._worker_cls) for actor in actors], "load")
        started = tasks([actor.start.remote(self._address, self._kwargs) for actor in actors], "start")
        return described, [*loaded, *started]

    def _tasks(self, refs: Sequence[ray.ObjectRef], verb: str, phase: str = "") -> list[Task]:
        return [self._task(ref, rank, verb, phase) for rank, ref in enumerate(refs)]

    def _task(self, ref: ray.ObjectRef, rank: int, verb: str, phase: str) -> Task:
        return Task(ref, self.role, rank, verb, phase, self._cards[rank])

    def _environment(self, rank: int) -> dict[str, str]:
        """Variables of one process; those that the group was given win."""
        first = rank * self._span
        own = {"LOCAL_RANK": str(self._pool.local_rank(first))}
        if self._pool.pool.device == "cpu":
            # Two processes with two threads each on two cores are several times slower than with one.
            own["OMP_NUM_THREADS"] = "1"
        elif self._span > 1:
            # A process claims a share of one device's bundle, by which Ray shows it that device alone.
            own["CUDA_VISIBLE_DEVICES"] = ",".join(self._pool.gpu_ids(range(first, first + self._span)))
        return {**own, **self._env}


def wait_ready(groups: Iterable[WorkerGroup], timeout_s: float | None = None) -> None:
    """Wait until the processes of all groups, which start side by side, have built their workers.

    Raises:
        WorkerFailed: the first that failed, with role and rank.
        WorkerError: not all were ready within ``timeout_s`` seconds.
    """
    starting = [group for group in groups if not group._cards]
    # Who they are comes first: then a death during the start can show the end of the process's log.
    described = iter(_gather(starting, [task for group in starting for task in group._described], timeout_s))
    tasks: list[Task] = []
    for group in starting:
        cards = [next(described) for _ in group._described]
        group._hosts = dict(enumerate(cards))
        tasks += [replace(task, card=cards[task.rank]) for task in group._starting]
    started = iter(_gather(starting, tasks, timeout_s))
    for group in starting:
        group._cards = [next(started) for _ in group._starting][-group.world_size :]
        shadowed = sorted(group._cards[0].marks.keys() & set(dir(WorkerGroup)))
        if shadowed:
            raise TypeError(f"{group.role}: verbs {shadowed} have names of WorkerGroup's own methods; rename them")


def wait_all(pending: Iterable[Pending], timeout_s: float | None = None) -> list[Any]:
    """Results of several calls, also of different groups; ends at the first failure of any of them.

    Raises:
        WorkerFailed, WorkerError: as :meth:`Pending.result`.
    """
    pending = list(pending)
    _gather(
        [group for call in pending for group in call.groups],
        [task for call in pending for task in call.tasks],
        timeout_s,
    )
    return [call.result() for call in pending]


def _gather(groups: Sequence[WorkerGroup], tasks: Sequence[Task], timeout_s: float | None) -> list[Any]:
    """:func:`gather`, which also marks the group that failed."""
    try:
        return gather(tasks, timeout_s)
    except WorkerFailed as failure:
        for group in groups:
            if group.role == failure.role:
                group._failure = failure
        raise


def _mini_batch_rows(mark: VerbMark, batch: DataProto) -> int | None:
    """Rows per global mini-batch, of a verb that has such: all rows where the batch does not say otherwise."""
    if not mark.equal_rows:
        return None
    return batch.meta_info.get(mark.mini_batches, len(batch)) if mark.mini_batches else len(batch)


def _for_rank(args: Sequence[Any], rank: int) -> list[Any]:
    """The arguments as one rank receives them."""
    return [arg.values[rank] if isinstance(arg, PerRank) else arg for arg in args]
