"""What runs inside each Ray actor: a host that builds one plain worker and calls its verbs."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import ray

from megarl.errors import WorkerLost
from megarl.logs import ProcessLogs, log_of, tail, take_output
from megarl.ports import reserve_port
from megarl.tracing import TRACER, Event, TracingOptions, span, watch_collectives, watch_process
from megarl.tracing.memory import count_memory
from megarl.tracing.profilers import ProfiledProcess
from megarl.workers.dispatch import VerbMark, read_marks
from megarl.workers.place import WorkerPlace

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class WorkerCard:
    """What the driver knows of a started process.

    Attributes:
        pid: process number on its host.
        host: address of its node.
        node: Ray's name of the node.
        log: file on that node with what the process writes, empty if unknown.
        marks: the verbs of its worker, by name.
    """

    pid: int
    host: str
    node: str
    log: str
    marks: dict[str, VerbMark]


class RemoteFailure(Exception):
    """An exception of a worker, in a form that every process can unpickle.

    Args:
        role: of the worker.
        rank: likewise.
        verb: what it was doing.
        kind: the exception's class.
        message: its text.
        trace: its traceback.
        lost: whether the worker is of no more use.
        log: path of the worker's log file, empty if unknown.
        last_lines: of that file, until the exception.
    """

    def __init__(
        self,
        role: str,
        rank: int,
        verb: str,
        kind: str,
        message: str,
        trace: str,
        lost: bool,
        log: str = "",
        last_lines: str = "",
    ) -> None:
        super().__init__(role, rank, verb, kind, message, trace, lost, log, last_lines)
        self.role, self.rank, self.verb = role, rank, verb
        self.kind, self.message, self.trace = kind, message, trace
        self.lost, self.log, self.last_lines = lost, log, last_lines


class BusyResult(NamedTuple):
    """What a process returns of its share.

    Attributes:
        result: the verb's, or None from a process that does not own it.
        busy_s: seconds in the verb, less those in collectives; None where they are not watched.
    """

    result: Any
    busy_s: float | None


_UNWATCHED = TracingOptions()


class WorkerProcess:
    """Host of one worker.

    Args:
        role: name of the role, for errors.
        rank: rank of this process in its role.
        world_size: processes of the role.
        env: environment variables, set before the worker's class is imported.
        tracing: how the process is watched.
        logs: where to write what this process prints; None = where Ray has it write.
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
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
        if logs is not None:
            take_output(logs.file(role, rank), logs.level, f" on {ray.util.get_node_ip_address()}")
        watch_process(tracing)
        self._tracing = tracing
        self._profiled = ProfiledProcess(tracing.profile(role, rank), f"{role}-{rank}")
        self._worker_cls: type | None = None
        self._worker: Any = None
        self._reserved: socket.socket | None = None

    def describe(self) -> WorkerCard:
        """The process as it is before its worker exists, without verbs."""
        node = ray.get_runtime_context().get_node_id()
        return WorkerCard(os.getpid(), ray.util.get_node_ip_address(), node, log_of(2), {})

    def load(self, worker: str | type) -> None:
        """Import the worker's class, which takes most of the start; needs no other process.

        Raises:
            RemoteFailure: it cannot be imported.
        """

        def load_class() -> None:
            self._worker_cls = _import_class(worker)
            if self._tracing.active:
                watch_collectives()

        self._guard("load", load_class)

    def clock(self) -> int:
        """This machine's monotonic clock, in nanoseconds."""
        return time.monotonic_ns()

    def record(self, on: bool) -> list[Event]:
        """Keep events from here on, or not; returns those since the last call."""
        TRACER.recording = on
        return TRACER.take()

    def profile(self, label: str) -> None:
        """Have the profiler record from here on, as ``label``; empty: stop."""
        self._guard("profile", lambda: self._profiled.record(label))

    def reserve_address(self) -> tuple[str, int]:
        """On rank 0: this node's address and a free port, held until :meth:`start`."""

        def reserve() -> tuple[str, int]:
            host = ray.util.get_node_ip_address()
            self._reserved = reserve_port(host)
            return host, self._reserved.getsockname()[1]

        return self._guard("reserve_address", reserve)

    def start(self, address: tuple[str, int], kwargs: Mapping[str, Any]) -> WorkerCard:
        """Build the worker as ``worker_cls(place, **kwargs)``.

        Raises:
            RemoteFailure: the constructor raised.
        """

        def build() -> WorkerCard:
            assert self._worker_cls is not None, "load() comes first"
            host, port = address
            os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
            if host == "127.0.0.1" and sys.platform == "linux":
                # Otherwise gloo takes the address of the host's name, which on many laptops leads nowhere.
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            if self._reserved is not None:
                self._reserved.close()
            self._worker = self._worker_cls(WorkerPlace(self._rank, self._world_size, host, port), **kwargs)
            return WorkerCard(**{**vars(self.describe()), "marks": read_marks(self._worker_cls)})

        return self._guard("start", build)

    def call(self, verb: str, keep: bool, kwargs: Mapping[str, Any], *args: Any) -> Any:
        """Run a verb; its result is returned only from a process that owns it, so that no other's is sent.

        Raises:
            RemoteFailure: the verb raised.
        """
        result = self._guard(verb, lambda: getattr(self._worker, verb)(*args, **kwargs), args)
        return result if keep else None

    def call_split(self, verb: str, keep: bool, kwargs: Mapping[str, Any], *args: Any) -> BusyResult:
        """As :meth:`call`, for a verb of which each data-parallel rank has a share: also says how long it was busy.

        Raises:
            RemoteFailure: the verb raised.
        """
        started, waited = time.monotonic_ns(), TRACER.waited_ns
        result = self.call(verb, keep, kwargs, *args)
        busy = time.monotonic_ns() - started - (TRACER.waited_ns - waited)
        return BusyResult(result, max(0, busy) / 1e9 if self._tracing.active else None)

    def call_scatter(self, verb: str, destinations: int, kwargs: Mapping[str, Any], *args: Any) -> tuple[Any, ...]:
        """Run a verb that returns ``{destination: payload}``.

        Returns:
            One payload per destination (None where there is none), each an object of its own in Ray, and a final None
            by which the driver sees that the verb is done without fetching a payload.

        Raises:
            RemoteFailure: the verb raised, or named a destination outside ``range(destinations)``.
        """

        def scatter() -> tuple[Any, ...]:
            payloads = dict(getattr(self._worker, verb)(*args, **kwargs))
            result = tuple(payloads.pop(index, None) for index in range(destinations))
            if payloads:
                raise ValueError(f"{verb} has payloads for {sorted(payloads)}, there are {destinations} destinations")
            return (*result, None)

        return self._guard(verb, scatter, args)

    def call_gather(self, verb: str, args: Sequence[Any], *payloads: Any) -> None:
        """Run a verb as ``verb(*args, payloads)``, with those payloads that are not None as a list.

        Raises:
            RemoteFailure: the verb raised.
        """
        present = [payload for payload in payloads if payload is not None]
        self._guard(verb, lambda: getattr(self._worker, verb)(*args, present), args)

    def _guard(self, verb: str, function: Callable[[], _Result], args: Sequence[Any] = ()) -> _Result:
        """Calls, and turns what is raised into a failure with a name; numbers in ``args`` are shown in the timeline."""
        count_memory()
        try:
            self._profiled.begin_verb()
            with span(verb, "verb", **{f"arg{at}": arg for at, arg in enumerate(args) if type(arg) is int}):
                return function()
        # SystemExit included: to Ray it would be a process that left in good order.
        except (Exception, SystemExit) as error:
            frames = error.__traceback__
            for _ in range(2):  # this function and the closure that it was given
                frames = frames.tb_next if frames is not None and frames.tb_next is not None else frames
            trace = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
            kind, lost = type(error).__name__, isinstance(error, WorkerLost)
            log = log_of(2)
            last_lines = tail(log)  # before its traceback, which is told anyway
            logger.error("%s failed\n%s", verb, trace)
            failure = RemoteFailure(self._role, self._rank, verb, kind, str(error), trace, lost, log, last_lines)
        finally:
            self._profiled.end_verb(verb)
            count_memory()
        raise failure


def _import_class(worker: str | type) -> type:
    """A class given as ``package.module.Class`` or ``package.module:Class``."""
    if isinstance(worker, type):
        return worker
    module, _, name = worker.replace(":", ".").rpartition(".")
    found = getattr(importlib.import_module(module), name)
    if not isinstance(found, type):
        raise TypeError(f"{worker} is not a class")
    return found
