"""The start of a worker group's processes and their workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import ray

from megarl.cluster.calls import WorkerCall
from megarl.cluster.processes import nsight_options
from megarl.cluster.resources import PlacedPool
from megarl.cluster.worker_process import ASIDE, ServingWorkerProcess, WorkerProcess


@cache
def _process_class(threads: int) -> Any:
    """Return Ray's class of processes; each new one would be sent to the cluster once more, 20 ms per process."""
    if threads:
        return ray.remote(concurrency_groups={ASIDE: threads})(ServingWorkerProcess)
    return ray.remote(WorkerProcess)


@dataclass(frozen=True)
class StartingRank:
    """A process that starts and builds its worker.

    Attributes:
        built: call that builds the worker; describes the process with its verbs.
    """

    rank: int
    actor: Any
    described: WorkerCall
    loaded: WorkerCall
    built: WorkerCall

    def call(self, verb: str, *args: Any) -> WorkerCall:
        """Start an ``ALL`` verb that runs once the worker is built."""
        ref = self.actor.call.remote(verb, True, {}, *args)
        return WorkerCall(ref, self.built.role, self.rank, verb, "")

    def kill(self) -> None:
        """End the process, which has joined no group."""
        ray.kill(self.actor)


@dataclass
class RankStarter:
    """Starts the processes of a role; see the arguments of :class:`~megarl.cluster.worker_group.WorkerGroup`."""

    role: str
    worker_cls: str | type
    worker_kwargs: ray.ObjectRef
    world_size: int
    pool: PlacedPool
    first_devices: Sequence[int]
    span: int
    threads: int
    on_device: bool
    _address: ray.ObjectRef | None = field(default=None, init=False)

    def start(self, ranks: Sequence[int]) -> list[StartingRank]:
        """Start processes and their workers, without waiting."""
        actors = {rank: self._create_actor(rank) for rank in ranks}
        if self._address is None and actors:  # the rendezvous of all ranks
            self._address = next(iter(actors.values())).reserve_address.remote()
        described = {rank: self._call(rank, actor.describe.remote(), "start") for rank, actor in actors.items()}
        loaded = {rank: self._call(rank, actor.load.remote(self.worker_cls), "load") for rank, actor in actors.items()}
        return [
            StartingRank(
                rank,
                actor,
                described[rank],
                loaded[rank],
                self._call(rank, actor.start.remote(self._address, self.worker_kwargs), "start"),
            )
            for rank, actor in actors.items()
        ]

    def _call(self, rank: int, ref: ray.ObjectRef, verb: str) -> WorkerCall:
        return WorkerCall(ref, self.role, rank, verb, "")

    def _create_actor(self, rank: int) -> Any:
        """Start a process without a worker."""
        tracing = self.pool.processes.options
        first = self.first_devices[rank]
        placement = self.pool.actor_options(first) if self.on_device else self.pool.host_options(rank)
        host = _process_class(self.threads).options(**placement, **nsight_options(tracing.profile(self.role, rank)))
        return host.remote(self.role, rank, self.world_size, self._environment(rank), tracing, self.pool.logs)

    def _environment(self, rank: int) -> dict[str, str]:
        first = self.first_devices[rank]
        variables = {"LOCAL_RANK": str(self.pool.local_rank(first))}
        if not self.on_device:
            variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        elif self.pool.pool.device == "cpu":
            # Two processes with two threads each on two cores are several times slower than with one.
            variables["OMP_NUM_THREADS"] = "1"
        elif self.span > 1:
            # The process claims a share of one device's bundle, so Ray would make only that device visible.
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self.pool.gpu_ids(range(first, first + self.span)))
        return variables
