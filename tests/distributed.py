"""Runs functions in several processes that stay warm between calls.

Starting a process imports torch and Megatron, which takes seconds; a pool pays that once. A function is pickled by
its name, so it must be defined at the top level of an importable module (a test file is one).
"""

from __future__ import annotations

import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from megarl.ports import free_port


class Place(NamedTuple):
    """What a process needs in order to meet its peers."""

    rank: int
    world_size: int
    port: int


class RemoteError(AssertionError):
    """A function raised in a process; the message is the traceback of there."""


class ProcessPool:
    """Up to ``size`` processes, started on first use.

    After an error or a timeout all processes are killed (the others may wait for the failed one for ever), and the
    next call starts new ones.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
        """Calls ``function(place, *args)`` in ``world_size`` processes at once; returns the results by rank."""
        assert 1 <= world_size <= self.size, f"{world_size} processes wanted, the pool has {self.size}"
        self._grow(world_size)
        port = free_port()
        connections = [connection for _, connection in self._workers[:world_size]]
        try:
            for rank, connection in enumerate(connections):
                connection.send((function, (Place(rank, world_size, port), *args)))
            return self._collect(connections, timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kills all processes."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers = []

    def _grow(self, count: int) -> None:
        context = mp.get_context("spawn")
        while len(self._workers) < count:
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, len(self._workers)), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))

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
                rank = waiting.pop(connection)
                try:
                    fine, value = connection.recv()
                except EOFError:
                    raise RemoteError(f"rank {rank} died") from None
                if not fine:
                    raise RemoteError(f"rank {rank}:\n{value}")
                results[rank] = value
        return results


def _serve(connection: Connection, index: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, args = connection.recv()
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
