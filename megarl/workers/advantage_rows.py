"""Advantage estimators and rollout correction on some of the rows; see :mod:`megarl.workers.row_math`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms import (
    ADVANTAGES,
    AdvantageEstimator,
    AdvantageInputs,
    Correction,
    RejectionCounts,
    TurnCounts,
    Turns,
    WeightMoments,
    anchor_groups,
    importance_weights,
    log_ratios,
    observations,
    proximal_fractions,
    rejected_tokens,
    turn_numbers,
)
from megarl.data import DataProto, sequence_lengths
from megarl.workers.row_math import (
    MASKS,
    AdvantageFacts,
    RewardTerms,
    compared_tokens,
    counted_rows,
    generated_tokens,
    penalized_rewards_of_rows,
    trained_tokens,
    truncated_rows,
)

ANCHOR_STATES = "anchor_states"
"""Column with the states before the turns of a response, from agent loops that know them."""
GROUPS = "uid"
"""Column with the prompt of each row, equal for the rows of a group."""
TURN_COUNTS = "turn_counts"
"""Column ``[b]``: turns per response."""
LOG_PROB_COLUMNS = ("rollout_log_probs", "old_log_probs")
CORRECTED_COLUMNS = (*MASKS, "generated_mask", *LOG_PROB_COLUMNS)
ENGINE_COLUMNS = (*MASKS, "generated_mask", "rollout_log_probs", "weight_versions")
NON_FINITE = "non_finite"
"""Column ``[b]``: first compared token of a row with a log-prob that is not finite; -1 for none."""
_BASE_COLUMNS = (*MASKS, "token_level_rewards", "values", "entropys", "reward_baselines", GROUPS)
_TOKEN_INPUTS = ("old_log_probs", "sum_pi_squared")
_TURN_COLUMNS = ("responses", "generated_mask", ANCHOR_STATES)


@dataclass(frozen=True)
class EstimateOptions:
    """An estimator with its options.

    Attributes:
        norm_by_std: see :class:`megarl.algorithms.AdvantageInputs`.
        similarity: least similarity of equal states, see :func:`megarl.algorithms.anchor_groups`.
        correction: rollout correction whose weights the estimator reads; None = none.
        mean_weight: divides these weights.
    """

    estimator: str
    gamma: float = 1.0
    lam: float = 1.0
    norm_by_std: bool = True
    step_advantage_w: float = 1.0
    similarity: float | None = None
    correction: Correction | None = None
    mean_weight: float = 1.0


def estimate_columns(estimate: AdvantageEstimator, correction: Correction | None) -> list[str]:
    """List the columns that an estimator reads; one over the whole batch gets all that exist."""
    tokens = [name for name in _TOKEN_INPUTS if estimate.scope == "batch" or name in estimate.needs]
    turns = _TURN_COLUMNS if "turns" in estimate.needs else ()
    return list(dict.fromkeys([*_BASE_COLUMNS, *tokens, *turns, *(CORRECTED_COLUMNS if correction else ())]))


def advantages_of_rows(
    batch: DataProto, options: EstimateOptions, terms: RewardTerms | None = None
) -> tuple[DataProto, AdvantageFacts]:
    """Estimate ``advantages`` and ``returns``; not whitened.

    Args:
        batch: with :func:`estimate_columns`. The rows are complete for the scope of the estimator: any rows, whole
            groups, or the whole batch.
        terms: penalties that turn scores into rewards first; None = the batch has rewards.

    Returns:
        The columns; for estimators that read turns also :data:`TURN_COUNTS`; with ``terms`` also those of
        :func:`penalized_rewards_of_rows`. And the moments.
    """
    if terms is not None:
        rewards, _ = penalized_rewards_of_rows(batch, terms)
        with_rewards = batch.with_columns(rewards.select(["token_level_rewards"]).tensors)
        estimated, facts = advantages_of_rows(with_rewards, options)
        return rewards.with_columns(estimated.tensors), facts
    estimate, lengths, columns = ADVANTAGES.find(options.estimator), sequence_lengths(batch)[1], batch.tensors
    tokens = {name: batch.packed(name) for name in ("values", *_TOKEN_INPUTS) if name in columns}
    turns = counts = weights = None
    if "turns" in estimate.needs:
        turns, counts = _turns_of(batch, options.similarity)
    if options.correction is not None:
        weights = _token_weights_of(batch, options.correction, options.mean_weight)[0]
    advantages, returns = estimate.unwhitened(
        AdvantageInputs(
            token_level_rewards=batch.packed("token_level_rewards"),
            response_mask=trained_tokens(batch),
            values=tokens.get("values"),
            group_ids=batch.non_tensor_batch.get(GROUPS),
            reward_baselines=columns.get("reward_baselines"),
            old_log_probs=tokens.get("old_log_probs"),
            sum_pi_squared=tokens.get("sum_pi_squared"),
            rollout_is_weights=weights,
            turns=turns,
            step_advantage_w=options.step_advantage_w,
            gamma=options.gamma,
            lam=options.lam,
            norm_by_std=options.norm_by_std,
            lengths=lengths,
        )
    )
    result = batch.token_columns({"advantages": advantages, "returns": returns})
    if turns is None or counts is None:
        return result, AdvantageFacts.of(batch, advantages, returns)
    numbers = TurnCounts.of(turns, trained_tokens(batch), lengths)
    return result.with_columns({TURN_COUNTS: counts}), AdvantageFacts.of(batch, advantages, returns, numbers)


def _turns_of(batch: DataProto, similarity: float | None) -> tuple[Turns, Tensor]:
    """Find the turns of each response, and the turns of a prompt that begin in the same state.

    States in :data:`ANCHOR_STATES` replace the observations of a response with as many turns.

    Returns:
        The turns, and their number in each response ``[b]``.
    """
    generated, lengths = generated_tokens(batch), sequence_lengths(batch)[1]
    numbers = turn_numbers(generated, lengths)
    states, counted = observations(batch.packed("responses"), generated, numbers, lengths), counted_rows(batch)
    counts = torch.tensor(list(map(len, states)))
    for row, named in enumerate(batch.non_tensor_batch.get(ANCHOR_STATES, [])):
        if named is not None and counted[row] and len(named) == counts[row]:
            states[row] = [state if isinstance(state, str) else tuple(state) for state in named]
    return Turns(numbers, anchor_groups(states, batch.non_tensor_batch[GROUPS].tolist(), similarity)), counts


def _token_weights_of(batch: DataProto, correction: Correction, mean: float = 1.0) -> tuple[Tensor, WeightMoments]:
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
    return DataProto.from_dict({NON_FINITE: _non_finite(batch)}), _token_weights_of(batch, correction)[1]


class CorrectionFacts(NamedTuple):
    """Rollout-correction statistics for some rows.

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

    Returns:
        These columns with :data:`NON_FINITE`; and the statistics.
    """
    columns, weights, rejections = {}, WeightMoments(), None
    if correction.level is not None:
        columns["rollout_is_weights"], weights = _token_weights_of(batch, correction, mean)
    if correction.rules:
        trained, lengths = trained_tokens(batch), sequence_lengths(batch)[1]
        rejected, rejections = rejected_tokens(*_compared_ratios(batch), trained, correction.rules, lengths)
        columns["response_mask"] = trained & ~rejected
    tokens = batch.token_columns(columns)
    return tokens.with_columns({NON_FINITE: _non_finite(batch)}), CorrectionFacts(weights, rejections)


def engine_log_probs_of_rows(batch: DataProto, version: int | None) -> tuple[DataProto, None]:
    """Use the engine's log-probs as ``old_log_probs``; a ``version`` adds ``proximal_fractions``.

    Args:
        version: weight version of the proximal policy, which a log-linear estimate needs; None = no estimate.
    """
    columns = {"old_log_probs": batch.packed("rollout_log_probs")}
    if version is not None:
        fractions = proximal_fractions(batch.packed("weight_versions"), version)
        columns["proximal_fractions"] = fractions * compared_tokens(batch)
    return batch.token_columns(columns).with_columns({NON_FINITE: _non_finite(batch)}), None


def untruncated_of_rows(batch: DataProto) -> tuple[DataProto, None]:
    """Clear ``response_mask`` of truncated responses, and mark them in ``truncated``; reads ``finish_reason``."""
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
