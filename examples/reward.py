"""A custom reward function with verl's signature; it returns a number, or a mapping with ``score`` and extra fields.

megarl train --config-name quickstart reward.custom_reward_function.path=examples/reward.py
"""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, float | str]:
    """Score 1 for the exact answer.

    ``digits`` is the share of right digits, reported as a metric. ``pred`` is the parsed answer, used by validation for
    majority votes (maj@k).
    """
    answer = solution_str.strip()
    right = sum(a == b for a, b in zip(answer[::-1], ground_truth[::-1], strict=False))
    return {"score": float(answer == ground_truth), "digits": right / len(ground_truth), "pred": answer}
