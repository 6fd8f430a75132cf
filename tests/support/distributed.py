"""Runs functions in several processes that are kept between calls.

Importing torch and Megatron takes seconds; one fork server imports them once for all processes of a session. Functions
are pickled by name, so they must be at the top level of an importable module, such as a test file.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from megarl.base.child_process import environment_variables
from megarl.base.ports import held_port

PRELOADED = "support.pool_imports"


class Place(NamedTuple):
    """Rank of a process, and the rendezvous port."""

    rank: int
    world_size: int
    port: int


class RemoteError(AssertionError):
    """A function raised in a process; the message is its traceback."""


class ProcessPool:
    """Up to ``size`` processes, started on first use.

    After an error or a timeout all processes are killed, since some may wait for the failed one forever. The next call
    starts new processes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 300.0) -> list[Any]:
        """Call ``function(place, *args)`` in ``world_size`` processes at once; return the results by rank."""
        assert 1 <= world_size <= self.size, f"{world_size} processes requested, the pool has {self.size}"
        self._grow(world_size)
        connections = [connection for _, connection in self._workers[:world_size]]
        with held_port() as port:
            try:
                for rank, connection in enumerate(connections):
                    connection.send((function, (Place(rank, world_size, port), *args)))
                return self._collect(connections, timeout)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Kill all processes."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers = []

    def _grow(self, count: int) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload([PRELOADED])
        paths = os.pathsep.join(sys.path)  # Python 3.11 does not pass them to the server
        while len(self._workers) < count:
            parent_end, child_end = context.Pipe()
            process = context.Process(target=_serve, args=(child_end,), daemon=True)
            with environment_variables({"PYTHONPATH": paths}):
                process.start()
            child_end.close()
            self._workers.append((process, parent_end))

    @staticmethod
    def _collect(connections: list[Connection], timeout: float) -> list[Any]:
        results: list[Any] = [None] * len(connections)
        waiting = {connection: rank for rank, connection in enumerate(connections)}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"ranks {sorted(waiting.values())} did not answer within {timeout} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    succeeded, value = connection.recv()
                except EOFError:
                    raise RemoteError(f"rank {rank} died") from None
                if not succeeded:
                    raise RemoteError(f"rank {rank}:\n{value}")
                results[rank] = value
        return results


def _freeze_new_modules(modules: int) -> int:
    """Keep the objects of imported modules out of later collections, with which every engine ends.

    Args:
        modules: number of modules at the last call.

    Returns:
        Number of modules now.
    """
    if len(sys.modules) > modules:
        gc.collect()  # garbage would stay for ever, with the threads of its process groups
        gc.freeze()
    return len(sys.modules)


def _serve(connection: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    modules = len(sys.modules) if PRELOADED in sys.modules else 0  # the server has frozen its modules
    while True:
        try:
            function, args = connection.recv()
            modules = _freeze_new_modules(modules)
        except (EOFError, OSError):
            return
        except BaseException:
            connection.send((False, traceback.format_exc()))
            continue
        try:
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)
