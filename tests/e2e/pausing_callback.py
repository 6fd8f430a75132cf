"""A callback that pauses a run after its first step, until a test has inspected the run's processes."""

from __future__ import annotations

import time
from pathlib import Path

from megarl.trainer.callbacks import Callback, TrainerView

PAUSED, INSPECTED = "paused", "inspected"
"""Files in the working folder: of the run, and of the test."""
LONGEST_S = 300.0


class PauseAfterStep(Callback):
    """Waits for the file :data:`INSPECTED`; the limit ends the wait for a test that has failed."""

    def on_step_end(self, view: TrainerView) -> None:
        """Pause, unless the test has inspected the run."""
        Path(PAUSED).touch()
        deadline = time.monotonic() + LONGEST_S
        while not Path(INSPECTED).exists() and time.monotonic() < deadline:
            time.sleep(0.1)
