"""Processes: resource pools, worker groups, and dispatch of a call to all ranks of a role.

The only room that imports Ray. It reads the dispatch marks on worker verbs and knows nothing of role logic.
Names load on first use: a worker process imports :mod:`megarl.cluster.worker_process` only, and must set its
environment before anything imports torch.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.cluster.calls import PendingCall, PerRank, ScatteredCall, WorkerFailed, WorkerSilent, wait_all
    from megarl.cluster.partition import seqlen_metrics
    from megarl.cluster.resources import PlacedPool, ResourcePool, check_resources, place_pools
    from megarl.cluster.session import RaySession
    from megarl.cluster.worker_group import WorkerGroup, wait_ready

if "ray" not in sys.modules:
    # Ray's library ends this process when the named one is gone; it reads the variable when it is imported. Without
    # it, a driver whose parent is process 1, as in a container, takes the raylet for its parent: when the raylet dies,
    # Ray ends the driver at once and without a word.
    os.environ.setdefault("RAY_RAYLET_PID", str(os.getpid()))

_MODULE_OF = {
    "PendingCall": "calls",
    "PerRank": "calls",
    "PlacedPool": "resources",
    "RaySession": "session",
    "ResourcePool": "resources",
    "ScatteredCall": "calls",
    "WorkerFailed": "calls",
    "WorkerSilent": "calls",
    "WorkerGroup": "worker_group",
    "check_resources": "resources",
    "place_pools": "resources",
    "seqlen_metrics": "partition",
    "wait_all": "calls",
    "wait_ready": "worker_group",
}

__all__ = [
    "PendingCall",
    "PerRank",
    "PlacedPool",
    "RaySession",
    "ResourcePool",
    "ScatteredCall",
    "WorkerFailed",
    "WorkerGroup",
    "WorkerSilent",
    "check_resources",
    "place_pools",
    "seqlen_metrics",
    "wait_all",
    "wait_ready",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
