"""The critic: the value function."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from megarl.algorithms import clipped_value_loss
from megarl.config import CriticConfig
from megarl.data import DataProto
from megarl.megatron import PackedMicroBatch, ValueOutputs
from megarl.workers.base import MegatronWorker, TokenLosses, offload_after
from megarl.workers.dispatch import Dispatch, WorkerPlace, verb
from megarl.workers.rows import SAMPLE_IDS, SEQUENCES
from megarl.workers.settings import RoleSettings, UpdatePlan


class CriticWorker(MegatronWorker):
    """Computes and trains values: a language model with a scalar head as output layer.

    Args:
        plan: mini-batches and epochs of an update; :meth:`compute_values` uses its budget too.
    """

    prefix = "critic"
    value_head = True

    def __init__(self, place: WorkerPlace, *, settings: RoleSettings, config: CriticConfig, plan: UpdatePlan) -> None:
        super().__init__(place, settings=settings)
        self.config = config
        self.plan = plan

    @verb(Dispatch.SPLIT, phase="values", columns=SEQUENCES)
    @offload_after
    def compute_values(self, batch: DataProto) -> DataProto | None:
        """Compute ``values`` of the state before each response token, ``[b, R]``; None on non-owner ranks."""
        rows = self.packed_rows(batch, self.plan.budget)

        def read(groups: Sequence[Sequence[int]], outputs: Sequence[ValueOutputs]) -> DataProto:
            return batch.token_columns({"values": rows.unpack(groups, [output.values for output in outputs])})

        return self.forward_pass(rows, self.plan.budget, read)

    @verb(
        Dispatch.SPLIT,
        mini_batches="critic_mini_batch_rows",
        phase="update_critic",
        columns=(*SEQUENCES, "response_mask", "values", "returns", *SAMPLE_IDS),
    )
    def update_critic(self, batch: DataProto) -> dict[str, float]:
        """Train the values on the returns, clipped around the old values."""
        return self.update(batch, self.plan, ["values", "returns"], partial(value_loss, self.config))


def value_loss(config: CriticConfig, outputs: ValueOutputs, micro_batch: PackedMicroBatch) -> TokenLosses:
    """Compute the clipped value loss per token and its metrics; all tensors are packed ``[n]``.

    The minimized loss is ``vf_coef`` times ``vf_loss``.
    """
    columns = micro_batch.columns
    token_loss = clipped_value_loss(outputs.values, columns["values"], columns["returns"], config.cliprange_value)
    return TokenLosses(config.vf_coef * token_loss.loss, {"vf_loss": token_loss.loss}, token_loss.diagnostics)
