"""A reward function of one's own: verl's signature, a number or a mapping with ``score``; extra numbers become metrics.

python -m megarl.train --config-name quickstart custom_reward_function.path=examples/reward.py
"""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, float | str]:
    """1 for the exact answer; ``digits`` tells how many of its digits are in their place, which is only reported.

    ``pred`` is the answer that was read, by which validation counts majorities (maj@k).
    """
    answer = solution_str.strip()
    right = sum(a == b for a, b in zip(answer[::-1], ground_truth[::-1], strict=False))
    return {"score": float(answer == ground_truth), "digits": right / len(ground_truth), "pred": answer}
