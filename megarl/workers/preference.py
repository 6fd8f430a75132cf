"""The worker of preference optimization: trains a policy on pairs, with the initial model as reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from megarl.algorithms import PREFERENCE_LOSSES, PreferenceInputs, PreferenceLossOptions, TokenLoss
from megarl.algorithms.masked import sequence_sums
from megarl.config.schema.jobs import PreferenceLossConfig
from megarl.data import DataProto
from megarl.megatron import PolicyOutputs
from megarl.megatron.layers.packed import PackedMicroBatch
from megarl.workers.base import offload_after
from megarl.workers.dispatch import Dispatch, WorkerPlace, verb
from megarl.workers.rows import SAMPLE_IDS
from megarl.workers.settings import MicroBatchBudget, RoleSettings
from megarl.workers.supervised import PAIRS, PairRows, PairTrainingWorker

PROMPT_TOKENS = ("chosen_prompt_tokens", "rejected_prompt_tokens")
"""Columns with the prompt lengths of a pair's two sequences, in tokens."""
POLICY_LOG_PROBS = ("chosen_log_prob", "rejected_log_prob")
REF_LOG_PROBS = ("ref_chosen_log_prob", "ref_rejected_log_prob")
TOKENS = ("chosen_tokens", "rejected_tokens")
REF_LOG_PROB = "ref_log_prob"
"""Column of a micro-batch: log-prob of each response token under the reference."""


class ResponsePairs(PairRows):
    """Pairs with one output per response token.

    Args:
        batch: needs the columns of :data:`PROMPT_TOKENS`, too.
    """

    def __init__(self, batch: DataProto, *, share: bool) -> None:
        super().__init__(batch, share=share)
        self._boundaries = [batch.tensors[f"{name}_prompt_tokens"].tolist() for name in self.names]

    def responses(self, row: int) -> list[tuple[Tensor, Tensor]]:
        """Return prompt and response token ids of the chosen and rejected sequences."""
        halves = zip(self.sequences(row), self._boundaries, strict=True)
        return [(ids[: at[row]], ids[at[row] :]) for ids, at in halves]

    def pack_pairs(self, rows: Sequence[int], columns: Mapping[str, Tensor] | None = None) -> PackedMicroBatch:
        """Pack pairs into one micro-batch; ``columns`` are packed over all response tokens of the pairs."""
        parts = [part for row in rows for part in self.responses(row)]
        return PackedMicroBatch.from_rows(parts, columns, share_prompts=self.share)

    def by_row(self, groups: Sequence[Sequence[int]], packed: Sequence[Tensor]) -> dict[int, Tensor]:
        """Split values over response tokens, one tensor per micro-batch, into those of each pair."""
        values: dict[int, Tensor] = {}
        for group, tensor in zip(groups, packed, strict=True):
            counts = [sum(len(response) for _, response in self.responses(row)) for row in group]
            values |= zip(group, tensor.float().cpu().split(counts), strict=True)
        return values


class PreferenceTrainingWorker(PairTrainingWorker):
    """Base class for preference optimization.

    The reference is the initial model: its weights in host memory, or the base of adapters.

    Args:
        budget: micro-batch budget for rows; tokens count both sequences.
    """

    def __init__(
        self, place: WorkerPlace, *, settings: RoleSettings, budget: MicroBatchBudget, loss: PreferenceLossConfig
    ) -> None:
        super().__init__(place, settings=settings, budget=budget)
        self.loss = loss

    @verb(Dispatch.ALL)
    @offload_after
    def init_model(self) -> None:
        """Build the model; keep the weights of the loss's reference, unless they are the base of adapters."""
        super().init_model()
        self._reference = self.reference_scope() if self.loss.uses_reference else None


