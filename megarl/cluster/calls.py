"""Calls on the processes of worker groups: arguments that differ by rank, waiting, and errors that name the rank."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.base.errors import WorkerError
from megarl.base.logs import tail
from megarl.base.signals import wait_slices
from megarl.cluster.worker_process import RemoteFailure, WorkerInfo
from megarl.workers.dispatch import Dispatch

# When one process fails, its peers often fail a moment later because of it ("connection reset"). gather() waits this
# long for further failures, so that the error names the cause and not its consequences.
_ECHO_S = 1.0
_LOG_S = 20.0
"""Seconds to fetch the end of a log from another node, which may be lost as well."""


class WorkerFailed(WorkerError):
    """A worker raised or its process died.

    Attributes:
        died: True if the process is gone or unusable (:class:`megarl.base.errors.WorkerLost`), False if it raised any
            other exception.
        remote_traceback: traceback of the worker, or the end of its log if it died.
    """

    def __init__(
        self, message: str, role: str, rank: int, verb: str, died: bool, remote_traceback: str, *, code: str
    ) -> None:
        super().__init__(message, code=code)
        self.role, self.rank, self.verb, self.died = role, rank, verb, died
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (self.text, self.role, self.rank, self.verb, self.died, self.remote_traceback)
        return partial(WorkerFailed, code=self.code), arguments


class WorkerSilent(WorkerError):
    """Workers did not respond in time."""

    def __init__(self, message: str, late: Sequence[tuple[str, int]]) -> None:
        super().__init__(message, code="worker.no-answer")
        self.late = tuple(late)


@dataclass(frozen=True)
class WorkerCall:
    """One call on one process.

    Attributes:
        info: the process; None before it has described itself.
        others: further ranks that the process calls, see :class:`megarl.cluster.node_caller.NodeCaller`.
    """

    ref: ray.ObjectRef
    role: str
    rank: int
    verb: str
    phase: str
    info: WorkerInfo | None = None
    others: Sequence[int] = ()


def gather(
    calls: Sequence[WorkerCall], timeout_s: float | None = None, on_result: Callable[[WorkerCall], None] | None = None
) -> list[Any]:
    """Return the results of all calls, in order; raises as soon as one fails, even while the others hang.

    Raises:
        WorkerFailed: a worker raised or died; a death takes precedence over the errors that it caused elsewhere.
        WorkerSilent: not all calls ended within ``timeout_s`` seconds; names the late ranks.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    waiting = {call.ref: call for call in calls}
    results: dict[ray.ObjectRef, Any] = {}
    failures: list[WorkerFailed] = []
    while waiting:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        # Without `on_result` all results are awaited together, since each wait costs CPU time.
        ready = first_ready(list(waiting), left, len(waiting) if on_result is None else 1)
        if not ready:
            break
        for ref in ready:
            call = waiting.pop(ref)
            try:
                results[ref] = ray.get(ref)
                if on_result is not None:
                    on_result(call)
            except RayError as error:
                failures.append(worker_failure(call, error))
                deadline = min(deadline or float("inf"), time.monotonic() + _ECHO_S)
        if failures and failures[-1].died:
            break
    if failures:
        raise next((failure for failure in failures if failure.died), failures[0])
    if waiting:
        late = [(call.role, rank) for call in waiting.values() for rank in (call.rank, *call.others)]
        names = ", ".join(f"{role} rank {rank}" for role, rank in late)
        raise WorkerSilent(f"no answer within {timeout_s:g} s in {calls[0].verb} from: {names}", late)
    return [results[call.ref] for call in calls]


def first_ready(refs: Sequence[ray.ObjectRef], timeout_s: float | None, most: int = 1) -> list[ray.ObjectRef]:
    """Wait for some of several Ray results.

    Args:
        most: number of results to wait for; those that are ready after a fraction of a second are enough.

    Returns:
        References to one or more results; empty after the limit.
    """
    for slice_s in wait_slices(timeout_s):
        ready: list[ray.ObjectRef] = ray.wait(list(refs), num_returns=most, timeout=slice_s)[0]
        if ready:
            return ready
    return []


def all_ended(calls: Sequence[WorkerCall]) -> bool:
    """Return whether all calls have ended, with a result or an error."""
    refs = [call.ref for call in calls]
    return not refs or len(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) == len(refs)


