"""Staleness of a batch: weight versions between sampling and training, by token and by trajectory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megarl.agents.types import Trajectory
from megarl.base.reductions import Largest, Metrics, Total
from megarl.rollout.interface import NO_VERSION


def staleness_metrics(trajectories: Sequence[Trajectory], version: int, admission: Sequence[int]) -> Metrics:
    """Compute the staleness metrics of a batch, under verl's names where they exist.

    - ``training/off_policy/token_staleness/{mean,max}``: over generated tokens.
    - ``training/off_policy/trajectory_staleness``: of the oldest token, mean over trajectories;
      ``training/off_policy/trajectory_staleness_worst``: the largest.
    - ``training/off_policy/admission_staleness``: of groups since their admission, mean.
    - ``fully_async/partial/{total_partial_num,partial_ratio,max_partial_span}``: trajectories with several weight
      versions, their share, and the largest difference within one.
    - ``fully_async/count/current_param_version``.

    Args:
        trajectories: of the batch; failed ones and those without a version are left out.
        version: weight version that trains them.
        admission: weight versions since the admission of each group.
    """
    metrics = {
        "fully_async/count/current_param_version": float(version),
        "training/off_policy/admission_staleness": float(np.mean(admission)),
    }
    rows = [versions for trajectory in trajectories if len(versions := token_versions(trajectory))]
    if not rows:
        return metrics
    stale = version - np.concatenate(rows)
    oldest = np.array([row.min() for row in rows])
    spans = np.array([row.max() for row in rows]) - oldest
    partial = int((spans > 0).sum())
    return metrics | {
        "training/off_policy/token_staleness/mean": float(stale.mean()),
        "training/off_policy/token_staleness/max": Largest(stale.max()),
        "training/off_policy/trajectory_staleness": float((version - oldest).mean()),
        "training/off_policy/trajectory_staleness_worst": Largest((version - oldest).max()),
        "fully_async/partial/total_partial_num": Total(partial),
        "fully_async/partial/partial_ratio": partial / len(trajectories),
        "fully_async/partial/max_partial_span": Largest(spans.max()),
    }


def token_versions(trajectory: Trajectory) -> np.ndarray:
    """Return the weight version of each generated token, ``[t]``; empty if the trajectory failed or has none."""
    mask = np.asarray(trajectory.generated_mask, bool)
    if trajectory.error is not None or trajectory.weight_version == NO_VERSION:
        return np.empty(0, np.int64)
    if len(trajectory.weight_versions):
        versions: np.ndarray = np.asarray(trajectory.weight_versions, np.int64)[mask]
        sampled_by: np.ndarray = versions[versions != NO_VERSION]
        return sampled_by
    return np.full(int(mask.sum()), trajectory.weight_version, np.int64)
