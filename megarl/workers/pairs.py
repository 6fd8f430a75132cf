"""Training on preference pairs: both sequences of a pair are in one micro-batch, the chosen one first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor

from megarl.data import DataProto
from megarl.megatron import LossFunction
from megarl.megatron.layers.packed import PackedMicroBatch
from megarl.workers.base import MegatronWorker
from megarl.workers.dispatch import WorkerPlace
from megarl.workers.memory import UPDATE
from megarl.workers.rows import PackedRows
from megarl.workers.settings import MicroBatchBudget, RoleSettings

PAIRS = ("chosen", "rejected", "attention_mask")
"""Columns required to pack pairs."""


class PairRows(PackedRows):
    """Rows that are pairs; a pair's tokens are those of both sequences.

    Args:
        batch: needs the columns of :data:`PAIRS`.
        share: compute the common first tokens of a pair once.
    """

    names: ClassVar[tuple[str, str]] = ("chosen", "rejected")

    def __init__(self, batch: DataProto, *, share: bool) -> None:
        super().__init__(batch)
        self.share = share

    def sequences(self, row: int) -> tuple[Tensor, Tensor]:
        """Return the token ids of the chosen and of the rejected sequence of a pair, without padding."""
        first, second = (self.unpadded(name)[row] for name in self.names)
        return first, second


class PairTrainingWorker(MegatronWorker):
    """Base of the workers that train on preference pairs.

    Args:
        budget: micro-batch budget for pairs; tokens count both sequences.
    """

    prefix = "train"
    shares_device = False

    def __init__(self, place: WorkerPlace, *, settings: RoleSettings, budget: MicroBatchBudget) -> None:
        super().__init__(place, settings=settings)
        self.budget = budget

    def update_pairs(
        self,
        rows: PairRows,
        pack: Callable[[Sequence[int]], PackedMicroBatch],
        loss: LossFunction,
        sequences_per_row: int = 2,
    ) -> dict[str, float]:
        """Run one optimizer step on pairs; metrics under ``train/``.

        Args:
            sequences_per_row: sequences of a pair that ``pack`` packs.
        """

        def compute_gradient(groups: Sequence[Sequence[int]]) -> tuple[dict[str, float], Sequence[Sequence[int]]]:
            return self.engine.forward_backward([pack(group) for group in groups], loss), groups

        metrics, groups = self.memory.run_pass(UPDATE, self.budget, rows, compute_gradient)
        metrics |= self.step_metrics(self.engine.optimizer_step(), rows, groups, sequences_per_row)
        named = {f"{self.prefix}/{name}": value for name, value in metrics.items()}
        return named | self.memory.take_metrics() | self.end_phase()
