"""Records of a run: trackers, console, phase timers, metrics file and sample files."""

from megarl.tracking.console import Console
from megarl.tracking.console_tables import PAIR_COLUMNS, RL_COLUMNS, SFT_COLUMNS, MetricColumn, validation_table
from megarl.tracking.jsonl_files import MetricsFile, read_metrics
from megarl.tracking.phase_timer import PhaseTimer
from megarl.tracking.tracker import TRACKERS, RunInfo, Tracker, check_trackers, register_tracker
from megarl.tracking.trackers import Trackers, open_trackers

__all__ = [
    "PAIR_COLUMNS",
    "RL_COLUMNS",
    "SFT_COLUMNS",
    "TRACKERS",
    "Console",
    "MetricColumn",
    "MetricsFile",
    "PhaseTimer",
    "RunInfo",
    "Tracker",
    "Trackers",
    "check_trackers",
    "open_trackers",
    "read_metrics",
    "register_tracker",
    "validation_table",
]
