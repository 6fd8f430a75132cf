"""Hybrid rollout replicas: the trainer's devices generate while a disaggregated trainer waits for samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

COSTS_REMEMBERED = 3


class HybridReplicas:
    """Replicas on the trainer's devices, and whether they are worth it; see ``async_training.hybrid_rollout``.

    They serve from a weight sync until the first mini-batch of the interval is complete. All replicas count as equally
    fast: with ``h`` hybrid ones besides ``n`` others the trainer waits ``n / (n + h)`` as long. The hybrid ones are
    used if that saves more time than the last switches took; while they are not used, the wait is measured again.

    Args:
        ranks: their ranks in the rollout group.
        others: number of the other replicas.

    Attributes:
        ranks: their ranks.
        in_use: whether weight syncs include them.
        serve: whether they have their weights and take requests.
    """

    def __init__(self, ranks: Sequence[int], others: int) -> None:
        self.ranks, self._others = list(ranks), others
        self.in_use, self.serve = True, False
        self._costs: deque[float] = deque(maxlen=COSTS_REMEMBERED)

    def note_switch(self, seconds: float) -> None:
        """Record the time of one switch from generation to training."""
        self._costs.append(seconds)

    def decide(self, waited_s: float) -> bool:
        """Decide about the next interval; return whether the decision has changed.

        Args:
            waited_s: wait of the trainer in the last interval, in seconds.
        """
        if not self._costs:
            return False
        hybrid, others = len(self.ranks), self._others
        saved_s = waited_s * hybrid / (others if self.in_use else others + hybrid)
        before, self.in_use = self.in_use, saved_s > sum(self._costs) / len(self._costs)
        return self.in_use != before
