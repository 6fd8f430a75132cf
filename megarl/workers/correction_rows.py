"""Rollout correction and the mask of the updates on a part of the rows; see :mod:`megarl.workers.row_math`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms import (
    Correction,
    RejectionCounts,
    WeightMoments,
    importance_weights,
    log_ratios,
    proximal_fractions,
    rejected_tokens,
)
from megarl.data import DataProto, sequence_lengths
from megarl.workers.row_math import MASKS, compared_tokens, trained_tokens, truncated_rows

LOG_PROB_COLUMNS = ("rollout_log_probs", "old_log_probs")
CORRECTED_COLUMNS = (*MASKS, "generated_mask", *LOG_PROB_COLUMNS)
ENGINE_COLUMNS = (*MASKS, "generated_mask", "rollout_log_probs", "weight_versions")
NON_FINITE = "non_finite"
"""Column ``[b]``: first compared token of a row with a log-prob that is not finite; -1 for none."""


def token_weights_of(batch: DataProto, correction: Correction, mean: float = 1.0) -> tuple[Tensor, WeightMoments]:
    """Compute the importance weights of some rows, packed ``[n]``, and their moments.

    Args:
        batch: with :data:`CORRECTED_COLUMNS`.
        mean: see :func:`megarl.algorithms.importance_weights`.
    """
    assert correction.level is not None, "importance weights are configured"
    return importance_weights(
        *_compared_ratios(batch),
        trained_tokens(batch),
        level=correction.level,
        truncation=correction.truncation,
        mean=mean,
        lengths=sequence_lengths(batch)[1],
    )


def weights_of_rows(batch: DataProto, correction: Correction) -> tuple[DataProto, WeightMoments]:
    """Compute the moments of the importance weights, whose mean normalizes them, and :data:`NON_FINITE`."""
    return DataProto.from_dict({NON_FINITE: _non_finite(batch)}), token_weights_of(batch, correction)[1]


class CorrectionFacts(NamedTuple):
    """Statistics of a rollout correction of some rows.

    Attributes:
        weights: moments of the importance weights; empty without them.
        rejections: counts of rejected tokens; None without rules.
    """

    weights: WeightMoments
    rejections: RejectionCounts | None


def corrected_of_rows(batch: DataProto, correction: Correction, mean: float = 1.0) -> tuple[DataProto, CorrectionFacts]:
    """Compute ``rollout_is_weights``, and the ``response_mask`` without rejected tokens, as far as configured.

    Args:
        batch: with :data:`CORRECTED_COLUMNS`.
        mean: divides the importance weights.

    Returns:
        These columns with :data:`NON_FINITE`; and the statistics.
    """
    columns, weights, rejections = {}, WeightMoments(), None
    if correction.level is not None:
        columns["rollout_is_weights"], weights = token_weights_of(batch, correction, mean)
    if correction.rules:
        trained, lengths = trained_tokens(batch), sequence_lengths(batch)[1]
        rejected, rejections = rejected_tokens(*_compared_ratios(batch), trained, correction.rules, lengths)
        columns["response_mask"] = trained & ~rejected
    tokens = batch.token_columns(columns)
    return tokens.with_columns({NON_FINITE: _non_finite(batch)}), CorrectionFacts(weights, rejections)


def engine_log_probs_of_rows(batch: DataProto, version: int | None) -> tuple[DataProto, None]:
    """Use the engine's log-probs as ``old_log_probs``; a ``version`` adds ``proximal_fractions``.

    Args:
        batch: with :data:`ENGINE_COLUMNS`.
        version: weight version of the proximal policy, which a log-linear estimate needs; None = no estimate.
    """
    columns = {"old_log_probs": batch.packed("rollout_log_probs")}
    if version is not None:
        fractions = proximal_fractions(batch.packed("weight_versions"), version)
        columns["proximal_fractions"] = fractions * compared_tokens(batch)
    return batch.token_columns(columns).with_columns({NON_FINITE: _non_finite(batch)}), None


def untruncated_of_rows(batch: DataProto) -> tuple[DataProto, None]:
    """Clear ``response_mask`` of truncated responses, and mark them in ``truncated``.

    Args:
        batch: with :data:`MASKS` and ``finish_reason``.
    """
    truncated = truncated_rows(batch)
    mask = trained_tokens(batch) & torch.repeat_interleave(~truncated, sequence_lengths(batch)[1])
    return batch.token_columns({"response_mask": mask}).with_columns({"truncated": truncated}), None


def _compared_ratios(batch: DataProto) -> tuple[Tensor, Tensor]:
    """Return the log-ratios of actor to engine, and the mask of compared tokens, packed ``[n]``."""
    compared = compared_tokens(batch)
    return log_ratios(batch.packed("old_log_probs"), batch.packed("rollout_log_probs"), compared), compared


def _non_finite(batch: DataProto) -> Tensor:
    """Compute the column :data:`NON_FINITE` from the log-probs that the batch has."""
    lengths, invalid = sequence_lengths(batch)[1], torch.tensor(False)
    for name in LOG_PROB_COLUMNS:
        if name in batch.tensors:
            invalid = invalid | ~batch.packed(name).isfinite()
    invalid = invalid & compared_tokens(batch)
    first = torch.full((len(batch),), -1)
    if invalid.any():
        for row, tokens in enumerate(invalid.split(lengths.tolist())):
            if tokens.any():
                first[row] = tokens.nonzero()[0, 0]
    return first
