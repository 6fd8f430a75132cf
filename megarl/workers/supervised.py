"""Supervised training: on responses (SFT), and on preference pairs.

Both sequences of a pair are in one micro-batch, the chosen one first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor

from megarl.data import DataProto
from megarl.megatron import LossFunction, PackedMicroBatch, PolicyOutputs
from megarl.workers.base import MegatronWorker, TokenLosses
from megarl.workers.dispatch import Dispatch, WorkerPlace, verb
from megarl.workers.rows import SAMPLE_IDS, SEQUENCES, UPDATE, PackedRows
from megarl.workers.settings import MicroBatchBudget, RoleSettings, UpdatePlan

PAIRS = ("chosen", "rejected", "attention_mask")
"""Columns required to pack pairs."""


class SFTWorker(MegatronWorker):
    """Maximizes the likelihood of reference responses."""

    prefix = "train"
    shares_device = False

    def __init__(self, place: WorkerPlace, *, settings: RoleSettings, plan: UpdatePlan) -> None:
        super().__init__(place, settings=settings)
        self.plan = plan

    @verb(Dispatch.SPLIT, equal_rows=True, phase="update", columns=(*SEQUENCES, "response_mask", *SAMPLE_IDS))
    def update_sft(self, batch: DataProto) -> dict[str, float]:
        """Run one optimizer step on the batch's responses."""
        return self.update(batch, self.plan, [], negative_log_likelihood)


def negative_log_likelihood(outputs: PolicyOutputs, micro_batch: PackedMicroBatch) -> TokenLosses:
    """Compute ``-log p`` of each response token, packed ``[n]``; ``accuracy``: rows that greedy decoding reproduces."""
    return TokenLosses(-outputs.log_probs, {}, {}, {"accuracy": outputs.is_argmax})


class PairRows(PackedRows):
    """Rows that are pairs; a pair's tokens are those of both sequences.

    Args:
        batch: needs the columns of :data:`PAIRS`.
    """

    names: ClassVar[tuple[str, str]] = ("chosen", "rejected")

    def __init__(self, batch: DataProto, *, share: bool) -> None:
        super().__init__(batch)
        self.share = share

    def sequences(self, row: int) -> tuple[Tensor, Tensor]:
        """Return a pair's chosen and rejected token ids, without padding."""
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
