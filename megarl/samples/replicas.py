"""The rollout replicas of a training job in each mode: weight syncs, shared devices, lost and hybrid replicas."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar, TypeVar

from megarl.base.errors import WeightSyncError, WorkerError
from megarl.base.reductions import Metrics
from megarl.cluster.agent_runners import ReplicaProcess, replica_processes
from megarl.cluster.calls import WorkerFailed, WorkerSilent
from megarl.cluster.role_groups import RolloutGroup
from megarl.cluster.sharding_manager import ShardingManager
from megarl.rollout.router import RouterStats
from megarl.rollout.serving import HeldRequests
from megarl.samples.rollout_group import ElasticReplicas, restart_replicas
from megarl.samples.rollouts import Rollouts

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")
COSTS_REMEMBERED = 3


class Replicas:
    """Rollout replicas that take turns with the trainer on its devices: synchronous training.

    No conversation is in flight between a batch and the next step.

    Args:
        connect: plans the weight sync from the actor to these ranks of the group, and connects both sides.
        pending: returns the device bytes that the other roles have yet to allocate on the devices of each replica.

    Attributes:
        across_steps: whether conversations go on after a batch, so that a weight sync admits prompts.
        separate: whether the replicas have devices of their own, and generate while the trainer trains.
        sharding_manager: sends the actor's weights to the replicas.
    """

    across_steps: ClassVar[bool] = False
    separate: ClassVar[bool] = False
    _after_loss = "is replaced"

    def __init__(
        self,
        group: RolloutGroup,
        connect: Callable[[Sequence[int]], ShardingManager],
        pending: Callable[[], Mapping[int, int | None]],
    ) -> None:
        self.group, self._connect, self._pending = group, connect, pending
        self.sharding_manager = connect(group.ranks)

    def processes(self) -> dict[int, ReplicaProcess]:
        """Return the processes of the replicas that serve, by number."""
        return replica_processes(self.group)

    @property
    def weight_version(self) -> int:
        """Version of the last weight sync."""
        return self.sharding_manager.version

    @weight_version.setter
    def weight_version(self, version: int) -> None:
        self.sharding_manager.version = version

    def ready(self) -> None:
        """Let the engines generate with the weights that they have."""
        if not self.sharding_manager.in_sync:
            self.weight_version -= 1  # the same weights keep their version
            self.sync_weights()

    def free(self) -> None:
        """Free the engines' device memory for training; no request is in flight."""
        self._retry_with_new_replicas(lambda: self.sharding_manager.free_engines())

    def end_batch(self, rollouts: Rollouts) -> Metrics:
        """Free the devices that the trainer shares with engines; return the metrics of the engines, if known."""
        metrics = rollouts.finish().metrics() | rollouts.runners.endpoint_metrics()
        self.free()
        return metrics

    def sync_weights(self) -> Metrics:
        """Send the actor's weights to idle replicas; see :meth:`ShardingManager.sync_weights`."""
        return self._retry_with_new_replicas(lambda: self.sharding_manager.sync_weights())

    def sync(self, rollouts: Rollouts, wait_ended: Callable[[], None] | None) -> Metrics:
        """Send the actor's weights to the replicas; conversations in flight go on with them.

        Args:
            wait_ended: waits until no conversation of training is in flight; None = interrupt them instead.

        Returns:
            Metrics of the sync; in asynchronous modes also of engines and trainer since the last one.
        """
        return self.sync_weights()

    def replace(self, lost: Collection[int]) -> None:
        """Replace lost replicas by new processes; they get the weights with the next sync.

        Raises:
            WorkerError: a new process failed.
        """
        restart_replicas(self.group, lost, self._pending())
        self._reconnect()

    def _reconnect(self, unused: Collection[int] = ()) -> None:
        """Plan the weight sync for the present replicas without the unused ones."""
        version = self.weight_version
        self.sharding_manager = self._connect([rank for rank in self.group.ranks if rank not in unused])
        self.weight_version = version

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
                logger.warning("rollout replica %s is lost and %s: %s", numbers, self._after_loss, error)
                self.replace(lost)
        return action()


