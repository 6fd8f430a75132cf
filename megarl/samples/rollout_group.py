"""The worker group of the rollout replicas: its processes, and their engines."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from megarl.cluster.calls import PerRank, wait_all
from megarl.cluster.resources import PlacedPool
from megarl.cluster.role_groups import RolloutGroup, RolloutNodeGroup
from megarl.cluster.worker_group import wait_ready
from megarl.config.schema.jobs import PolicyConfig
from megarl.models import ParallelLayout
from megarl.rollout.sglang.options import EngineNodes
from megarl.workers.settings import RolloutSettings

SPARE_THREADS = 2
"""Threads of a replica that take requests, besides one per agent runner that waits for completions."""


def rollout_group(
    policy: PolicyConfig, pool: PlacedPool, hybrid: int = 0, eos_token_ids: tuple[int, ...] | None = None
) -> RolloutGroup:
    """Start one process per rollout replica; the verb ``init_model`` builds its engine.

    Elastic replicas whose devices are not reserved yet are absent.

    Args:
        policy: complete section ``actor_rollout_ref``.
        pool: devices of the replicas.
        hybrid: number of further replicas, on the devices after those of ``rollout.own_devices``.
        eos_token_ids: see :class:`~megarl.workers.settings.RolloutSettings`.

    Raises:
        ResourceError: the replicas need more devices than the pool has.
    """
    rollout = policy.rollout
    settings = RolloutSettings(
        policy.model.path,
        pool.pool.device,
        rollout,
        policy.model.user_modules,
        return_routes=policy.replays_engine_routes,
        first_hybrid=(rollout.replicas or 1) if hybrid else None,
        eos_token_ids=eos_token_ids,
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
        group: the replicas.
        replicas: their numbers.
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
    """Replace lost replicas by new processes, whose engines have no weights yet.

    Args:
        group: the replicas.
        lost: numbers of the lost ones.
        pending_bytes: see :func:`build_engines`.

    Returns:
        Their numbers, sorted.

    Raises:
        WorkerError: a new process failed.
    """
    replicas = sorted(lost)
    if group.nodes is not None:
        group.nodes.restart([rank for replica in replicas for rank in _further_nodes(group, replica)])
    group.restart(replicas)
    build_engines(group, replicas, pending_bytes)
    return replicas
