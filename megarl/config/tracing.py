"""What is recorded of a run's processes: the timeline."""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

from dataclasses import dataclass

from megarl.config.keys import key


@dataclass
class TimelineConfig:
    """Every phase on every process, for https://ui.perfetto.dev."""

    enable: bool = key(False, "Write `timeline/trace.json` to the run's folder; see docs/tracing.md.")
    steps: list[int] = key([], "Steps to record, 0 being the start and the validation before training; [] = all.")
