"""Supervised fine-tuning with the same engine."""

from __future__ import annotations

from megarl.data import DataProto
from megarl.megatron import PackedMicroBatch, PolicyOutputs
from megarl.workers.base import MegatronWorker, TokenLosses
from megarl.workers.dispatch import Dispatch, WorkerPlace, verb
from megarl.workers.rows import SAMPLE_IDS, SEQUENCES
from megarl.workers.settings import RoleSettings, UpdatePlan


class SFTWorker(MegatronWorker):
    """Maximizes the likelihood of reference responses."""

    prefix = "train"
    shares_device = False

    def __init__(
        self,
        place: WorkerPlace,
        *,
        settings: RoleSettings,
        plan: UpdatePlan,
    ) -> None:
        super().__init__(place, settings=settings)
        self.plan = plan

    @verb(Dispatch.SPLIT, equal_rows=True, phase="update", columns=(*SEQUENCES, "response_mask", *SAMPLE_IDS))
    def update_sft(self, batch: DataProto) -> dict[str, float]:
        """Run one optimizer step on the batch's responses."""
        return self.update(batch, self.plan, [], negative_log_likelihood)


def negative_log_likelihood(outputs: PolicyOutputs, micro_batch: PackedMicroBatch) -> TokenLosses:
    """Compute ``-log p`` of each response token, packed ``[n]``; ``accuracy``: rows that greedy decoding reproduces."""
    return TokenLosses(-outputs.log_probs, {}, {}, {"accuracy": outputs.is_argmax})