class ColocatedReplicas(Replicas):
    """Rollout replicas on the trainer's devices that pause from the end of a batch until the next weights."""

    across_steps = True

    def ready(self) -> None:
        """Do nothing: the last sync has resumed the engines."""

    def end_batch(self, rollouts: Rollouts) -> Metrics:
        """Interrupt all requests and free the engines' memory for training; a sync in flight continues the requests."""
        self._retry_with_new_replicas(lambda: self.sharding_manager.pause_engines())
        return {}

    def sync(self, rollouts: Rollouts, wait_ended: Callable[[], None] | None) -> Metrics:
        """Send the actor's weights, and continue the interrupted responses; see :meth:`Replicas.sync`."""
        metrics = self._sync_in_flight(rollouts)
        rollouts.update_replicas()  # a new replica gets its share of the conversations
        return metrics | {"rollout_service/replicas": float(len(self.processes()))}

    def _sync_in_flight(self, rollouts: Rollouts) -> Metrics:
        """Replace the weights between two tokens of the responses in flight."""
        version = self.weight_version

        def sync() -> tuple[Metrics, list[HeldRequests]]:
            self.weight_version = version  # a repetition sends the same weights under the same version
            return self.sharding_manager.sync_weights_in_flight()

        metrics, paused = self._retry_with_new_replicas(sync)
        stats = rollouts.runners.take_stats() if rollouts.is_open else RouterStats()
        return _service_metrics(0.0, paused) | stats.metrics() | metrics


class HybridReplicas:
    """Replicas on the trainer's devices, and whether they are worth it; see ``async_training.hybrid_rollout``.

    They serve from a weight sync until the first mini-batch of the interval is complete. All replicas count as equally
    fast: with ``h`` hybrid ones besides ``n`` others the trainer waits ``n / (n + h)`` as long. The hybrid ones are
    used if that saves more time than the last switches took; while they are not used, the wait is measured again.

    Args:
        ranks: their ranks in the rollout group.
        others: number of the other replicas.

    Attributes:
        ranks: their ranks.
        in_use: whether weight syncs include them.
        serve: whether they have their weights and take requests.
    """

    def __init__(self, ranks: Sequence[int], others: int) -> None:
        self.ranks, self._others = list(ranks), others
        self.in_use, self.serve = True, False
        self._costs: deque[float] = deque(maxlen=COSTS_REMEMBERED)

    def note_switch(self, seconds: float) -> None:
        """Record the time of one switch from generation to training."""
        self._costs.append(seconds)

    def decide(self, waited_s: float) -> bool:
        """Decide about the next interval; return whether the decision has changed.

        Args:
            waited_s: wait of the trainer in the last interval, in seconds.
        """
        if not self._costs:
            return False
        hybrid, others = len(self.ranks), self._others
        saved_s = waited_s * hybrid / (others if self.in_use else others + hybrid)
        before, self.in_use = self.in_use, saved_s > sum(self._costs) / len(self._costs)
        return self.in_use != before


