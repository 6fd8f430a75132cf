"""Weight sync: the reshard plan, and both ends of the transports that execute it.

Tensors are moved in :mod:`sender`, :mod:`receiver` and :mod:`transports`. The exports of this package need no torch.
"""

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
    "Placement",
    "ProcessLocation",
    "RankPlan",
    "ReshardPlan",
    "RolloutLayout",
    "Routes",
    "Slot",
    "SyncWave",
    "TransferOp",
    "build_plan",
    "check_coverage",
    "receiver_plans",
    "replica_plans",
    "sender_plans",
]
