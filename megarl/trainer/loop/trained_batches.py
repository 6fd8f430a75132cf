"""The batches of a step, joined for its metrics and recorders."""

from __future__ import annotations

from megarl.base.reductions import combine_metrics
from megarl.data import DataProto
from megarl.trainer.metrics.step_metrics import GENERATED_TOKENS, Metrics
from megarl.trainer.rollout_service.selection import join


class TrainedBatches:
    """Joins the batches of a step and their metrics."""

    def __init__(self) -> None:
        self._batches: list[DataProto] = []
        self._trained: list[DataProto] = []
        self._metrics: list[tuple[Metrics, int]] = []

    def add(self, batch: DataProto, trained: DataProto, metrics: Metrics) -> None:
        """Add a scored batch, and the rows of its updates: PF-PPO draws other rows of the batch."""
        self._batches.append(batch)
        self._trained.append(trained)
        self._metrics.append((metrics, len(batch)))

    def joined(self) -> tuple[DataProto, DataProto, Metrics]:
        """Return the scored rows and the trained rows of the step, and its metrics; see :func:`combine_metrics`."""
        tokens = sum(batch.meta_info[GENERATED_TOKENS] for batch in self._batches)
        for batch in (*self._batches, *self._trained):
            batch.meta_info[GENERATED_TOKENS] = tokens
        return join(self._batches), join(self._trained), combine_metrics(self._metrics)
