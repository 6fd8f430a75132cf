"""User module that slows the embedded engine down, so that responses are in flight at weight syncs on any machine."""

from __future__ import annotations

import time
from typing import Any

from megarl.rollout.embedded.generation import ContinuousBatcher

STEP_S = 0.005
advance = ContinuousBatcher.advance


def slow_step(batcher: ContinuousBatcher) -> Any:
    """Decode one step, not before some milliseconds have passed."""
    time.sleep(STEP_S)
    return advance(batcher)


ContinuousBatcher.advance = slow_step
