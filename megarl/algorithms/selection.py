"""Selection of responses by score: dynamic sampling, best-of-n and PF-PPO; pure functions of scores and groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megarl.base.registry import Registry

WeightFunction = Callable[[np.ndarray, float], np.ndarray]
REWEIGHT_METHODS: Registry[WeightFunction] = Registry("algorithm.pf_ppo.reweight_method")
_MIN_WEIGHT = 1e-8  # the weights of a draw must not all be zero


def varied_groups(scores: np.ndarray, groups: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Select the rows of groups with different scores; drop zero-variance groups (dynamic sampling).

    The dynamic sampling of DAPO (Yu et al. 2025, arXiv:2503.14476, eq. 11), for scores of any kind.

    Args:
        scores: ``[b]``.
        groups: ``[b]``, equal for the responses to one prompt.
        counted: ``[b]`` bool, False for responses without a score. A group with one scored response has no variance.

    Returns:
        ``[b]`` bool, complete groups, including responses without a score.
    """
    _, group = np.unique(groups.astype(str), return_inverse=True)
    group = group.reshape(-1)
    lowest, highest = np.full(group.max(initial=-1) + 1, np.inf), np.full(group.max(initial=-1) + 1, -np.inf)
    np.minimum.at(lowest, group[counted], scores[counted])
    np.maximum.at(highest, group[counted], scores[counted])
    return (highest > lowest)[group]


def best_of_groups(scores: np.ndarray, groups: np.ndarray, counted: np.ndarray, keep: int) -> np.ndarray:
    """Select the best ``keep`` responses to each prompt (best-of-n), in the order of the batch.

    Args:
        counted: ``[b]`` bool, False for responses without a score; they rank last.
        keep: responses per prompt; no group has fewer.

    Returns:
        ``[prompts * keep]`` row numbers; the first of equal scores ranks higher.
    """
    kept = []
    for group in dict.fromkeys(groups.tolist()):
        rows = np.flatnonzero(groups == group)
        ranking = np.where(counted[rows], scores[rows], -np.inf)
        kept.append(np.sort(rows[np.argsort(-ranking, kind="stable")[:keep]]))
    return np.sort(np.concatenate(kept)) if kept else np.empty(0, dtype=np.int64)


REWEIGHT_METHODS.update(
    {
        "pow": lambda scores, power: np.abs(scores) ** power,
        "max_min": lambda scores, power: ((scores == scores.max()) | (scores == scores.min())).astype(float),
        "max_random": lambda scores, power: np.where(scores == scores.max(), 0.4, 0.1),
    }
)


def policy_filtration_rows(
    scores: np.ndarray, counted: np.ndarray, method: str, power: float, seed: Sequence[int]
) -> np.ndarray:
    """Resample the responses of a batch by their scores (policy filtration, PF-PPO).

    Draws as many rows as there are, with replacement, each with a probability proportional to its weight (Zhang et al.
    2024, arXiv:2409.06957). Weights by method: ``pow``: ``|s|^power``; ``max_min``: 1 for the best and the worst score,
    0 otherwise; ``max_random``: 0.4 for the best score, 0.1 otherwise.

    Args:
        counted: ``[b]`` bool, rows with trained tokens; the others are drawn only if no row has any.
    Returns:
        ``[b]`` row numbers.

    Raises:
        ConfigError: ``method`` is unknown.
    """
    rows = np.flatnonzero(counted) if counted.any() else np.arange(len(scores))
    weights = REWEIGHT_METHODS[method](scores[rows].astype(float), power) + _MIN_WEIGHT
    return np.random.default_rng(seed).choice(rows, len(scores), p=weights / weights.sum())
