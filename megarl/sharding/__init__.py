"""Weight sync: the reshard plan, the transports, and the manager that executes the plan.

Tensors are moved in :mod:`sender`, :mod:`receiver` and :mod:`transports`. The exports of this package need no torch.
"""

from megarl.sharding.manager import (
    PausedRequests,
    PendingResult,
    ShardingManager,
    SyncOptions,
    SyncSource,
    SyncTarget,
)
from megarl.sharding.placement import Placement, ProcessLocation, RolloutLayout, Routes, Slot
from megarl.sharding.plan import (
    Bucket,
    RankPlan,
    ReshardPlan,
    SyncWave,
    TransferOp,
    build_plan,
    receiver_plans,
    replica_plans,
    sender_plans,
)
from megarl.sharding.verification import check_coverage

__all__ = [
    "Bucket",
    "PausedRequests",
    "PendingResult",
    "Placement",
    "ProcessLocation",
    "RankPlan",
    "ReshardPlan",
    "RolloutLayout",
    "Routes",
    "ShardingManager",
    "Slot",
    "SyncOptions",
    "SyncSource",
    "SyncTarget",
    "SyncWave",
    "TransferOp",
    "build_plan",
    "check_coverage",
    "receiver_plans",
    "replica_plans",
    "sender_plans",
]
