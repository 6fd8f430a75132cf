"""The process of a rank: a Ray actor that builds one plain worker and calls its verbs."""

from __future__ import annotations

import logging
import os
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from megarl.base.errors import ExportError, MegarlError, WorkerLost
from megarl.base.logs import ProcessLogs, output_log, redirect_output, tail
from megarl.base.packages import import_large
from megarl.base.ports import bypass_proxies, collective_interfaces, reserve_port
from megarl.tracing import TRACER, Event, TracingOptions, span, watch_collectives, watch_process
from megarl.tracing.profilers import ProfiledProcess
from megarl.tracing.tracer import count_memory
from megarl.workers.dispatch import VerbMark, WorkerPlace, read_marks

if TYPE_CHECKING:
    from megarl.cluster.stored_chunks import Payload
    from megarl.data import DataProto
    from megarl.data.ragged import Chunk
    from megarl.data.remote_columns import RowFunction

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerInfo:
    """A started process, as it describes itself to the driver.

    Attributes:
        log: the process's log file on that node; empty if unknown.
    """

    pid: int
    host: str
    node: str
    log: str
    marks: dict[str, VerbMark]


@dataclass(eq=False, repr=False)
class RemoteFailure(Exception):
    """An exception of a worker, in a form that every process can unpickle; created with positional arguments.

    Attributes:
        code: code of a megarl error; empty = another exception.
        lost: whether the worker is unusable from now on.
        log: path of the worker's log file; empty if unknown.
        last_lines: last lines of that file before the exception.
    """

    role: str
    rank: int
    verb: str
    kind: str
    message: str
    code: str
    trace: str
    lost: bool
    log: str
    last_lines: str


class SplitResult(NamedTuple):
    """Result of a ``SPLIT`` verb on one process, or on those of a node.

    Attributes:
        result: result of the verb without its token values; None without an owner of it.
        busy_s: seconds of each process in the verb without collectives; None if it is not traced.
    """

    result: Any
    busy_s: list[float | None]


class MappedRows(NamedTuple):
    """Result of a row function on one process, or on those of a node.

    Attributes:
        columns: new columns without their token values.
        facts: facts about the part of each process.
    """

    columns: DataProto
    facts: list[Any]


_UNWATCHED = TracingOptions()


