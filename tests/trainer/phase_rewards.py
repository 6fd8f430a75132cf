"""Reward functions that tests of the phases reference by ``path.py:name``."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Any

CALLS = "MEGARL_TEST_REWARD_CALLS"
"""Environment variable: folder in which :func:`counted` leaves a file per call."""


def length_and_index(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, float]:
    """Return a number that depends on every argument."""
    return {"score": len(solution_str) + extra_info["index"] / 7, "truth": float(ground_truth)}


def odd_length(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Fail for responses of even length."""
    if len(solution_str) % 2 == 0:
        raise ValueError("even")
    return 1.0


def hanging(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    time.sleep(1000)
    return 0.0


def counted(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    Path(os.environ[CALLS], uuid.uuid4().hex).touch()
    return float(len(solution_str))
