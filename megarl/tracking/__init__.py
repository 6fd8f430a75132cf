"""What a run tells: trackers, console, phase timers, the metrics file and the HTML report."""

from megarl.tracking import backends as _backends  # noqa: F401 -- registers the trackers
from megarl.tracking.console import Console
from megarl.tracking.metrics_file import MetricsFile, read_metrics
from megarl.tracking.phase_timer import PhaseTimer
from megarl.tracking.report import compare_runs, report_run
from megarl.tracking.step_table import PAIR_COLUMNS, RL_COLUMNS, SFT_COLUMNS, Column
from megarl.tracking.tracker import TRACKERS, RunInfo, Tracker, check_trackers, register_tracker
from megarl.tracking.trackers import Trackers, open_trackers
from megarl.tracking.validation_table import validation_table

__all__ = [
    "PAIR_COLUMNS",
    "RL_COLUMNS",
    "SFT_COLUMNS",
    "TRACKERS",
    "Column",
    "Console",
    "MetricsFile",
    "PhaseTimer",
    "RunInfo",
    "Tracker",
    "Trackers",
    "check_trackers",
    "compare_runs",
    "open_trackers",
    "read_metrics",
    "register_tracker",
    "report_run",
    "validation_table",
]
