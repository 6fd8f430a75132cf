"""What a run will take before it is started: bytes, operations and seconds, from its configuration alone.

Reads models' ``config.json`` and the configuration; starts no process, needs no GPU and imports no torch.
"""

from megarl.plan.job import PlannedJob, PlannedPass, PlannedRole, PlannedRollout, planned_job
from megarl.plan.memory import MemoryPlan, plan_memory

__all__ = [
    "MemoryPlan",
    "PlannedJob",
    "PlannedPass",
    "PlannedRole",
    "PlannedRollout",
    "plan_memory",
    "planned_job",
]
