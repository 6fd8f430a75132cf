"""The rollout replicas of a job: how they are started, asked and replaced."""

from __future__ import annotations

from collections.abc import Collection

from megarl.cluster import PlacedPool, WorkerGroup
from megarl.cluster.replicas import GroupReplica
from megarl.config.schema import PolicyConfig
from megarl.models import ParallelLayout
from megarl.workers.settings import RolloutSettings


def rollout_group(policy: PolicyConfig, device: str, pool: PlacedPool) -> WorkerGroup:
    """Starts one process per replica; their engines are built by the verb ``init_model``.

    Args:
        policy: complete.
        device: ``cpu`` or ``cuda``.
        pool: devices to live on.

    Raises:
        ResourceError: the replicas need more devices than the pool has.
    """
    rollout = policy.rollout
    settings = RolloutSettings(policy.model.path, device, rollout, policy.model.own_modules)
    worker, kwargs = "megarl.workers.rollout:RolloutWorker", {"settings": settings}
    layout = ParallelLayout(dp=rollout.replicas or 1)
    return WorkerGroup("rollout", worker, kwargs, layout, pool, devices_per_process=rollout.devices_per_replica)


def router_replicas(group: WorkerGroup) -> list[GroupReplica]:
    """The replicas of a group, as the router sees them."""
    return [GroupReplica(group, replica) for replica in range(group.world_size)]


def restart_replicas(group: WorkerGroup, lost: Collection[int]) -> list[int]:
    """Puts new processes, with engines that have no weights, in the place of lost replicas.

    Returns:
        Which, sorted.

    Raises:
        WorkerError: a new process failed.
    """
    replicas = sorted(lost)
    group.restart(replicas)
    group.submit_on(replicas, "init_model").result()
    return replicas
