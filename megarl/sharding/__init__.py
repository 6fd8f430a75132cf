"""Weight sync: a pure reshard plan, transports, and the manager that runs the plan.

Tensors move in :mod:`sender`, :mod:`receiver` and :mod:`transports`; what is exported here needs no torch.
"""

from megarl.sharding.coverage import check_coverage
from megarl.sharding.manager import Pending, ShardingManager, SyncOptions, SyncSource, SyncTarget
from megarl.sharding.parts import PlanPart, receiver_parts, replica_parts, sender_parts
from megarl.sharding.placement import Placement, RolloutLayout, Slot
from megarl.sharding.places import ProcessPlace, Routes
from megarl.sharding.plan import Bucket, Move, ReshardPlan, build_plan

__all__ = [
    "Bucket",
    "Move",
    "Pending",
    "Placement",
    "PlanPart",
    "ProcessPlace",
    "ReshardPlan",
    "RolloutLayout",
    "Routes",
    "ShardingManager",
    "Slot",
    "SyncOptions",
    "SyncSource",
    "SyncTarget",
    "build_plan",
    "check_coverage",
    "receiver_parts",
    "replica_parts",
    "sender_parts",
]
