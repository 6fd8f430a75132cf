"""Reward function that kills its driver once, while the second step is scored; a file records the kill."""

import os
import signal
from pathlib import Path

ROWS = 48
_calls = 0


def score(data_source, solution_str, ground_truth, extra_info):
    global _calls
    _calls += 1
    died = Path(os.environ["MEGARL_DIED"])
    if _calls > ROWS and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return float(len(solution_str))
