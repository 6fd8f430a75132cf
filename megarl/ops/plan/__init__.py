"""Planner: memory, FLOPs and relative cost of a job, computed from its configuration before it starts.

Reads the configuration and each model's ``config.json``. Starts no process, needs no GPU and imports no torch.
"""

from megarl.ops.plan.job import PlannedJob, PlannedPass, PlannedRole, PlannedRollout, planned_job
from megarl.ops.plan.memory import MemoryPlan, plan_memory

__all__ = [
    "MemoryPlan",
    "PlannedJob",
    "PlannedPass",
    "PlannedRole",
    "PlannedRollout",
    "plan_memory",
    "planned_job",
]
