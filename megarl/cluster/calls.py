"""Calls in progress on processes of worker groups, handles on single processes, arguments that differ by rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from megarl.cluster.failures import WorkerCall, WorkerFailed, gather, worker_failure
from megarl.cluster.worker_process import WorkerInfo
from megarl.workers.dispatch import Dispatch

Collect = Callable[[list[Any]], Any]
"""Turns the results of all processes into the result of a verb."""


class CallingGroup(Protocol):
    """The part of a worker group that its calls need."""

    role: str

    def mark_failed(self, failure: WorkerFailed) -> None:
        """Refuse further calls after a failure."""


class PerRank:
    """An argument that differs by rank: rank ``r`` receives ``values[r]``, which may be a Ray reference."""

    def __init__(self, values: Iterable[Any] | Mapping[int, Any]) -> None:
        self.values = values if isinstance(values, Mapping) else list(values)


class PendingCall:
    """A verb in progress on all processes of a group; see :meth:`megarl.cluster.WorkerGroup.submit`.

    Args:
        groups: groups that the calls run on; a group that fails is marked as unusable.
        collect: turns their results, in order, into the result of the verb.
    """

    def __init__(self, groups: Sequence[CallingGroup], calls: Sequence[WorkerCall], collect: Collect) -> None:
        self.groups = tuple(groups)
        self.calls = tuple(calls)
        self._collect = collect
        self._outcome: tuple[Any] | None = None

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for all processes and return the collected result; later calls return the same object.

        Raises:
            WorkerFailed: a worker failed. Raised for the first failure at once, even while its peers hang.
            WorkerSilent: ``timeout_s`` seconds have passed.
        """
        if self._outcome is None:
            self.complete(gather_results(self.groups, self.calls, timeout_s))
        assert self._outcome is not None
        return self._outcome[0]

    def complete(self, results: list[Any]) -> None:
        """Collect the results of the calls, in order; for :func:`wait_all`, which waits for several."""
        if self._outcome is None:
            self._outcome = (self._collect(results),)

    def then(self, function: Callable[[Any], Any]) -> PendingCall:
        """Return the same call with a function applied to its result."""
        return PendingCall(self.groups, self.calls, lambda results: function(self._collect(results)))


def completed_call(value: Any) -> PendingCall:
    """Return a call that ran in the driver and is complete."""
    return PendingCall([], [], lambda results: value)


class ScatteredCall(PendingCall):
    """A call whose payloads stay on the processes that produced them until their receivers fetch them.

    The result is None, available once every source rank has produced its payloads.

    Attributes:
        refs: ``refs[source rank][destination]``, references to payloads. The driver never fetches a payload.
    """

    def __init__(self, group: CallingGroup, calls: Sequence[WorkerCall], refs: list[list[ray.ObjectRef]]) -> None:
        super().__init__([group], calls, lambda results: None)
        self.refs = refs


@dataclass(frozen=True)
class RankHandle:
    """One process of a group with threads for ``RANK`` verbs; can be sent to other processes."""

    actor: Any
    role: str
    rank: int
    info: WorkerInfo

    async def call(self, verb: str, *args: Any) -> Any:
        """Run a verb from a coroutine, see :meth:`submit`.

        Raises:
            WorkerFailed: the verb raised, or the process died.
            AttributeError: the worker has no such verb.
        """
        ref = self._start(verb, args)
        try:
            return await ref
        except RayError as error:
            raise worker_failure(self._call(ref, verb), error) from error

    def submit(self, verb: str, *args: Any) -> WorkerCall:
        """Start a verb: a ``RANK`` verb concurrently with others, any other verb after the earlier ones.

        Raises:
            AttributeError: the worker has no such verb.
        """
        return self._call(self._start(verb, args), verb)

    def _start(self, verb: str, args: Sequence[Any]) -> ray.ObjectRef:
        if verb not in self.info.marks:
            raise AttributeError(f"{self.role} has no verb {verb!r}")
        if self.info.marks[verb].dispatch is Dispatch.RANK:
            return self.actor.call_aside.remote(verb, *args)
        return self.actor.call.remote(verb, True, {}, *args)

    def _call(self, ref: ray.ObjectRef, verb: str) -> WorkerCall:
        return WorkerCall(ref, self.role, self.rank, verb, self.info.marks[verb].phase, self.info)


def for_rank(args: Sequence[Any], rank: int) -> list[Any]:
    """Return the arguments of a rank."""
    return [arg.values[rank] if isinstance(arg, PerRank) else arg for arg in args]


def wait_all(
    pending: Iterable[PendingCall], timeout_s: float | None = None, on_end: Callable[[int], None] | None = None
) -> list[Any]:
    """Wait for several calls, also of different groups, and return their results; stops at the first failure.

    Args:
        on_end: called with the number of a call as soon as all its processes have returned.

    Raises:
        WorkerFailed, WorkerError: see :meth:`PendingCall.result`.
    """
    pending = list(pending)
    running = [len(call.calls) for call in pending]
    owner = {one.ref: number for number, call in enumerate(pending) for one in call.calls}

    def count(one: WorkerCall) -> None:
        number = owner[one.ref]
        running[number] -= 1
        if on_end is not None and not running[number]:
            on_end(number)

    if on_end is not None:
        for number in (number for number, left in enumerate(running) if not left):
            on_end(number)  # the driver has run it already
    groups = list(itertools.chain.from_iterable(call.groups for call in pending))
    calls = list(itertools.chain.from_iterable(call.calls for call in pending))
    several = sum(map(bool, running)) > 1  # a single call ends with its last process
    results = iter(gather_results(groups, calls, timeout_s, count if several and on_end is not None else None))
    if on_end is not None:
        for number in (number for number, left in enumerate(running) if left):
            on_end(number)
    for call in pending:
        call.complete(list(itertools.islice(results, len(call.calls))))
    return [call.result() for call in pending]


def gather_results(
    groups: Sequence[CallingGroup],
    calls: Sequence[WorkerCall],
    timeout_s: float | None,
    on_result: Callable[[WorkerCall], None] | None = None,
) -> list[Any]:
    """Wait for calls as :func:`megarl.cluster.failures.gather` does, and mark the group that fails."""
    try:
        return gather(calls, timeout_s, on_result)
    except WorkerFailed as failure:
        for group in groups:
            if group.role == failure.role:
                group.mark_failed(failure)
        raise
