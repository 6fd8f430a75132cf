"""Reward functions that tests of the phases reference by ``path.py:name``."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

CALLS = "MEGARL_TEST_REWARD_CALLS"
"""Environment variable: folder in which :func:`counted` leaves a file per call, and :func:`dies_once` one."""


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


def dies_once(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """End the process of the first call."""
    try:
        Path(os.environ[CALLS], "died").touch(exist_ok=False)
    except FileExistsError:
        return 1.0
    os._exit(1)


def whole_batch(
    data_sources: list[str], solution_strs: list[str], ground_truths: list[str], extra_infos: list[dict[str, Any]]
) -> list[float]:
    return [float(len(text)) for text in solution_strs]


def counted(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    Path(os.environ[CALLS], uuid.uuid4().hex).touch()
    return float(len(solution_str))
