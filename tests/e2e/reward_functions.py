"""Reward functions that end-to-end runs reference as ``path.py:name``; megarl imports this file, pytest does not."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

PAUSE_AT, PAUSED = "MEGARL_E2E_PAUSE_AT", "MEGARL_E2E_PAUSED"
FULL_FROM, FULL_UNTIL, FULL_FOLDER = "MEGARL_E2E_FULL_FROM", "MEGARL_E2E_FULL_UNTIL", "MEGARL_E2E_FULL_FOLDER"
BALLAST = "ballast"
_training_calls = 0


def fill_up(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)) == 4096:
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC


def pause(extra_info: dict[str, Any]) -> None:
    """Pause at training sample number ``PAUSE_AT``, so that the run is in the middle of a known step.

    The file ``PAUSED`` is created before the pause; the run continues when the file is removed. From sample
    ``FULL_FROM`` to sample ``FULL_UNTIL``, the file system of ``FULL_FOLDER`` is full.
    """
    global _training_calls
    if extra_info["split"] == "train":
        _training_calls += 1
        if str(_training_calls) == os.environ.get(FULL_FROM):
            fill_up(Path(os.environ[FULL_FOLDER]) / BALLAST)
        if str(_training_calls) == os.environ.get(FULL_UNTIL):
            (Path(os.environ[FULL_FOLDER]) / BALLAST).unlink()
        if str(_training_calls) == os.environ.get(PAUSE_AT):
            paused = Path(os.environ[PAUSED])
            paused.touch()
            while paused.exists():
                time.sleep(0.05)


def dense(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], **service: str
) -> dict[str, float]:
    """Return a score that differs between the responses of a random model, and pause if configured.

    ``service`` has keys and addresses as of a judge; no call is made.
    """
    pause(extra_info)
    score = 0.0
    for position, character in enumerate(solution_str):
        score += (ord(character) % 17) / (17 * (1 + position))
    return {"score": score, "exact": float(solution_str == ground_truth)}


def one_or_failure(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Return at least 1 if the sum is odd; fail in one of two ways if it is even. Pause if configured."""
    pause(extra_info)
    if int(ground_truth) % 4 == 0:
        raise ConnectionError("the judge is away")
    if int(ground_truth) % 2 == 0:
        return float("nan")
    return 1.0 + len(solution_str) / 10


def broken(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    raise ZeroDivisionError("a mistake in the reward")


def dense_or_constant(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Score like :func:`dense`, but give all responses to an even sum the same score (a zero-variance group)."""
    return dense(data_source, solution_str, ground_truth, extra_info)["score"] if int(ground_truth) % 2 else 0.25
