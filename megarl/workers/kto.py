"""The worker of KTO: trains a policy on desirable and undesirable responses, with the initial model as reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from megarl.algorithms import LabelledInputs, TokenLoss, kto
from megarl.algorithms.masked import sequence_sums
from megarl.config.schema.jobs import PreferenceLossConfig
from megarl.data import KTO_COLUMNS, DataProto
from megarl.megatron import PolicyOutputs
from megarl.megatron.layers.packed import PackedMicroBatch
from megarl.workers.base import offload_after
from megarl.workers.dispatch import Dispatch, verb
from megarl.workers.preference import REF_LOG_PROB, PreferenceTrainingWorker, ResponsePairs
from megarl.workers.rows import SAMPLE_IDS

COLUMNS_READ = (*KTO_COLUMNS, *(f"{name}_prompt_tokens" for name in KTO_COLUMNS), "attention_mask", "desirable")
OWN, MISMATCHED = 0, 1
"""Sequences of a row: the prompt with its own response, and with the response of another row."""
DESIRABLE = "desirable"
"""Column of a batch, and of a micro-batch, where it has an entry per response token."""


class _LabelledRows(ResponsePairs):
    """Rows with a labelled response and a mismatched one.

    Args:
        batch: needs the columns of :data:`COLUMNS_READ`.
    """

    names: ClassVar[tuple[str, str]] = (KTO_COLUMNS[OWN], KTO_COLUMNS[MISMATCHED])

    def __init__(self, batch: DataProto, *, share: bool) -> None:
        super().__init__(batch, share=share)
        self.desirable = batch.tensors[DESIRABLE]

    def pack_sequences(
        self, rows: Sequence[int], sequences: Sequence[int], columns: Mapping[str, Tensor] | None = None
    ) -> PackedMicroBatch:
        """Pack some of the two sequences of each row; ``columns`` are packed over their response tokens."""
        parts = [self.responses(row)[number] for row in rows for number in sequences]
        return PackedMicroBatch.from_rows(parts, columns, share_prompts=self.share and len(sequences) > 1)

    def by_sequence(
        self, groups: Sequence[Sequence[int]], sequences: Sequence[int], packed: Sequence[Tensor]
    ) -> dict[tuple[int, int], Tensor]:
        """Split values over response tokens, one tensor per micro-batch, by row and number of the sequence."""
        values: dict[tuple[int, int], Tensor] = {}
        for group, tensor in zip(groups, packed, strict=True):
            keys = [(row, number) for row in group for number in sequences]
            counts = [len(self.responses(row)[number][1]) for row, number in keys]
            values |= zip(keys, tensor.float().cpu().split(counts), strict=True)
        return values


class _StepTotals(NamedTuple):
    """Numbers about all rows of a step, on all ranks.

    Attributes:
        kl: the estimated KL from policy to reference, at least 0.
    """

    rows: int
    desirable: int
    kl: float


class KTOWorker(PreferenceTrainingWorker):
    """Trains a policy on desirable and undesirable responses (KTO); arguments as :class:`PreferenceTrainingWorker`.

    Before a step, passes without gradients compute the log-probs of both sequences under the reference, and those of
    the mismatched one under the policy. Their mean over all data-parallel ranks is the KL, a constant in the loss. So
    the loss depends neither on the layout nor on the micro-batches.
    """

    @verb(Dispatch.SPLIT, equal_rows=True, phase="update", columns=(*COLUMNS_READ, *SAMPLE_IDS))
    def update_preference(self, batch: DataProto) -> dict[str, float]:
        """Run one optimizer step on the batch's responses; metrics under ``train/`` are means over all of them."""
        rows = self._rows(batch)
        reference = self._ref_log_probs(rows)
        totals = self._totals(rows, self._log_probs(rows, [MISMATCHED]), reference)

        def pack(group: Sequence[int]) -> PackedMicroBatch:
            lengths = torch.tensor([len(rows.responses(row)[OWN][1]) for row in group])
            columns = {DESIRABLE: rows.desirable[list(group)].repeat_interleave(lengths)}
            if reference is not None:
                columns[REF_LOG_PROB] = torch.cat([reference[row, OWN] for row in group])
            return rows.pack_sequences(group, [OWN], columns)

        return self.update_pairs(rows, pack, partial(_share_of_loss, self.loss, totals), sequences_per_row=1)

    @verb(Dispatch.SPLIT, phase="testing", columns=COLUMNS_READ)
    @offload_after
    def compute_response_log_probs(self, batch: DataProto) -> DataProto | None:
        """Compute the inputs of the loss, ``[b]`` each; None on non-owner ranks.

        ``log_ratios`` of policy to reference, of the labelled responses; ``kl_log_ratios``, of the mismatched ones; and
        ``desirable``.
        """
        rows = self._rows(batch)
        policy, reference = self._log_probs(rows, [OWN, MISMATCHED]), self._ref_log_probs(rows)
        if policy is None or reference is None:
            return None
        columns = {
            name: torch.stack([_log_ratio(policy, reference, row, number) for row in range(len(rows))])
            for name, number in (("log_ratios", OWN), ("kl_log_ratios", MISMATCHED))
        }
        return DataProto.from_dict({**columns, DESIRABLE: rows.desirable})

    def _totals(
        self,
        rows: _LabelledRows,
        policy: dict[tuple[int, int], Tensor] | None,
        reference: dict[tuple[int, int], Tensor] | None,
    ) -> _StepTotals:
        """Sum rows, labels and the estimate of the KL over the data-parallel ranks; communicates."""
        local = torch.tensor([len(rows), int(rows.desirable.sum()), 0], dtype=torch.float64)
        if policy is not None and reference is not None:  # on the last stage, where the loss is computed
            local[2] = sum(_log_ratio(policy, reference, row, MISMATCHED).item() for row in range(len(rows)))
        count, desirable, log_ratios = self.engine.all_reduce_dp(local).tolist()
        return _StepTotals(round(count), round(desirable), max(0.0, log_ratios / count))

    def _ref_log_probs(self, rows: _LabelledRows) -> dict[tuple[int, int], Tensor] | None:
        assert self._reference is not None, "the loss reads a reference"
        with self._reference():
            return self._log_probs(rows, [OWN, MISMATCHED])

    def _log_probs(self, rows: _LabelledRows, sequences: Sequence[int]) -> dict[tuple[int, int], Tensor] | None:
        """Response log-probs of some sequences under the current weights; None before the last stage."""

        def read(groups: Sequence[Sequence[int]], outputs: Sequence[PolicyOutputs]) -> dict[tuple[int, int], Tensor]:
            return rows.by_sequence(groups, sequences, [output.log_probs for output in outputs])

        return self.forward_pass(rows, self.budget, read, lambda group: rows.pack_sequences(group, sequences))

    def _rows(self, batch: DataProto) -> _LabelledRows:
        return _LabelledRows(batch, share=self.engine.can_share_prompts)


