"""Waiting for calls on many processes, with errors that name the failed rank at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.base.errors import WorkerError
from megarl.base.logs import tail
from megarl.base.signals import wait_slices
from megarl.cluster.worker_process import RemoteFailure, WorkerInfo

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
    """

    ref: ray.ObjectRef
    role: str
    rank: int
    verb: str
    phase: str
    info: WorkerInfo | None = None


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
        late = [(call.role, call.rank) for call in waiting.values()]
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
    return len(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) == len(refs)


def worker_failure(call: WorkerCall, error: RayError) -> WorkerFailed:
    """Turn Ray's error of a call into an error that names the process."""
    cause = getattr(error, "cause", None)
    while isinstance(cause, RayTaskError):  # the call never ran, because a call that it depends on failed
        cause = cause.cause
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
    message = f"{call.role} rank {call.rank}{process} {event} {call.verb}: {_reason(error)}"
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
