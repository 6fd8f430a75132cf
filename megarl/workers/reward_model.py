"""Reward models: one worker scores a policy's responses, the other trains on preference pairs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megarl.algorithms import bradley_terry_loss
from megarl.data import DataProto
from megarl.megatron import ValueOutputs
from megarl.megatron.layers.packed import PackedMicroBatch
from megarl.models import ModelConfig, read_model_config
from megarl.workers.base import MegatronWorker, offload_after
from megarl.workers.dispatch import Dispatch, WorkerPlace, verb
from megarl.workers.rows import FORWARD, SAMPLE_IDS, SEQUENCES, pack_whole
from megarl.workers.settings import MicroBatchBudget, RoleSettings
from megarl.workers.supervised import PAIRS, PairRows, PairTrainingWorker

MARGINS = "margins"
SHARE = "share"
"""Column of a micro-batch: a pair's weight in the mean over all pairs. Both sequences of a pair have the same."""


class RewardModelWorker(MegatronWorker):
    """Scores whole sequences at their last token, like transformers' sequence classification models."""

    prefix = "reward_model"
    value_head = True

    def __init__(self, place: WorkerPlace, *, settings: RoleSettings, budget: MicroBatchBudget) -> None:
        super().__init__(place, settings=settings)
        self.budget = budget

    @verb(Dispatch.SPLIT, phase="reward", columns=SEQUENCES)
    @offload_after
    def compute_rm_score(self, batch: DataProto) -> DataProto | None:
        """Compute ``rm_scores`` of the rows, prompt and response, ``[b]``; None on non-owner ranks."""
        rows, pad = self.packed_rows(batch, self.budget), self.engine.model.pad_token_id

        def read(groups: Sequence[Sequence[int]], outputs: Sequence[ValueOutputs]) -> DataProto:
            return DataProto.from_dict({"rm_scores": rows.per_row(groups, [output.values for output in outputs])})

        return self.forward_pass(rows, self.budget, read, lambda group: rows.pack_whole(group, pad))


class _RewardPairs(PairRows):
    """Pairs with one output per sequence.

    Args:
        pad: the model's padding token, None if it has none.
    """

    def __init__(self, batch: DataProto, pad: int | None, *, share: bool) -> None:
        super().__init__(batch, share=share)
        self.pad = pad

    def pack_pairs(self, rows: Sequence[int], total: int) -> PackedMicroBatch:
        """Pack some pairs out of ``total`` into one micro-batch, with one output per sequence."""
        parts = [(ids[:1], ids[1:]) for row in rows for ids in self.sequences(row)]
        columns = {SHARE: torch.full((len(parts),), 1.0 / total)}
        if MARGINS in self.batch.tensors:
            columns[MARGINS] = self.batch.tensors[MARGINS][torch.tensor(rows)].repeat_interleave(2)
        return pack_whole(parts, self.pad, columns, share_prompts=self.share)


class RewardTrainingWorker(PairTrainingWorker):
    """Trains a reward model on preference pairs; starts from a language model or from a reward model.

    Args:
        budget: micro-batch budget for pairs; tokens count both sequences.
        center_coefficient: weight of the term that keeps rewards around zero.
        pad_token_id: of the tokenizer; becomes the model's if its config has none.
    """

    value_head = True

    def __init__(
        self,
        place: WorkerPlace,
        *,
        settings: RoleSettings,
        budget: MicroBatchBudget,
        center_coefficient: float,
        pad_token_id: int | None,
    ) -> None:
        super().__init__(place, settings=settings, budget=budget)
        self.center_coefficient = center_coefficient
        self.pad_token_id = pad_token_id

    def model_config(self) -> ModelConfig:
        """Return the configuration of the initial weights, with a scalar head."""
        return read_model_config(self.settings.model_path).as_reward_model(self.pad_token_id)

    @verb(Dispatch.SPLIT, equal_rows=True, phase="update", columns=(*PAIRS, MARGINS, *SAMPLE_IDS))
    def update_reward_model(self, batch: DataProto) -> dict[str, float]:
        """Run one optimizer step on the batch's pairs; metrics under ``train/`` are means over all pairs."""
        rows = self._pairs(batch)
        total = sum(self.counts_over_dp(len(rows)))
        return self.update_pairs(
            rows, lambda group: rows.pack_pairs(group, total), partial(pair_loss, self.center_coefficient)
        )

    @verb(Dispatch.SPLIT, phase="testing", columns=PAIRS)
    @offload_after
    def score_pairs(self, batch: DataProto) -> DataProto | None:
        """Compute ``chosen_rewards`` and ``rejected_rewards`` of the pairs, ``[b]``; None on non-owner ranks."""
        rows = self._pairs(batch)

        def compute(groups: Sequence[Sequence[int]]) -> DataProto | None:
            outputs = self.engine.forward([rows.pack_pairs(group, len(rows)) for group in groups])
            if outputs is None:
                return None
            halves = {"chosen_rewards": 0, "rejected_rewards": 1}
            return DataProto.from_dict(
                {name: rows.per_row(groups, [o.values[half::2] for o in outputs]) for name, half in halves.items()}
            )

        return self.memory.run_pass(FORWARD, self.budget, rows, compute)

    def _pairs(self, batch: DataProto) -> _RewardPairs:
        return _RewardPairs(batch, self.engine.model.pad_token_id, share=self.engine.can_share_prompts)


def pair_loss(
    center_coefficient: float, outputs: ValueOutputs, micro_batch: PackedMicroBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute a micro-batch's share of the mean loss over all pairs, and of the means of its metrics."""
    chosen, rejected = outputs.values[0::2], outputs.values[1::2]
    columns = {name: column[0::2] for name, column in micro_batch.columns.items()}
    result = bradley_terry_loss(chosen, rejected, columns.get(MARGINS), center_coefficient)
    total = (result.loss * columns[SHARE]).sum()
    metrics = {name: (value * columns[SHARE]).sum() for name, value in result.diagnostics.items()}
    return total, {"loss": total.detach(), **metrics}