def worker_failure(call: WorkerCall, error: RayError) -> WorkerFailed:
    """Turn Ray's error of a call into an error that names the process."""
    cause = getattr(error, "cause", None)
    while isinstance(cause, RayTaskError):  # the call never ran, because a call that it depends on failed
        cause = cause.cause
    if isinstance(cause, WorkerFailed):
        return cause
    if isinstance(cause, RemoteFailure):
        worker = f"{cause.role} rank {cause.rank}"
        phase = f" (phase {call.phase})" if call.phase not in ("", call.verb, cause.verb) else ""
        message = f"{worker} failed in {cause.verb}{phase}: {cause.kind}: {cause.message}"
        if cause.trace:
            message += f"\n--- traceback of {worker} ---\n{cause.trace}{_log_end(cause.log, cause.last_lines)}"
        if cause.code:
            return WorkerFailed(message, cause.role, cause.rank, cause.verb, cause.lost, cause.trace, code=cause.code)
        return WorkerFailed(message, cause.role, cause.rank, cause.verb, cause.lost, cause.trace, code="worker.raised")
    died = isinstance(error, RayActorError)
    last_lines = _last_lines(call.info)
    process = f" (pid {call.info.pid} on {call.info.host})" if call.info else ""
    event = "died in" if died else "could not be called for"
    worker = f"{call.role} rank {call.rank}"
    if call.others:
        worker = f"the process that calls {call.role} ranks {call.rank} to {call.others[-1]}"
    message = f"{worker}{process} {event} {call.verb}: {_reason(error)}"
    message += _log_end(call.info.log if call.info else "", last_lines)
    if died:
        return WorkerFailed(message, call.role, call.rank, call.verb, True, last_lines, code="worker.died")
    return WorkerFailed(message, call.role, call.rank, call.verb, False, last_lines, code="worker.call-failed")


def _reason(error: RayError) -> str:
    """Text of Ray's error, without its identifiers and general advice."""
    text = str(error)
    if "Worker unexpectedly exits" in text:
        return "its process was killed (often by the system, for lack of memory) or crashed"
    skipped = ("class_name:", "actor_id:", "pid:", "namespace:", "ip:", "name:")
    lines = [line.strip("\t") for line in text.splitlines()]
    return "\n".join(line for line in lines if line and not line.startswith(skipped))


def _log_end(path: str, last_lines: str) -> str:
    return f"\n--- end of the log {path} ---\n{last_lines}" if path else ""


def _last_lines(info: WorkerInfo | None) -> str:
    """Last lines of a process's log, fetched from its node if necessary."""
    if info is None or not info.log:
        return ""
    if info.node == ray.get_runtime_context().get_node_id() or Path(info.log).exists():
        return tail(info.log)
    strategy = NodeAffinitySchedulingStrategy(info.node, soft=False)
    read = ray.remote(tail).options(num_cpus=0, scheduling_strategy=strategy)
    try:
        lines: str = ray.get(read.remote(info.log), timeout=_LOG_S)
    except RayError as error:
        return f"(the log is on {info.host} and cannot be read: {type(error).__name__})"
    return lines


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
    """A verb in progress on all processes of a group; see :meth:`~megarl.cluster.worker_group.WorkerGroup.submit`.

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
        refs: references to the payloads of each receiver, in the order of the sources. The driver fetches none.
    """

    def __init__(
        self, group: CallingGroup, calls: Sequence[WorkerCall], refs: Mapping[int, Sequence[ray.ObjectRef]]
    ) -> None:
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
        """Run a verb from a coroutine, see :meth:`submit`; WorkerFailed if it raises or the process dies."""
        ref = self._start(verb, args)
        try:
            return await ref
        except RayError as error:
            raise worker_failure(self._call(ref, verb), error) from error

    def submit(self, verb: str, *args: Any) -> WorkerCall:
        """Start a verb: a ``RANK`` verb concurrently with others, any other verb after the earlier ones."""
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


def wait_all(pending: Iterable[PendingCall], on_end: Callable[[int], None] | None = None) -> list[Any]:
    """Wait for several calls, also of different groups, and return their results; stops at the first failure.

    Args:
        on_end: called with the number of a call as soon as all its processes have returned.

    Raises:
        WorkerFailed: see :meth:`PendingCall.result`.
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
    results = iter(gather_results(groups, calls, None, count if several and on_end is not None else None))
    if on_end is not None:
        for number in (number for number, left in enumerate(running) if left):
            on_end(number)
    for call in pending:
        call.complete(list(itertools.islice(results, len(call.calls))))
    return [call.result() for call in pending]


def gather_results(
    groups: Sequence[CallingGroup],
    calls: Sequence[WorkerCall],
    timeout_s: float | None = None,
    on_result: Callable[[WorkerCall], None] | None = None,
) -> list[Any]:
    """Wait for calls as :func:`gather` does, and mark the group that fails."""
    try:
        return gather(calls, timeout_s, on_result)
    except WorkerFailed as failure:
        for group in groups:
            if group.role == failure.role:
                group.mark_failed(failure)
        raise