def compute_kto_loss(loss: PreferenceLossConfig, log_ratios: Tensor, desirable: Tensor, kl: float) -> TokenLoss:
    """Compute the loss of each response from ``log_ratios [n]``, ``desirable [n]`` bool and the estimate of the KL."""
    assert loss.desirable_weight is not None and loss.undesirable_weight is not None, "derived"
    return kto(
        LabelledInputs(
            log_ratios,
            desirable,
            kl,
            beta=loss.beta,
            desirable_weight=loss.desirable_weight,
            undesirable_weight=loss.undesirable_weight,
        )
    )


def class_means(values: Tensor, desirable: Tensor, totals: tuple[int, int]) -> dict[str, Tensor]:
    """Compute the share of these rows in the means over the desirable and over the undesirable responses.

    Args:
        values: ``[n]``.
        desirable: ``[n]`` bool.
        totals: all desirable and all undesirable responses; a class without responses has no mean.

    Returns:
        ``chosen`` and ``rejected``, and with both their difference, ``margin``.
    """
    sums = {"chosen": (values * desirable).sum(), "rejected": (values * ~desirable).sum()}
    means = {name: sums[name] / total for name, total in zip(sums, totals, strict=True) if total}
    return means | ({"margin": means["chosen"] - means["rejected"]} if len(means) == len(sums) else {})


def _log_ratio(
    policy: Mapping[tuple[int, int], Tensor], reference: Mapping[tuple[int, int], Tensor], row: int, number: int
) -> Tensor:
    """Log-ratio of a response, summed over its tokens in double precision."""
    return policy[row, number].double().sum() - reference[row, number].double().sum()


def _share_of_loss(
    loss: PreferenceLossConfig, totals: _StepTotals, outputs: PolicyOutputs, micro_batch: PackedMicroBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    """A micro-batch's share of the mean loss over all responses, and of the means of its metrics."""
    lengths, ones = micro_batch.row_lengths, torch.ones_like(outputs.log_probs)
    log_probs, ref_log_probs, marks = (
        sequence_sums(values, ones, lengths)
        for values in (outputs.log_probs, micro_batch.columns[REF_LOG_PROB], micro_batch.columns[DESIRABLE].float())
    )
    desirable = marks > 0
    result = compute_kto_loss(loss, log_probs - ref_log_probs, desirable, totals.kl)
    of_all_rows = {"loss": result.loss.detach(), "accuracy": result.diagnostics["accuracy"]}
    metrics = {name: values.sum() / totals.rows for name, values in of_all_rows.items()}
    metrics["kl"] = metrics["loss"].new_tensor(totals.kl * len(lengths) / totals.rows)
    counts = (totals.desirable, totals.rows - totals.desirable)
    for name, values in (("reward", result.diagnostics["reward"]), ("log_prob", log_probs.detach())):
        means = class_means(values, desirable, counts)
        metrics |= {f"{half}_{name}": means[half] for half in ("chosen", "rejected") if half in means}
        if name == "reward" and "margin" in means:
            metrics["margin"] = means["margin"]
    return result.loss.sum() / totals.rows, metrics
