"""The processes of the rollout replicas: their start with engines, replacement, and elastic joins and leaves."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from megarl.base.errors import StepImpossible, WorkerError
from megarl.base.formatting import count_noun
from megarl.base.signals import sleep
from megarl.cluster.calls import PerRank, WorkerCall, all_ended, gather_results, wait_all
from megarl.cluster.rank_starter import StartingRank
from megarl.cluster.resources import PlacedPool
from megarl.cluster.role_groups import RolloutGroup, RolloutNodeGroup
from megarl.cluster.worker_group import wait_ready
from megarl.config.schema.jobs import GenerationJobConfig
from megarl.models import ParallelLayout
from megarl.rollout.sglang.options import EngineNodes
from megarl.tracing import TRACER
from megarl.workers.settings import RolloutSettings

SPARE_THREADS = 2
"""Threads of a replica that take requests, besides one per agent runner that waits for completions."""
logger = logging.getLogger(__name__)

REPLICAS_FILE = "replicas"
"""File in a run's folder with the number of replicas that the user wants; ``megarl scale`` writes it."""
MOST_FAILURES = 3
"""Failed starts in a row after which a replica is not started again."""
POLL_S = 0.5


def rollout_group(
    config: GenerationJobConfig, pool: PlacedPool, hybrid: int = 0, eos_token_ids: tuple[int, ...] | None = None
) -> RolloutGroup:
    """Start one process per rollout replica; the verb ``init_model`` builds its engine.

    Elastic replicas whose devices are not reserved yet are absent.

    Args:
        hybrid: number of further replicas, on the devices after ``rollout.own_devices``.
        eos_token_ids: see :class:`~megarl.workers.settings.RolloutSettings`.

    Raises:
        ResourceError: the replicas need more devices than the pool has.
    """
    policy = config.actor_rollout_ref
    rollout = policy.rollout
    settings = RolloutSettings(
        policy.model.path,
        pool.pool.device,
        rollout,
        policy.model.user_modules,
        return_routes=policy.replays_engine_routes,
        first_hybrid=(rollout.replicas or 1) if hybrid else None,
        eos_token_ids=eos_token_ids,
        image_options=config.data.mm_processor_kwargs,
        trained_tower=policy.trains_tower,
    )
    kwargs, replicas = {"settings": settings}, range((rollout.replicas or 1) + hybrid)
    size, threads = rollout.devices_per_replica, rollout.agent.num_workers + SPARE_THREADS
    span = min(size, max(pool.pool.devices_per_node))
    first_devices = [replica * size for replica in replicas[: len(replicas) - hybrid]]
    first_devices += [rollout.own_devices + number * size for number in range(hybrid)]
    absent: list[int] = []
    if pool.pool.required is not None:
        absent = [replica for replica in replicas if not pool.is_placed(range(replica * size, (replica + 1) * size))]
    group = RolloutGroup(
        "rollout",
        "megarl.workers.rollout:RolloutWorker",
        kwargs,
        ParallelLayout(dp=len(replicas)),
        pool,
        devices_per_process=span,
        first_devices=first_devices,
        threads=threads,
        absent=absent,
    )
    further = [first + device for first in first_devices for device in range(span, size, span)]
    if further:
        group.nodes = RolloutNodeGroup(
            "rollout_node",
            "megarl.workers.rollout:RolloutNodeWorker",
            kwargs,
            ParallelLayout(dp=len(further)),
            pool,
            devices_per_process=span,
            first_devices=further,
        )
    return group


def build_engines(
    group: RolloutGroup, replicas: Sequence[int], pending_bytes: Mapping[int, int | None] | None = None
) -> None:
    """Build the engines of some replicas; the nodes of one replica start together.

    Args:
        pending_bytes: by replica, see :meth:`megarl.workers.rollout.RolloutWorker.init_model`; None = no other role is
            on their devices.

    Raises:
        WorkerError: a process failed.
    """
    pending = {replica: pending_bytes[replica] if pending_bytes else None for replica in replicas}
    if group.nodes is None:
        group.submit_on(replicas, "init_model", PerRank(pending)).result()
        return
    wait_ready([group, group.nodes])
    further = {replica: _further_nodes(group, replica) for replica in replicas}
    first = {replica: group.processes[replica].host for replica in replicas}
    ports: list[int] = group.submit_on(replicas, "host_rendezvous", first).result()
    nodes = {
        replica: EngineNodes((first[replica], *(group.nodes.processes[rank].host for rank in further[replica])), port)
        for replica, port in zip(replicas, ports, strict=True)
    }
    followers = {
        rank: replace(nodes[replica], number=number)
        for replica, ranks in further.items()
        for number, rank in enumerate(ranks, 1)
    }
    of_followers = {rank: pending[replica] for replica, ranks in further.items() for rank in ranks}
    wait_all(
        [
            group.submit_on(replicas, "init_model", PerRank(pending), nodes),
            group.nodes.submit_on(list(followers), "init_model", followers, PerRank(of_followers)),
        ]
    )


def _further_nodes(group: RolloutGroup, replica: int) -> range:
    """Return the ranks of a replica's further nodes."""
    if group.nodes is None:
        return range(0)
    each = group.nodes.world_size // group.world_size
    return range(replica * each, (replica + 1) * each)


def restart_replicas(
    group: RolloutGroup, lost: Collection[int], pending_bytes: Mapping[int, int | None] | None = None
) -> list[int]:
    """Replace lost replicas by new processes, whose engines have no weights yet; return their numbers, sorted.

    Raises:
        WorkerError: a new process failed.
    """
    replicas = sorted(lost)
    if group.nodes is not None:
        group.nodes.restart([rank for replica in replicas for rank in _further_nodes(group, replica)])
    group.restart(replicas)
    build_engines(group, replicas, pending_bytes)
    return replicas


