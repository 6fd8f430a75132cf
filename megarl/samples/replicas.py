"""The rollout replicas of a training job: weight syncs, devices that they share, and replacement of lost ones."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from megarl.base.errors import WeightSyncError, WorkerError
from megarl.cluster import WorkerFailed, WorkerSilent
from megarl.cluster.replica_processes import ReplicaProcess, replica_processes
from megarl.cluster.role_groups import RolloutGroup
from megarl.cluster.sharding_manager import ShardingManager
from megarl.rollout.serving import HeldRequests
from megarl.samples.elastic_replicas import ElasticReplicas
from megarl.samples.hybrid_replicas import HybridReplicas
from megarl.samples.rollout_group import restart_replicas

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


@dataclass
class Replicas:
    """Rollout replicas, which serve the weights of the last sync.

    Attributes:
        group: their processes.
        sharding_manager: sends the actor's weights to them.
        connect: builds a sharding manager for these ranks of the group.
        pending: returns the device bytes that the other roles have yet to allocate on the devices of each replica.
        elastic: lets replicas join and leave; None = a lost one is replaced before the run goes on.
        hybrid: replicas on the trainer's devices, which serve while the trainer waits; None = there are none.
    """

    group: RolloutGroup
    sharding_manager: ShardingManager
    connect: Callable[[Sequence[int]], ShardingManager]
    pending: Callable[[], Mapping[int, int | None]]
    elastic: ElasticReplicas | None = None
    hybrid: HybridReplicas | None = None
    _leaving: Collection[int] = ()

    def processes(self) -> dict[int, ReplicaProcess]:
        """Return the processes of the replicas that serve, by number."""
        idle = {*self._leaving, *(self.hybrid.ranks if self.hybrid and not self.hybrid.serve else ())}
        return {number: process for number, process in replica_processes(self.group).items() if number not in idle}

    @property
    def weight_version(self) -> int:
        """Version of the last weight sync."""
        return self.sharding_manager.version

    @weight_version.setter
    def weight_version(self, version: int) -> None:
        self.sharding_manager.version = version

    def sync_weights(self) -> dict[str, float]:
        """Send the actor's weights to the rollout replicas; see :meth:`ShardingManager.sync_weights`."""
        metrics = self._retry_with_new_replicas(lambda: self.sharding_manager.sync_weights())
        self._end_sync()
        return metrics

    def pause_engines(self) -> None:
        """Interrupt all requests and free the engines' memory for training; a sync in flight continues the requests."""
        self._retry_with_new_replicas(lambda: self.sharding_manager.pause_engines())

    def sync_weights_in_flight(self) -> tuple[dict[str, float], list[HeldRequests]]:
        """Send the actor's weights between two tokens; see :meth:`ShardingManager.sync_weights_in_flight`."""
        version = self.weight_version

        def sync() -> tuple[dict[str, float], list[HeldRequests]]:
            self.weight_version = version  # a repetition sends the same weights under the same version
            return self.sharding_manager.sync_weights_in_flight()

        result = self._retry_with_new_replicas(sync)
        self._end_sync()
        return result

    def _end_sync(self) -> None:
        if self.hybrid is not None:
            self.hybrid.serve = self.hybrid.in_use

    def free_engines(self) -> None:
        """Free the engines' device memory for training."""
        self._retry_with_new_replicas(lambda: self.sharding_manager.free_engines())

    def ready_engines(self) -> None:
        """Restore the engines before another rollout with the same weights, if their memory was freed."""
        if not self.sharding_manager.in_sync:
            self.weight_version -= 1  # the same weights keep their version
            self.sync_weights()

    def _retry_with_new_replicas(self, action: Callable[[], _Result]) -> _Result:
        """Run an action on all replicas; replace dead replicas and retry, at most once per replica."""
        for _ in range(self.group.world_size):
            try:
                return action()
            except (WeightSyncError, WorkerError) as error:
                lost = _lost_ranks(error, self.group.role)
                if not lost:
                    raise
                numbers = ", ".join(map(str, lost))
                consequence = "is replaced" if self.elastic is None else "leaves the run until it can join again"
                logger.warning("rollout replica %s is lost and %s: %s", numbers, consequence, error)
                self.replace(lost)
        return action()

    def replace(self, lost: Collection[int]) -> None:
        """Replace lost replicas by new processes; they get the weights with the next sync. Elastic ones leave.

        Raises:
            WorkerError: a new process failed.
            ReplicasMissing: too few elastic replicas are left.
        """
        if self.elastic is None:
            restart_replicas(self.group, lost, self.pending())
        else:
            self.elastic.lose(lost)
        self._reconnect()

    def update(self, move_requests: Callable[[], None], waited_s: float) -> None:
        """Let elastic replicas join and leave before a weight sync, and decide about the hybrid ones.

        Args:
            move_requests: moves the requests of the leaving replicas to those of :meth:`processes`.
            waited_s: wait of the trainer since the last sync, in seconds.
        """
        if self.hybrid is not None and self.hybrid.decide(waited_s):
            self._reconnect()
        if self.elastic is None:
            return
        if leaving := self.elastic.leaving():
            self._leaving = leaving
            move_requests()
            self.elastic.end(leaving)
            self._leaving = ()
        if self.elastic.admit() or leaving:
            self._reconnect()

    def return_devices(self, move_requests: Callable[[], None]) -> float:
        """Take the trainer's devices back from the hybrid replicas; return the seconds that it took.

        Args:
            move_requests: moves their requests to the replicas of :meth:`processes`.
        """
        if self.hybrid is None or not self.hybrid.serve:
            return 0.0
        started, self.hybrid.serve = time.perf_counter(), False
        move_requests()
        self.free_engines()
        seconds = time.perf_counter() - started
        self.hybrid.note_switch(seconds)
        return seconds

    def _reconnect(self) -> None:
        """Plan the weight sync for the present replicas."""
        version = self.weight_version
        unused = self.hybrid.ranks if self.hybrid and not self.hybrid.in_use else ()
        self.sharding_manager = self.connect([rank for rank in self.group.ranks if rank not in unused])
        self.sharding_manager.version = version


def _lost_ranks(error: BaseException | None, role: str) -> list[int]:
    """Ranks of a role whose death or silence alone caused an error."""
    while error is not None:
        if isinstance(error, WorkerFailed) and error.died and error.role == role:
            return [error.rank]
        if isinstance(error, WorkerSilent) and {late_role for late_role, _ in error.late} == {role}:
            return sorted(rank for _, rank in error.late)
        error = error.__cause__
    return []