class WorkerProcess:
    """Host process of one worker. An exception of the worker's code becomes a :class:`RemoteFailure`.

    Args:
        env: environment variables, set before the worker's class is imported.
        logs: log files for the process's output; None: Ray's.
    """

    def __init__(
        self,
        role: str,
        rank: int,
        world_size: int,
        env: Mapping[str, str],
        tracing: TracingOptions = _UNWATCHED,
        logs: ProcessLogs | None = None,
    ) -> None:
        self._role, self._rank, self._world_size = role, rank, world_size
        os.environ.update(env)
        bypass_proxies()  # a worker may run where the driver's environment does not reach
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
        if logs is not None:
            if logs.umask is not None:
                os.umask(logs.umask)
            redirect_output(logs.file(role, rank), logs.level, f" on {ray.util.get_node_ip_address()}")
        watch_process(tracing)
        self._tracing = tracing
        self._profiled = ProfiledProcess(tracing.profile(role, rank), f"{role}-{rank}")
        self._worker_cls: type | None = None
        self._worker: Any = None
        self._reserved: socket.socket | None = None

    def describe(self) -> WorkerInfo:
        """Describe the process before its worker exists, without verbs."""
        return describe_process()

    def load(self, worker: str | type) -> None:
        """Import the worker's class, the longest part of the start; needs no other process."""
        with self._reporting_errors("load"):
            self._worker_cls = _import_class(worker)
            if self._tracing.active:
                watch_collectives()

    def clock(self) -> int:
        """Read this machine's monotonic clock, in nanoseconds."""
        return time.monotonic_ns()

    def record(self, on: bool) -> list[Event]:
        """Turn the recording of trace events on or off; returns the events since the last call."""
        TRACER.recording = on
        return TRACER.take()

    def profile(self, label: str) -> None:
        """Start a recording of the profiler under ``label``; empty: stop and write it."""
        with self._reporting_errors("profile"):
            self._profiled.record(label)

    def reserve_address(self) -> tuple[str, int]:
        """Reserve a free port on rank 0's node until :meth:`start`; returns address and port."""
        with self._reporting_errors("reserve_address"):
            host = ray.util.get_node_ip_address()
            self._reserved = reserve_port(host)
            return host, self._reserved.getsockname()[1]

    def start(self, address: tuple[str, int], kwargs: Mapping[str, Any]) -> WorkerInfo:
        """Build the worker as ``worker_cls(place, **kwargs)``."""
        with self._reporting_errors("start"):
            assert self._worker_cls is not None, "load() comes first"
            host, port = address
            os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
            for name, value in collective_interfaces(ray.util.get_node_ip_address()).items():
                os.environ.setdefault(name, value)
            self._worker = self._worker_cls(WorkerPlace(self._rank, self._world_size, host, port), **kwargs)
            if self._reserved is not None:
                self._reserved.close()
            return describe_process(read_marks(self._worker_cls))

    def call(self, verb: str, keep: bool, kwargs: Mapping[str, Any], *args: Any) -> Any:
        """Run a verb and return its result if ``keep``; other processes return None, so that only owners send data."""
        with self._reporting_errors(verb, args):
            result = getattr(self._worker, verb)(*args, **kwargs)
        return result if keep else None

    @ray.method(num_returns=2)
    def call_split(
        self, verb: str, keep: bool, kwargs: Mapping[str, Any], *args: Any
    ) -> tuple[SplitResult, Chunk | None]:
        """Run a ``SPLIT`` verb like :meth:`call`, and measure the seconds that this process was busy.

        The arguments' token values come out of Ray's object store, and the result's stay there.

        Returns:
            The result without its token values, and these values: two Ray objects.
        """
        from megarl.cluster.stored_chunks import receive, separated  # imports torch, which some workers do without

        with self._reporting_errors(verb, args):
            values = receive(args)
            started, waited = time.monotonic_ns(), TRACER.waited_ns
            result = getattr(self._worker, verb)(*values, **kwargs)
            busy = time.monotonic_ns() - started - (TRACER.waited_ns - waited)
            kept, chunk = separated(result) if keep else (None, None)
        return SplitResult(kept, [max(0, busy) / 1e9 if self._tracing.active else None]), chunk

    @ray.method(num_returns=2)
    def map_rows(self, function: RowFunction, payload: Payload, *args: Any) -> tuple[MappedRows, Chunk | None]:
        """Run a row function on rows of a batch, in the worker's process.

        Returns:
            The columns without their token values, with the facts; and these values: two Ray objects.
        """
        from megarl.cluster.stored_chunks import receive, separated

        with self._reporting_errors(function.__name__):
            [batch] = receive([payload])
            columns, facts = function(batch, *args)
            kept, chunk = separated(columns)
        return MappedRows(kept, [facts]), chunk

    def call_scatter(self, verb: str, receivers: Sequence[int], width: int, *args: Any) -> tuple[Any, ...]:
        """Run a verb that returns ``{destination: payload}``; each receiver is ``width`` consecutive destinations.

        Returns:
            The payloads of each receiver, a Ray object each; then a final None. The driver waits for the final None and
            never fetches a payload.
        """
        with self._reporting_errors(verb, args):
            payloads: dict[int, list[Any]] = {receiver: [] for receiver in receivers}
            for destination, payload in dict(getattr(self._worker, verb)(*args)).items():
                if destination // width not in payloads:
                    raise ValueError(f"{verb} has a payload for {destination}, the receivers are {list(receivers)}")
                payloads[destination // width].append(payload)
        return (*payloads.values(), None)

    def call_gather(self, verb: str, args: Sequence[Any], *payloads: Sequence[Any]) -> None:
        """Run a verb as ``verb(*args, payloads)`` with the payloads of all sources."""
        with self._reporting_errors(verb, args):
            getattr(self._worker, verb)(*args, list(chain.from_iterable(payloads)))

    def _reporting_errors(self, verb: str, args: Sequence[Any] = ()) -> _ErrorReport:
        integers = {f"arg{position}": arg for position, arg in enumerate(args) if type(arg) is int}
        return _ErrorReport(self._role, self._rank, verb, self._profiled, integers)


ASIDE = "aside"
"""Ray concurrency group of :meth:`ServingWorkerProcess.call_aside`."""


class ServingWorkerProcess(WorkerProcess):
    """Host process of a worker that serves requests during its other verbs, such as a rollout replica."""

    @ray.method(concurrency_group=ASIDE)
    def call_aside(self, verb: str, *args: Any) -> Any:
        """Run a ``RANK`` verb in one of several threads, during a call of :meth:`call`; it is not traced."""
        try:
            return getattr(self._worker, verb)(*args)
        except (Exception, SystemExit) as error:
            raise _remote_failure(self._role, self._rank, verb, error, error.__traceback__) from None


class _ErrorReport:
    """Scope of one verb: traces it, and turns an exception into a :class:`RemoteFailure`.

    A class, because a generator would add a frame to the traceback.
    """

    def __init__(self, role: str, rank: int, verb: str, profiled: ProfiledProcess, integers: Mapping[str, int]) -> None:
        self._role, self._rank, self._verb, self._profiled = role, rank, verb, profiled
        self._span = span(verb, "verb", **integers)

    def __enter__(self) -> None:
        TRACER.follow_thread()
        count_memory()
        try:
            self._profiled.begin_verb()
        except Exception as error:
            raise _remote_failure(self._role, self._rank, self._verb, error, error.__traceback__) from None
        self._span.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        try:
            self._span.__exit__(None, None, None)
        finally:
            self._profiled.end_verb(self._verb)
            count_memory()
        # SystemExit too: Ray would take it for a regular exit of the process.
        if isinstance(error, Exception | SystemExit):
            raise _remote_failure(self._role, self._rank, self._verb, error, frames) from None


def describe_process(marks: dict[str, VerbMark] | None = None) -> WorkerInfo:
    """Describe this process."""
    node = ray.get_runtime_context().get_node_id()
    return WorkerInfo(os.getpid(), ray.util.get_node_ip_address(), node, output_log(2), marks or {})


def _remote_failure(
    role: str, rank: int, verb: str, error: BaseException, frames: TracebackType | None
) -> RemoteFailure:
    """Log an exception of a verb, and return it in a form that every process can unpickle."""
    if frames is not None and frames.tb_next is not None:
        frames = frames.tb_next  # without the method of WorkerProcess
    trace = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    log = output_log(2)
    last_lines = tail(log)  # read before the log gets the traceback, which is in the error anyway
    logger.error("%s failed\n%s", verb, trace)
    name, lost = type(error).__name__, isinstance(error, WorkerLost)
    if isinstance(error, ExportError):  # the message has the cause and the remedy
        trace = log = ""
    text, code = (error.text, error.code) if isinstance(error, MegarlError) else (str(error), "")
    return RemoteFailure(role, rank, verb, name, text, code, trace, lost, log, last_lines)


def _import_class(worker: str | type) -> type:
    """Import a class given as ``package.module.Class`` or ``package.module:Class``."""
    if isinstance(worker, type):
        return worker
    module, _, name = worker.replace(":", ".").rpartition(".")
    worker_cls = getattr(import_large(module), name)
    if not isinstance(worker_cls, type):
        raise TypeError(f"{worker} is not a class")
    return worker_cls
