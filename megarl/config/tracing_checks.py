"""What the sections of the timeline, the watchdog and the profilers must agree on."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megarl.config.jobs import JobConfig
from megarl.config.problems import Problem
from megarl.config.tracing import PHASES


def tracing_problems(config: JobConfig) -> Iterator[Problem]:
    """Problems of ``trainer.timeline`` and ``trainer.watchdog``."""
    if any(step < 0 for step in config.trainer.timeline.steps):
        yield Problem.at(config, "trainer.timeline.steps", "steps are counted from 0, the time before the first")
    for phase, seconds in config.trainer.watchdog.phases.items():
        if phase not in PHASES:
            text = f"there is no phase {phase!r}; there are {', '.join(PHASES)}"
            yield Problem.at(config, "trainer.watchdog.phases", text)
        elif seconds is not None and not (_is_number(seconds) and seconds > 0):
            text = f"{phase}: {seconds!r} must be seconds > 0, or null for no limit"
            yield Problem.at(config, "trainer.watchdog.phases", text)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
