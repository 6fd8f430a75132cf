"""Worker groups: the driver's handle on all processes of a role."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from megarl.base.errors import ResourceError, WorkerError
from megarl.cluster.call_targets import CallTarget
from megarl.cluster.calls import (
    PendingCall,
    RankHandle,
    ScatteredCall,
    WorkerCall,
    WorkerFailed,
    all_ended,
    for_rank,
    gather_results,
)
from megarl.cluster.node_caller import CallTargets
from megarl.cluster.partition import Partition, partition_groups, partition_rows
from megarl.cluster.rank_starter import RankStarter, StartingRank
from megarl.cluster.resources import PlacedPool
from megarl.cluster.split_calls import RowFunctionCall, SplitCall
from megarl.cluster.stored_chunks import StoredChunk, stored_once
from megarl.cluster.worker_process import SplitResult, WorkerInfo
from megarl.data import DataProto
from megarl.data.remote_columns import RowFunction, RowMap, write_values
from megarl.models.layout import ParallelLayout
from megarl.workers.dispatch import Dispatch, VerbMark
from megarl.workers.settings import MicroBatchBudget


class WorkerGroup:
    """One Ray actor per rank of a role, started in the background.

    The constructor returns at once, so that several groups start concurrently; the first call, or :func:`wait_ready`,
    waits for the start. Call a verb of the worker class as a method of the group; it blocks. :meth:`submit` does not
    block. A large group is called by node (:mod:`megarl.cluster.node_caller`). After a failure the group refuses
    further calls. A verb must not have the name of a public
    member. The classes of :mod:`megarl.cluster.role_groups` declare the verbs of each role for type checkers. Methods
    that start a verb raise the errors of :meth:`submit`.

    Args:
        worker_cls: a plain class, preferably as ``"package.module.Class"`` so that the driver need not import it. Every
            rank builds it as ``worker_cls(place, **worker_kwargs)`` with its ``WorkerPlace``.
        worker_kwargs: the remaining constructor arguments, equal on all ranks.
        layout: parallel sizes; gives the number of ranks and the result owners.
        pool: devices of the processes, shared with other roles. With one device per process, rank ``r`` is on device
            ``r % devices``.
        budgets: micro-batch budget of each verb that has one, for partition balancing.
        devices_per_process: neighbouring devices per process. The process sees those GPUs only.
        first_devices: first device of each process; None = processes have the devices one after another.
        threads: number of ``RANK`` verbs that each process runs at the same time, next to other verbs; 0 = the worker
            has none.
        on_device: False: the processes use no device, and are on one node of the pool after another, from the driver's.
        absent: ranks without a process, which :meth:`join` may add; for roles whose verbs are not ``SPLIT``.

    Attributes:
        processes: processes that have reported so far, by rank; their workers may not be built yet.

    Raises:
        ResourceError: the role needs more GPUs than the pool has, or the devices of a process are on different nodes.
    """

    def __init__(
        self,
        role: str,
        worker_cls: str | type,
        worker_kwargs: Mapping[str, Any],
        layout: ParallelLayout,
        pool: PlacedPool,
        budgets: Mapping[str, MicroBatchBudget] | None = None,
        devices_per_process: int = 1,
        first_devices: Sequence[int] | None = None,
        threads: int = 0,
        on_device: bool = True,
        absent: Collection[int] = (),
    ) -> None:
        needed = layout.world_size * devices_per_process
        if on_device and pool.pool.device == "cuda" and needed > pool.pool.num_devices:
            raise ResourceError(
                f"{role} with {layout.describe()} needs {needed} GPUs, pool {pool.pool.name!r} has "
                f"{pool.pool.num_devices}, and two ranks of one role cannot share one: use a smaller layout or a "
                "larger pool",
                code="layout.pool-too-small",
            )
        self.role = role
        self.layout = layout
        self.budgets = dict(budgets or {})
        self._failure: WorkerFailed | None = None
        self._infos: dict[int, WorkerInfo] = {}
        self._owners = [layout.rank(dp=dp, pp=layout.pp - 1) for dp in range(layout.dp)]
        self.pool = pool
        self.processes: dict[int, WorkerInfo] = {}
        self._busy: dict[str, list[float]] = {}
        self._starter = RankStarter(
            role,
            worker_cls,
            ray.put(dict(worker_kwargs)),
            layout.world_size,
            pool,
            first_devices or [rank * devices_per_process for rank in range(layout.world_size)],
            devices_per_process,
            threads,
            on_device,
        )
        present = [rank for rank in range(layout.world_size) if rank not in absent]
        self._starting = self._starter.start(present)
        self._actors: dict[int, Any] = {starting.rank: starting.actor for starting in self._starting}
        dp_ranks = [layout.coordinate(rank).dp for rank in range(layout.world_size)]
        self._targets = CallTargets(role, dp_ranks, self._owners)
        self._by_node, self._unordered = False, list[WorkerCall]()
        if on_device and not threads:
            self._targets.start_callers({rank: pool.node(self.devices(rank)[0]) for rank in present}, self._actors)
        pool.processes.groups.append(self)

    @property
    def world_size(self) -> int:
        """Number of ranks of the role, present or not."""
        return self.layout.world_size

    @property
    def ranks(self) -> list[int]:
        """Ranks that have a process, in order; all, unless processes are absent."""
        return sorted(self._actors)

    @property
    def verbs(self) -> dict[str, VerbMark]:
        """Verbs of the worker and their marks; waits for the start."""
        wait_ready([self])
        return next(iter(self._infos.values())).marks

    def devices(self, rank: int) -> range:
        """Return the devices of a rank in the pool."""
        first = self._starter.first_devices[rank]
        return range(first, first + self._starter.span)

    def call_process(self, rank: int, method: str, *args: Any) -> ray.ObjectRef:
        """Call a method of a rank's :class:`WorkerProcess` (not a verb)."""
        return getattr(self._actors[rank], method).remote(*args)

    def call(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        """Run a verb on all processes and return its collected result; see :meth:`submit`."""
        return self.submit(verb, *args, **kwargs).result()

    def submit(self, verb: str, *args: Any, **kwargs: Any) -> PendingCall:
        """Start a verb on all processes, dispatched by its mark.

        Args:
            args: arguments of the verb. For ``SPLIT``, every ``DataProto`` is split like the first one; all must have
                the same rows. A :class:`PerRank` differs by rank. The receiving process resolves Ray references.
            kwargs: same on every rank; neither split nor resolved.

        Raises:
            AttributeError: the worker has no such verb; the message lists its verbs.
            DataError: the batch cannot be split over the data-parallel ranks.
            WorkerError: the group failed before.
        """
        mark = self._mark(verb)
        if mark.dispatch is Dispatch.RANK:
            raise TypeError(f"{self.role}.{verb} runs on one rank: use handle")
        if mark.dispatch is Dispatch.SPLIT:
            batch = next((arg for arg in args if isinstance(arg, DataProto)), None)
            if batch is None:
                raise TypeError(f"{self.role}.{verb} is split over DP and needs a DataProto argument")
            split = SplitCall(self._partition(verb, mark, batch), self._begin(by_node=True))
            calls = split.start(verb, mark, args, kwargs)
            return PendingCall([self], self._sent(calls), functools.partial(self._collect_rows, verb, split))
        owner = next((rank for rank in self._owners if rank in self._actors), None)
        only = owner if mark.dispatch is Dispatch.ONE else None
        return self._submit_to_all(verb, mark, stored_once(args), kwargs, only)

    def store(self, verb: str, batch: DataProto) -> DataProto:
        """Write the token values of a batch to the object store, and return the batch with references.

        Verbs and row functions then send the references; each of them writes the values of any other batch anew.

        Args:
            verb: each data-parallel rank's rows of this ``SPLIT`` verb are one chunk.
        """
        shares = [target.share for target in self._call_targets()]
        return write_values(batch, self.partition(verb, batch).chunks(shares), StoredChunk.write)

    def row_map(self, verb: str) -> RowMap:
        """Return a map that runs row functions on the processes that own the results of a ``SPLIT`` verb.

        Each process gets its rows of the verb, so that the columns of the verb do not leave their nodes. Only
        ``group_by`` repartitions rows, so that a group is on one process.
        """

        def map_rows(
            function: RowFunction, columns: Sequence[str], batch: DataProto, *args: Any, group_by: str | None = None
        ) -> tuple[DataProto, list[Any]]:
            if group_by is None:
                rows = self.partition(verb, batch).rows
                partition = Partition(rows[: len(batch)])  # further ranks would get copies of row 0
            else:
                partition = partition_groups(batch, self.layout.dp, batch.non_tensor_batch[group_by])
            return self._map_rows(partition, function, columns, batch, *args)

        return map_rows

    def submit_on(self, ranks: Sequence[int], verb: str, *args: Any, after_failure: bool = False) -> PendingCall:
        """Start a verb on some processes; the result is the list of their results.

        Args:
            after_failure: start it in a failed group too, for the processes that live.
        """
        mark = self._mark(verb, after_failure=after_failure)
        if self._targets.has_callers and not after_failure and list(ranks) == self.ranks:
            return self._submit_to_all(verb, mark, args, {}, None)
        self._begin(by_node=False)
        calls = [
            self._remote_call(
                self._actors[rank].call.remote(verb, True, {}, *for_rank(args, rank)), rank, verb, mark.phase
            )
            for rank in ranks
        ]
        return PendingCall([self], self._sent(calls), list)

    def handle(self, rank: int) -> RankHandle:
        """Return a handle on one process for its ``RANK`` verbs, which other processes can use too.

        A failure concerns this rank only: the group stays usable. A handle on a replaced process is dead.
        """
        wait_ready([self])
        return RankHandle(self._actors[rank], self.role, rank, self._infos[rank])

    def restart(self, ranks: Sequence[int]) -> None:
        """Replace processes, dead or alive, and wait until the new workers are built.

        For workers that need no rendezvous in the constructor. New workers have no state of earlier verbs. A failed
        group is usable again.

        Raises:
            WorkerFailed: a new process did not start.
        """
        self.remove(ranks)
        self.join(self.begin_start(ranks))

    def begin_start(self, ranks: Sequence[int]) -> list[StartingRank]:
        """Start processes of absent ranks, without waiting; :meth:`join` adds them to the group."""
        return self._starter.start(ranks)

    def join(self, starting: Sequence[StartingRank]) -> None:
        """Add processes of :meth:`begin_start` to the group; waits until their workers are built.

        Raises:
            WorkerFailed: a process did not start; none has joined, and :meth:`remove` ends all.
        """
        _wait_built([(self, one) for one in starting])
        self._actors |= {one.rank: one.actor for one in starting}

    def remove(self, ranks: Sequence[int]) -> None:
        """End processes, dead or alive; their ranks are absent. A failed group is usable again."""
        self._failure = None
        self._targets.end_callers()
        for rank in ranks:
            self._infos.pop(rank, None)
            self.processes.pop(rank, None)
            if (actor := self._actors.pop(rank, None)) is not None:
                ray.kill(actor)

    def partition(self, verb: str, batch: DataProto) -> Partition:
        """Return the rows of ``batch`` that each data-parallel rank gets of a ``SPLIT`` verb."""
        return self._partition(verb, self._mark(verb), batch)

    def take_busy(self) -> dict[str, list[float]]:
        """Return and reset the busy seconds of each DP rank, by ``SPLIT`` verb.

        A DP rank counts its busiest process, without time in collectives. Empty if processes are not traced.
        """
        busy, self._busy = self._busy, {}
        return busy

    def submit_scatter(
        self, verb: str, receivers: Mapping[int, Sequence[int]], width: int, *args: Any
    ) -> ScatteredCall:
        """Start an ``ALL`` verb that returns ``{destination: payload}``; the payloads stay on the workers.

        Args:
            receivers: those of each rank; a rank without receivers runs the verb too.
            width: destinations of a receiver, which follow those of the receivers before.
        """
        mark = self._mark(verb)
        calls, refs = [], dict[int, list[ray.ObjectRef]]()
        for target in self._begin(by_node=True):
            call, payloads = target.call_scatter(verb, mark.phase, receivers, width, args)
            calls.append(call)
            for receiver, payload in payloads.items():
                refs.setdefault(receiver, []).append(payload)
        return ScatteredCall(self, self._sent(calls), refs)

    def submit_gather(
        self,
        verb: str,
        payloads: ScatteredCall,
        *args: Any,
        receivers: Sequence[int] | None = None,
        places: range | None = None,
    ) -> PendingCall:
        """Start an ``ALL`` verb as ``verb(*args, payloads of this rank)`` once the payloads are available.

        Payloads travel between the processes directly. The result is None, available when sources and receivers are
        done.

        Args:
            receivers: ranks that are the receivers of ``payloads``, in order; None = all.
            places: the places in ``receivers`` of the ranks to start on; None = all.
        """
        mark = self._mark(verb)
        self._begin(by_node=False)
        ranks = self.ranks if receivers is None else receivers
        calls = []
        for place in range(len(ranks)) if places is None else places:
            rank = ranks[place]
            ref = self._actors[rank].call_gather.remote(verb, args, *payloads.refs.get(place, ()))
            calls.append(self._remote_call(ref, rank, verb, mark.phase))
        return PendingCall([*payloads.groups, self], [*payloads.calls, *self._sent(calls)], lambda results: None)

    def kill(self, rank: int) -> None:
        """Kill one process, which :meth:`restart` replaces."""
        ray.kill(self._actors[rank])

    def mark_failed(self, failure: WorkerFailed) -> None:
        """Refuse further calls after a failure."""
        self._failure = failure

    def shutdown(self) -> None:
        """Kill the processes."""
        self._targets.end_callers()
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()

    if not TYPE_CHECKING:  # a type checker knows the verbs from the classes of role_groups

        def __getattr__(self, name: str) -> Callable[..., Any]:
            if name.startswith("_"):
                raise AttributeError(name)
            return functools.partial(self.call, name)

    def _submit_to_all(
        self, verb: str, mark: VerbMark, args: Sequence[Any], kwargs: Mapping[str, Any], owner: int | None
    ) -> PendingCall:
        """Start a verb on all processes; the result is the owner's, or without an owner the list of all."""
        targets, keep = self._begin(by_node=True), self._actors.keys() if owner is None else {owner}
        calls = [target.call(verb, mark.phase, keep, kwargs, args) for target in targets]

        def collect(results: list[Any]) -> Any:
            by_rank: dict[int, Any] = {}
            for target, result in zip(targets, results, strict=True):
                by_rank |= zip(target.ranks, target.results(result), strict=True)
            return [by_rank[rank] for rank in sorted(by_rank)] if owner is None else by_rank[owner]

        return PendingCall([self], self._sent(calls), collect)

    def _map_rows(
        self, partition: Partition, function: RowFunction, columns: Sequence[str], batch: DataProto, *args: Any
    ) -> tuple[DataProto, list[Any]]:
        """Run a row function on the owners; see :class:`megarl.data.remote_columns.RowMap`.

        Args:
            partition: rows of each owner, of as many as have rows.

        Raises:
            WorkerFailed: the function raised, or a process died.
        """
        mapped = RowFunctionCall(partition, self._begin(by_node=True))
        calls = mapped.start(function, batch.present(columns), args)
        return mapped.collect(gather_results([self], self._sent(calls)))

    def _collect_rows(self, verb: str, split: SplitCall, results: Sequence[SplitResult]) -> Any:
        self._note_busy(verb, split.busy(results))
        return split.collect(results)

    def _note_busy(self, verb: str, seconds: Sequence[float | None]) -> None:
        busiest = [0.0] * self.layout.dp
        for rank, busy in enumerate(seconds):
            if busy is None:
                return
            dp = self.layout.coordinate(rank).dp
            busiest[dp] = max(busiest[dp], busy)
        before = self._busy.get(verb, [0.0] * self.layout.dp)
        self._busy[verb] = [sum(both) for both in zip(before, busiest, strict=True)]

    def _partition(self, verb: str, mark: VerbMark, batch: DataProto) -> Partition:
        rows, budget = _mini_batch_rows(mark, batch), self.budgets.get(verb)
        return partition_rows(batch, self.layout.dp, rows, equal=mark.equal_rows, budget=budget)

    def _mark(self, verb: str, *, after_failure: bool = False) -> VerbMark:
        if self._failure is not None and not after_failure:
            text = f"{self.role} cannot run {verb}: it failed before. {self._failure.text}"
            raise WorkerError(text, code=self._failure.code) from self._failure
        if verb not in self.verbs:
            raise AttributeError(f"{self.role} has no verb {verb!r}; it has: {', '.join(sorted(self.verbs))}")
        return self.verbs[verb]

    def _call_targets(self) -> list[CallTarget]:
        return self._targets.of(self._actors, self._infos)

    def _begin(self, by_node: bool) -> list[CallTarget]:
        """Begin to send calls by node or by rank, and return the targets of calls by node.

        Waits for calls that were sent the other way: Ray orders the calls of one sender, and nodes' callers are others.
        """
        if all_ended(self._unordered):
            self._unordered.clear()
        elif by_node is not self._by_node and self._failure is None:
            gather_results([self], self._unordered)
        self._by_node = by_node
        return self._call_targets() if by_node else []

    def _sent(self, calls: list[WorkerCall]) -> list[WorkerCall]:
        if self._targets.has_callers:
            self._unordered += calls
        return calls

    def _calls(self, refs: Sequence[ray.ObjectRef], verb: str, phase: str = "") -> list[WorkerCall]:
        return [self._remote_call(ref, rank, verb, phase) for rank, ref in zip(self.ranks, refs, strict=True)]

    def _remote_call(self, ref: ray.ObjectRef, rank: int, verb: str, phase: str) -> WorkerCall:
        return WorkerCall(ref, self.role, rank, verb, phase, self._infos[rank])


def wait_ready(
    groups: Iterable[WorkerGroup],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Wait until the processes of all groups have built their workers.

    Args:
        progress: called with the numbers of built and all workers.

    Raises:
        WorkerFailed: the first failure, with role and rank.
    """
    starting = [group for group in groups if not group._infos]
    count = _count_workers(starting, progress)
    _wait_built([(group, one) for group in starting for one in group._starting], count)
    for group in starting:
        shadowed = sorted(group.verbs.keys() & set(dir(WorkerGroup)))
        if shadowed:
            raise TypeError(f"{group.role}: verbs {shadowed} have names of WorkerGroup's methods; rename them")


def _wait_built(
    ranks: Sequence[tuple[WorkerGroup, StartingRank]],
    on_built: Callable[[WorkerCall], None] | None = None,
) -> None:
    """Wait until processes have built their workers, and enter them in their groups."""
    groups = list(dict.fromkeys(group for group, _ in ranks))
    # Processes are described first: an error during the start then shows the end of their log.
    infos = gather_results(groups, [one.described for _, one in ranks])
    for (group, one), info in zip(ranks, infos, strict=True):
        group.processes[one.rank] = info
    starts = [(one, info) for (_, one), info in zip(ranks, infos, strict=True)]
    # A failed import is the cause of a failed construction.
    gather_results(groups, [replace(one.loaded, info=info) for one, info in starts])
    built = gather_results(groups, [replace(one.built, info=info) for one, info in starts], None, on_built)
    for (group, one), info in zip(ranks, built, strict=True):
        group._infos[one.rank] = info
    for group in groups:
        group._targets.connect(group._infos)


def _count_workers(
    groups: Sequence[WorkerGroup], progress: Callable[[int, int], None] | None
) -> Callable[[WorkerCall], None] | None:
    """Return a function that reports the number of built workers with each result."""
    if progress is None:
        return None
    built, total = itertools.count(1), sum(len(group._starting) for group in groups)
    progress(0, total)
    return lambda call: progress(next(built), total)


def _mini_batch_rows(mark: VerbMark, batch: DataProto) -> int | None:
    """Rows per global mini-batch, for a verb with mini-batches; all rows unless the batch states another number."""
    if not mark.equal_rows:
        return None
    return batch.meta_info.get(mark.mini_batches, len(batch)) if mark.mini_batches else len(batch)
