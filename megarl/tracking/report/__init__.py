"""The report of a run: one self-contained HTML page with curves, rollouts and the config."""

from megarl.tracking.report.page import write_report
from megarl.tracking.report.rollouts import RolloutSample, read_rollouts

__all__ = ["RolloutSample", "read_rollouts", "write_report"]
