"""Reward models: one that scores a policy's answers, and one that learns from pairs of answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megarl.algorithms import bradley_terry_loss
from megarl.data import DataProto
from megarl.megatron import ValueOutputs
from megarl.megatron.packed import PackedMicroBatch
from megarl.models import ModelConfig, read_model_config
from megarl.workers.base import MegatronWorker, ends_phase
from megarl.workers.dispatch import Dispatch, verb
from megarl.workers.place import WorkerPlace
from megarl.workers.rows import SAMPLE_IDS, SEQUENCES, PackedRows, pack_whole
from megarl.workers.settings import MicroBatchBudget, RoleSettings

PAIRS = ("chosen", "rejected", "attention_mask")
"""Columns without which pairs cannot be packed."""
MARGINS = "margins"
SHARE = "share"
"""Column of a micro-batch: what one pair adds to a mean over all pairs. Both sequences of a pair have the same."""


class RewardModelWorker(MegatronWorker):
    """Scores whole sequences, each at its last token, as transformers' models of sequence classification do.

    Args:
        place: of this process in the role.
        settings: model and layout; without optimizer.
        budget: how rows are cut into micro-batches.
    """

    prefix = "reward_model"
    value_head = True

    def __init__(self, place: WorkerPlace, *, settings: RoleSettings, budget: MicroBatchBudget) -> None:
        super().__init__(place, settings=settings)
        self.budget = budget

    @verb(Dispatch.SPLIT, phase="reward", columns=SEQUENCES)
    @ends_phase
    def compute_rm_score(self, batch: DataProto) -> DataProto | None:
        """``rm_scores`` of the rows, prompt and response, ``[b]``; None where this rank owns no result."""
        rows = self.packed_rows(batch, self.budget)
        groups = rows.micro_batches(self.budget, agree=self.counts_over_dp)
        pad = self.engine.model.pad_token_id
        outputs = self.engine.forward([rows.pack_whole(group, pad) for group in groups])
        if outputs is None:
            return None
        return DataProto.from_dict({"rm_scores": rows.in_order(groups, [output.values for output in outputs])})


class PairRows(PackedRows):
    """Rows that are pairs: both sequences of one are packed into the same micro-batch, the chosen one first.

    Args:
        batch: needs the columns of :data:`PAIRS`; a pair's tokens are those of both.
        pad: the model's padding token, None if it has none.
        share: compute the tokens that both sequences of a pair begin with once.
    """

    def __init__(self, batch: DataProto, pad: int | None, *, share: bool) -> None:
        super().__init__(batch)
        self.pad = pad
        self.share = share

    def pack_pairs(self, rows: Sequence[int], total: int) -> PackedMicroBatch:
        """One micro-batch of the given pairs out of ``total``, with an output for each of the sequences."""
        chosen, rejected = self.batch.tensors["chosen"], self.batch.tensors["rejected"]
        parts = []
        for row in rows:
            start, stop = chosen.shape[1] - self.prompt_lengths[row], self.response_lengths[row]
            pair = chosen[row, start:], rejected[row, :stop]
            common = _common_beginning(*pair) if self.share else 1
            parts += [(ids[:common], ids[common:]) for ids in pair]
        columns = {SHARE: torch.full((len(parts),), 1.0 / total)}
        if MARGINS in self.batch.tensors:
            columns[MARGINS] = self.batch.tensors[MARGINS][torch.tensor(rows)].repeat_interleave(2)
        return pack_whole(parts, self.pad, columns, share_prompts=self.share)


def _common_beginning(one: Tensor, other: Tensor) -> int:
    """How many tokens two sequences begin with alike; at least 1, since each token is computed in its own context.

    Sequences that differ in their first token share nothing: the packing tells them apart.
    """
    shorter = min(len(one), len(other))
    differ = (one[:shorter] != other[:shorter]).nonzero().flatten()
    return max(1, int(differ[0]) if len(differ) else shorter)


class RewardTrainingWorker(MegatronWorker):
    """Learns rewards from pairs of answers; starts from a language model, or from a reward model.

    Args:
        place: of this process in the role.
        settings: model, layout, optimizer.
        budget: how pairs are cut into micro-batches; tokens count both sequences.
        center_coefficient: weight of the term that keeps rewards around zero.
        pad_token_id: of the tokenizer; becomes the model's where its config names none.
    """

    prefix = "train"
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
        super().__init__(place, settings=settings)
        self.budget = budget
        self.center_coefficient = center_coefficient
        self.pad_token_id = pad_token_id

    def model_config(self) -> ModelConfig:
        """That of the initial weights, with a scalar head."""
        return read_model_config(self.settings.model_path).as_reward_model(self.pad_token_id)

    @verb(Dispatch.SPLIT, equal_rows=True, phase="update", columns=(*PAIRS, MARGINS, *SAMPLE_IDS))
    def update_reward_model(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step on the batch's pairs; metrics under ``train/``, means over all of them."""
        rows, groups = self._cut(batch)
        total = sum(self.counts_over_dp(len(rows)))
        micro_batches = [rows.pack_pairs(group, total) for group in groups]
        metrics = self.engine.forward_backward(micro_batches, partial(pair_loss, self.center_coefficient))
        metrics |= self.step_optimizer(lambda number, row: rows.describe(groups[number][row // 2]))
        return {f"{self.prefix}/{name}": value for name, value in metrics.items()} | self.end_phase()

    @verb(Dispatch.SPLIT, phase="testing", columns=PAIRS)
    @ends_phase
    def score_pairs(self, batch: DataProto) -> DataProto | None:
        """``chosen_rewards`` and ``rejected_rewards`` of the pairs, ``[b]``; None where this rank owns no result."""
        rows, groups = self._cut(batch)
        outputs = self.engine.forward([rows.pack_pairs(group, len(rows)) for group in groups])
        if outputs is None:
            return None
        halves = {"chosen_rewards": 0, "rejected_rewards": 1}
        return DataProto.from_dict(
            {name: rows.in_order(groups, [o.values[half::2] for o in outputs]) for name, half in halves.items()}
        )

    def _cut(self, batch: DataProto) -> tuple[PairRows, list[list[int]]]:
        """The pairs, and which of them form a micro-batch."""
        rows = PairRows(batch, self.engine.model.pad_token_id, share=self.engine.can_share_prompts)
        return rows, rows.micro_batches(self.budget, agree=self.counts_over_dp)


def pair_loss(
    center_coefficient: float, outputs: ValueOutputs, micro_batch: PackedMicroBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    """A micro-batch's share of the mean loss over all pairs, and of the means of its metrics."""
    chosen, rejected = outputs.values[0::2], outputs.values[1::2]
    columns = {name: column[0::2] for name, column in micro_batch.columns.items()}
    result = bradley_terry_loss(chosen, rejected, columns.get(MARGINS), center_coefficient)
    total = (result.loss * columns[SHARE]).sum()
    facts = {name: (fact * columns[SHARE]).sum() for name, fact in result.diagnostics.items()}
    return total, {"loss": total.detach(), **facts}