class DisaggregatedReplicas(ColocatedReplicas):
    """Rollout replicas with devices of their own, which generate while the trainer trains.

    Args:
        elastic: lets replicas join and leave; None = a lost one is replaced before the run goes on.
        hybrid: replicas on the trainer's devices, which serve while the trainer waits; None = there are none.
    """

    separate = True

    def __init__(
        self,
        group: RolloutGroup,
        connect: Callable[[Sequence[int]], ShardingManager],
        pending: Callable[[], Mapping[int, int | None]],
        elastic: ElasticReplicas | None = None,
        hybrid: HybridReplicas | None = None,
    ) -> None:
        super().__init__(group, connect, pending)
        self._elastic, self._hybrid = elastic, hybrid
        if elastic is not None:
            self._after_loss = "leaves the run until it can join again"
        self._leaving: Collection[int] = ()
        self._switch_s = 0.0

    def processes(self) -> dict[int, ReplicaProcess]:
        """Return the processes of the replicas that serve, by number."""
        idle = {*self._leaving, *(self._hybrid.ranks if self._hybrid and not self._hybrid.serve else ())}
        return {number: process for number, process in super().processes().items() if number not in idle}

    def end_batch(self, rollouts: Rollouts) -> Metrics:
        """Take the trainer's devices back from the hybrid replicas, if they serve; the others generate on."""
        if self._hybrid is not None and self._hybrid.serve:
            started, self._hybrid.serve = time.perf_counter(), False
            rollouts.update_replicas()
            self.free()
            seconds = time.perf_counter() - started
            self._hybrid.note_switch(seconds)
            self._switch_s += seconds
        return {}

    def sync_weights(self) -> Metrics:
        """Send the actor's weights to idle replicas; see :meth:`ShardingManager.sync_weights`."""
        metrics = super().sync_weights()
        self._serve_hybrid()
        return metrics

    def sync(self, rollouts: Rollouts, wait_ended: Callable[[], None] | None) -> Metrics:
        """Let replicas join and leave, and send the actor's weights; see :meth:`Replicas.sync`."""
        self._update(rollouts)
        if wait_ended is None:
            metrics = self._sync_in_flight(rollouts)
            self._serve_hybrid()
            rollouts.update_replicas()
        else:
            started = time.perf_counter()
            wait_ended()
            stats = rollouts.finish()
            waited = _service_metrics(time.perf_counter() - started)
            metrics = waited | stats.metrics() | self.sync_weights()
        metrics["rollout_service/replicas"] = float(len(self.processes()))
        metrics["rollout_service/switch_s"], self._switch_s = self._switch_s, 0.0
        return metrics | rollouts.idle.metrics(metrics.get("rollout/replica_utilization/mean", 0.0))

    def replace(self, lost: Collection[int]) -> None:
        """Replace lost replicas by new processes; elastic ones leave until they can join again.

        Raises:
            WorkerError: a new process failed.
            ReplicasMissing: too few elastic replicas are left.
        """
        if self._elastic is None:
            super().replace(lost)
        else:
            self._elastic.lose(lost)
            self._reconnect()

    def _serve_hybrid(self) -> None:
        if self._hybrid is not None:
            self._hybrid.serve = self._hybrid.in_use

    def _update(self, rollouts: Rollouts) -> None:
        """Let elastic replicas join and leave before a weight sync, and decide about the hybrid ones."""
        if self._hybrid is not None and self._hybrid.decide(rollouts.idle.waited_s):
            self._reconnect()
        if self._elastic is None:
            return
        if leaving := self._elastic.leaving():
            self._leaving = leaving
            rollouts.update_replicas()
            self._elastic.end(leaving)
            self._leaving = ()
        if self._elastic.admit() or leaving:
            self._reconnect()

    def _reconnect(self, unused: Collection[int] = ()) -> None:
        super()._reconnect(self._hybrid.ranks if self._hybrid and not self._hybrid.in_use else unused)


def _service_metrics(waited_s: float, paused: Sequence[HeldRequests] = ()) -> Metrics:
    return {
        "rollout_service/sync_wait_s": waited_s,
        "rollout_service/interrupted": float(sum(requests.requests for requests in paused)),
        "rollout_service/recomputed_tokens": float(sum(requests.tokens for requests in paused)),
    }


def _lost_ranks(error: BaseException | None, role: str) -> list[int]:
    """Ranks of a role whose death or silence alone caused an error."""
    while error is not None:
        if isinstance(error, WorkerFailed) and error.died and error.role == role:
            return [error.rank]
        if isinstance(error, WorkerSilent) and {late_role for late_role, _ in error.late} == {role}:
            return sorted(rank for _, rank in error.late)
        error = error.__cause__
    return []
