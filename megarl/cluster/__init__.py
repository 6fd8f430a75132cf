"""Processes: resource pools, worker groups, and how a call reaches all ranks of a role and comes back.

The one room that knows Ray. It reads the marks that workers put on their verbs and knows nothing of what a verb does.
Names load on first use: a worker process needs :mod:`megarl.cluster.worker_process` only, and must be able to set its
environment before anything imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.cluster.failures import WorkerFailed, WorkerSilent
    from megarl.cluster.resources import PlacedPool, ResourcePool, check_resources, place_pools
    from megarl.cluster.session import RaySession
    from megarl.cluster.split import plan_split, rank_loads, row_costs, seqlen_metrics
    from megarl.cluster.worker_group import Pending, PerRank, Scattered, WorkerGroup, wait_all, wait_ready

_HOME = {
    "Pending": "worker_group",
    "PerRank": "worker_group",
    "PlacedPool": "resources",
    "RaySession": "session",
    "ResourcePool": "resources",
    "Scattered": "worker_group",
    "WorkerFailed": "failures",
    "WorkerSilent": "failures",
    "WorkerGroup": "worker_group",
    "check_resources": "resources",
    "place_pools": "resources",
    "plan_split": "split",
    "rank_loads": "split",
    "row_costs": "split",
    "seqlen_metrics": "split",
    "wait_all": "worker_group",
    "wait_ready": "worker_group",
}

__all__ = [
    "Pending",
    "PerRank",
    "PlacedPool",
    "RaySession",
    "ResourcePool",
    "Scattered",
    "WorkerFailed",
    "WorkerGroup",
    "WorkerSilent",
    "check_resources",
    "place_pools",
    "plan_split",
    "rank_loads",
    "row_costs",
    "seqlen_metrics",
    "wait_all",
    "wait_ready",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