class PreferenceWorker(PreferenceTrainingWorker):
    """Trains a policy on preference pairs; arguments as :class:`PreferenceTrainingWorker`."""

    @verb(Dispatch.SPLIT, equal_rows=True, phase="update", columns=(*PAIRS, *PROMPT_TOKENS, *SAMPLE_IDS))
    def update_preference(self, batch: DataProto) -> dict[str, float]:
        """Run one optimizer step on the batch's pairs; metrics under ``train/`` are means over all pairs."""
        rows = self._pairs(batch)
        total = sum(self.counts_over_dp(len(rows)))
        reference = self._ref_log_probs(rows)

        def pack(group: Sequence[int]) -> PackedMicroBatch:
            return rows.pack_pairs(group, _columns(reference, group))

        return self.update_pairs(rows, pack, partial(_share_of_loss, self.loss, total))

    @verb(Dispatch.SPLIT, phase="testing", columns=(*PAIRS, *PROMPT_TOKENS))
    @offload_after
    def compute_pair_log_probs(self, batch: DataProto) -> DataProto | None:
        """Compute the pair loss's inputs, ``[b]`` each; None on non-owner ranks.

        Log-probs summed over the response: ``chosen_log_prob`` and ``rejected_log_prob``, with a reference also
        ``ref_chosen_log_prob`` and ``ref_rejected_log_prob``. Number of response tokens: ``chosen_tokens`` and
        ``rejected_tokens``.
        """
        rows = self._pairs(batch)
        policy, reference = self._log_probs(rows), self._ref_log_probs(rows)
        if policy is None:
            return None
        lengths = torch.tensor([[len(response) for _, response in rows.responses(row)] for row in range(len(rows))])
        columns = dict(zip(TOKENS, lengths.unbind(1), strict=True))
        for names, values in ((POLICY_LOG_PROBS, policy), (REF_LOG_PROBS, reference)):
            if values is not None:
                packed = torch.cat([values[row] for row in range(len(rows))])
                columns |= _response_sums(names, packed, lengths.flatten())
        return DataProto.from_dict({name: column.contiguous() for name, column in columns.items()})

    def _ref_log_probs(self, rows: ResponsePairs) -> dict[int, Tensor] | None:
        """Log-probs of each pair's response tokens under the reference; None without one and before the last stage."""
        if self._reference is None:
            return None
        with self._reference():
            return self._log_probs(rows)

    def _log_probs(self, rows: ResponsePairs) -> dict[int, Tensor] | None:
        """Log-probs of each pair's response tokens under the current weights; None before the last stage."""

        def read(groups: Sequence[Sequence[int]], outputs: Sequence[PolicyOutputs]) -> dict[int, Tensor]:
            return rows.by_row(groups, [output.log_probs for output in outputs])

        return self.forward_pass(rows, self.budget, read, rows.pack_pairs)

    def _pairs(self, batch: DataProto) -> ResponsePairs:
        return ResponsePairs(batch, share=self.engine.can_share_prompts)


def compute_preference_loss(loss: PreferenceLossConfig, columns: Mapping[str, Tensor]) -> TokenLoss:
    """Compute the loss of each pair from the columns of :meth:`PreferenceWorker.compute_pair_log_probs`."""
    return PREFERENCE_LOSSES[loss.type](
        PreferenceInputs(
            chosen=columns["chosen_log_prob"],
            rejected=columns["rejected_log_prob"],
            ref_chosen=columns.get("ref_chosen_log_prob"),
            ref_rejected=columns.get("ref_rejected_log_prob"),
            chosen_tokens=columns["chosen_tokens"],
            rejected_tokens=columns["rejected_tokens"],
            options=PreferenceLossOptions(loss.beta, loss.label_smoothing, loss.simpo_gamma or 0.0),
        )
    )


def _response_sums(names: tuple[str, str], values: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """Sum values over each response's tokens; return the chosen and the rejected sums by name."""
    sums = sequence_sums(values, torch.ones_like(values), lengths)
    return dict(zip(names, (sums[0::2], sums[1::2]), strict=True))


def _columns(reference: dict[int, Tensor] | None, group: Sequence[int]) -> dict[str, Tensor]:
    return {} if reference is None else {REF_LOG_PROB: torch.cat([reference[row] for row in group])}


def _share_of_loss(
    loss: PreferenceLossConfig, total: int, outputs: PolicyOutputs, micro_batch: PackedMicroBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    """A micro-batch's share of the mean loss over all ``total`` pairs, and of the means of its metrics."""
    lengths = micro_batch.row_lengths
    columns = dict(zip(TOKENS, (lengths[0::2], lengths[1::2]), strict=True))
    log_probs = {POLICY_LOG_PROBS: outputs.log_probs, REF_LOG_PROBS: micro_batch.columns.get(REF_LOG_PROB)}
    for names, values in log_probs.items():
        if values is not None:
            columns |= _response_sums(names, values, lengths)
    result = compute_preference_loss(loss, columns)
    metrics = {"loss": result.loss.detach(), **result.diagnostics}
    metrics |= {name: columns[name].detach() for name in POLICY_LOG_PROBS}
    return result.loss.sum() / total, {name: values.sum() / total for name, values in metrics.items()}