class ReplicasMissing(WorkerError, StepImpossible):
    """Fewer rollout replicas than ``min_replicas`` are left, and none has joined in time."""


class _Joining(NamedTuple):
    """A replica whose process starts and builds its engine."""

    starting: StartingRank
    built: WorkerCall

    @property
    def is_done(self) -> bool:
        """Whether the engine is built, or the start has failed."""
        return all_ended([self.starting.described, self.starting.built, self.built])


class ElasticReplicas:
    """Starts, admits and removes the replicas of a run; see ``rollout.min_replicas``.

    A replica starts in the background as soon as its devices are reserved on a living node: at the start of the run, or
    after the loss of its node. It joins at the next weight sync, which brings its weights. A lost replica leaves at
    once.

    Args:
        group: the replicas; absent ranks may join. Each is on one node.
        least: fewest replicas with which the run goes on.
        join_timeout_s: seconds to wait for others with fewer.
        request: file with the number of replicas that the user wants; without it, all.
        notify: prints a line for the user.
    """

    def __init__(
        self, group: RolloutGroup, least: int, join_timeout_s: float, request: Path, notify: Callable[[str], None]
    ) -> None:
        self._group, self._least, self._join_timeout_s = group, least, join_timeout_s
        self._file, self._notify = request, notify
        self._joining: dict[int, _Joining] = {}
        self._failures: Counter[int] = Counter()
        self._unread = ""

    def leaving(self) -> list[int]:
        """Return the replicas that the user does not want any more; starts of such replicas are given up."""
        excess = len(self._group.ranks) + len(self._joining) - self._target()
        for replica in sorted(self._joining, reverse=True)[: max(0, excess)]:
            self._give_up(replica)
            excess -= 1
        return self._group.ranks[-excess:] if excess > 0 else []

    def end(self, replicas: Collection[int]) -> None:
        """End replicas without requests, and give their devices back to the cluster."""
        self._group.remove(sorted(replicas))
        for replica in replicas:
            self._group.pool.release(self._group.devices(replica))
            self._notify(f"rollout replica {replica} has left; {self._count()}")

    def lose(self, lost: Collection[int]) -> None:
        """Remove lost replicas, and wait until at least ``min_replicas`` are left.

        Raises:
            ReplicasMissing: not enough have joined in time.
        """
        self._group.remove(sorted(lost))
        deadline = time.monotonic() + self._join_timeout_s
        while len(self._group.ranks) < self._least:
            if not self.admit() and time.monotonic() > deadline:
                raise ReplicasMissing(
                    f"{self._count()}, {self._least} are needed (rollout.min_replicas), and no further one has joined "
                    f"within {self._join_timeout_s:g} s (rollout.health.join_timeout_s)",
                    code="rollout.too-few-replicas",
                )
            TRACER.progress()  # for the watchdog
            sleep(POLL_S)

    def admit(self) -> list[int]:
        """Start absent replicas whose devices are there; return the replicas that have joined since the last call."""
        done = [replica for replica, joining in self._joining.items() if joining.is_done]
        joined = [replica for replica in done if self._join(replica)]
        self._start()
        return joined

    def _start(self) -> None:
        """Start as many absent replicas as the user wants and the cluster has devices for.

        The others reserve no devices.
        """
        group, pool = self._group, self._group.pool
        busy = {*group.ranks, *self._joining}
        absent = [replica for replica in range(group.world_size) if replica not in busy]
        absent = [replica for replica in absent if self._failures[replica] < MOST_FAILURES]
        placed = {replica for replica in absent if pool.is_placed(group.devices(replica))}
        absent.sort(key=lambda replica: replica not in placed)
        room = max(0, self._target() - len(busy))
        for replica in absent[room:]:
            pool.release(group.devices(replica))
        for replica in absent[:room]:
            pool.request(group.devices(replica))
            if replica in placed:
                (starting,) = group.begin_start([replica])
                self._joining[replica] = _Joining(starting, starting.call("init_model"))

    def _join(self, replica: int) -> bool:
        """Add a replica whose start is done to the group; return False if it has failed."""
        joining = self._joining.pop(replica)
        try:
            self._group.join([joining.starting])
            gather_results([self._group], [joining.built], None)
        except WorkerError as error:
            self._group.remove([replica])
            self._failures[replica] += 1
            rest = ""
            if self._failures[replica] >= MOST_FAILURES:
                self._group.pool.release(self._group.devices(replica))
                rest = "; it is not started again"
            logger.warning("rollout replica %d cannot join%s: %s", replica, rest, error)
            return False
        self._failures[replica] = 0
        self._notify(f"rollout replica {replica} has joined; {self._count()}")
        return True

    def _give_up(self, replica: int) -> None:
        self._joining.pop(replica).starting.kill()
        self._group.pool.release(self._group.devices(replica))

    def _target(self) -> int:
        """Return the number of replicas that the user wants."""
        most = self._group.world_size
        try:
            text = self._file.read_text("utf-8", "replace").strip()
        except OSError:
            return most
        if text.isdecimal() and self._least <= int(text) <= most:
            return int(text)
        if text != self._unread:
            self._unread = text
            logger.warning(
                "%s: %r has no effect, expected %d (rollout.min_replicas) to %d", self._file, text, self._least, most
            )
        return most

    def _count(self) -> str:
        return f"{count_noun(len(self._group.ranks), 'replica')} of {self._group.world_size}"
