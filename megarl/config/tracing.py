"""What is recorded of a run's processes: the timeline, the watchdog, profilers."""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.config.keys import key

PHASES = (
    *("start_workers", "step", "gen", "reward", "old_log_prob", "ref", "repr_align", "values", "adv"),
    *("update_critic", "update_actor", "update_weights", "update", "testing", "save_checkpoint"),
)
"""Phases of a run that can have a limit; ``step`` is what is between a step's others."""


@dataclass
class TimelineConfig:
    """Every phase on every process, for https://ui.perfetto.dev."""

    enable: bool = key(False, "Write `timeline/trace.json` to the run's folder; see docs/tracing.md.")
    steps: list[int] = key([], "Steps to record, 0 being the start and the validation before training; [] = all.")


@dataclass
class WatchdogConfig:
    """What happens when a phase does not end."""

    timeout_s: float | None = key(
        540.0,
        "Seconds that a phase may take before it is told who waits for whom; null = as long as it takes. The default "
        "is just below the 600 s after which collectives fail by themselves.",
        above=0,
    )
    phases: dict[str, Any] = key(
        {}, "Seconds by phase, such as `{gen: 3600}`, in place of `timeout_s`; null = no limit."
    )
    action: str = key(
        "tell",
        "Tell and go on, with twice the limit for that phase from then on, or end the run with its processes.",
        choices=("tell", "end"),
    )
