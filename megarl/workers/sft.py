"""Supervised fine-tuning through the same engine."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megarl.data import DataProto
from megarl.megatron import PolicyOutputs
from megarl.workers.base import MegatronWorker, TokenLosses
from megarl.workers.dispatch import Dispatch, verb
from megarl.workers.rows import SEQUENCES
from megarl.workers.settings import RoleSettings, UpdatePlan


class SFTWorker(MegatronWorker):
    """Maximises the likelihood of given responses.

    Args:
        settings: model, layout, optimizer.
        plan: rows and micro-batches of an optimizer step.
    """

    prefix = "train"

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        master_addr: str,
        master_port: int,
        settings: RoleSettings,
        plan: UpdatePlan,
    ) -> None:
        super().__init__(
            rank=rank, world_size=world_size, master_addr=master_addr, master_port=master_port, settings=settings
        )
        self.plan = plan

    @verb(Dispatch.SPLIT, mini_batches="sft_mini_batch_rows", phase="update", columns=(*SEQUENCES, "response_mask"))
    def update_sft(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on the batch's responses."""
        return self.update(batch, self.plan, [], negative_log_likelihood)


def negative_log_likelihood(outputs: PolicyOutputs, columns: Mapping[str, Tensor]) -> TokenLosses:
    """``-log p`` of each response token, packed ``[n]``."""
    return TokenLosses(-outputs.log_probs, {}, {})
