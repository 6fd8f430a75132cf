"""Waiting for calls on many processes, and saying at once which one failed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.cluster.worker_process import RemoteFailure, WorkerCard
from megarl.errors import WorkerError
from megarl.logs import tail

# When one process fails, its peers often fail a moment later because of it ("connection reset"). This long we wait
# to see the others, so that the error names the cause and not its echo.
_ECHO_S = 1.0
_LOG_S = 20.0
"""Seconds to fetch the end of a log from another node, which may be lost as well."""


class WorkerFailed(WorkerError):
    """A worker raised or its process died.

    Attributes:
        role: name of the worker's role.
        rank: rank within the role.
        verb: what it was doing.
        died: True if the process is gone or of no use any more (:class:`megarl.errors.WorkerLost`), False if it raised
            anything else.
        remote_traceback: traceback of the worker, or the end of its log if it died.
    """

    def __init__(self, message: str, role: str, rank: int, verb: str, died: bool, remote_traceback: str) -> None:
        super().__init__(message)
        self.role, self.rank, self.verb, self.died = role, rank, verb, died
        self.remote_traceback = remote_traceback


class WorkerSilent(WorkerError):
    """Workers did not answer in time.

    Attributes:
        late: role and rank of each.
    """

    def __init__(self, message: str, late: Sequence[tuple[str, int]]) -> None:
        super().__init__(message)
        self.late = tuple(late)


@dataclass(frozen=True)
class Task:
    """One call on one process.

    Attributes:
        ref: becomes ready when the call has ended.
        role: name of the role.
        rank: rank within the role.
        verb: what was called.
        phase: phase of the run it belongs to, as the verb's mark names it.
        card: the process, None before it has said who it is.
    """

    ref: ray.ObjectRef
    role: str
    rank: int
    verb: str
    phase: str
    card: WorkerCard | None = None


def gather(tasks: Sequence[Task], timeout_s: float | None = None) -> list[Any]:
    """Results of all calls, in order; fails as soon as one of them fails, whatever the others do.

    Raises:
        WorkerFailed: a worker raised or died; a death is named before the errors that it caused elsewhere.
        WorkerSilent: not all calls ended within ``timeout_s`` seconds; names the ranks that did not.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    waiting = {task.ref: task for task in tasks}
    results: dict[ray.ObjectRef, Any] = {}
    failures: list[WorkerFailed] = []
    while waiting:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=left)
        if not ready:
            break
        for ref in ready:
            task = waiting.pop(ref)
            try:
                results[ref] = ray.get(ref)
            except RayError as error:
                failures.append(failure_of(task, error))
                deadline = min(deadline or float("inf"), time.monotonic() + _ECHO_S)
        if failures and failures[-1].died:
            break
    if failures:
        raise next((failure for failure in failures if failure.died), failures[0])
    if waiting:
        late = [(task.role, task.rank) for task in waiting.values()]
        names = ", ".join(f"{role} rank {rank}" for role, rank in late)
        raise WorkerSilent(f"no answer within {timeout_s:g} s in {tasks[0].verb} from: {names}", late)
    return [results[task.ref] for task in tasks]


def failure_of(task: Task, error: RayError) -> WorkerFailed:
    """What Ray reports of a call, as an error that names the process."""
    cause = getattr(error, "cause", None)
    while isinstance(cause, RayTaskError):  # the call never ran, because what it waited for had failed
        cause = cause.cause
    if isinstance(cause, RemoteFailure):
        where = f"{cause.role} rank {cause.rank}"
        phase = f" (phase {task.phase})" if task.phase not in ("", task.verb, cause.verb) else ""
        message = (
            f"{where} failed in {cause.verb}{phase}: {cause.kind}: {cause.message}\n"
            f"--- traceback of {where} ---\n{cause.trace}{_log_end(cause.log, cause.last_lines)}"
        )
        return WorkerFailed(message, cause.role, cause.rank, cause.verb, cause.lost, cause.trace)
    died = isinstance(error, RayActorError)
    last_lines = _last_lines(task.card)
    process = f" (pid {task.card.pid} on {task.card.host})" if task.card else ""
    what = "died in" if died else "could not be called for"
    message = f"{task.role} rank {task.rank}{process} {what} {task.verb}: {_reason(error)}"
    message += _log_end(task.card.log if task.card else "", last_lines)
    return WorkerFailed(message, task.role, task.rank, task.verb, died, last_lines)


def _reason(error: RayError) -> str:
    """Ray's own words, without its identifiers and general advice."""
    text = str(error)
    if "Worker unexpectedly exits" in text:
        return "its process was killed (often by the system, for lack of memory) or crashed"
    skipped = ("class_name:", "actor_id:", "pid:", "namespace:", "ip:", "name:")
    lines = [line.strip("\t") for line in text.splitlines()]
    return "\n".join(line for line in lines if line and not line.startswith(skipped))


def _log_end(path: str, last_lines: str) -> str:
    return f"\n--- end of its log, {path} ---\n{last_lines}" if path else ""


def _last_lines(card: WorkerCard | None) -> str:
    """Last lines of a process's log, wherever that is."""
    if card is None or not card.log:
        return ""
    if card.node == ray.get_runtime_context().get_node_id() or Path(card.log).exists():
        return tail(card.log)
    strategy = NodeAffinitySchedulingStrategy(card.node, soft=False)
    read = ray.remote(tail).options(num_cpus=0, scheduling_strategy=strategy)
    try:
        lines: str = ray.get(read.remote(card.log), timeout=_LOG_S)
    except RayError as error:
        return f"(it is on {card.host}, and cannot be read: {type(error).__name__})"
    return lines
