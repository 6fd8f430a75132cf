"""Advantage estimators on a part of the rows, or on some of the groups; see :mod:`megarl.workers.row_math`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms import (
    ADVANTAGES,
    AdvantageEstimator,
    AdvantageInputs,
    Correction,
    TurnCounts,
    Turns,
    anchor_groups,
    observations,
    turn_numbers,
)
from megarl.data import DataProto, sequence_lengths
from megarl.workers.correction_rows import CORRECTED_COLUMNS, token_weights_of
from megarl.workers.row_math import (
    MASKS,
    AdvantageFacts,
    RewardTerms,
    counted_rows,
    generated_tokens,
    penalized_rewards_of_rows,
    trained_tokens,
)

ANCHOR_STATES = "anchor_states"
"""Column with the states before the turns of a response, from agent loops that know them."""
GROUPS = "uid"
"""Column with the prompt of each row, equal for the rows of a group."""
TURN_COUNTS = "turn_counts"
"""Column ``[b]``: number of turns of each response."""
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
        weights = token_weights_of(batch, options.correction, options.mean_weight)[0]
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
