"""A step's token mathematics on some of its rows: rewards, advantages, and moments for whitening and metrics.

Each function takes the rows of one process and returns new columns and facts. The driver merges the facts of all
processes and decides from them; it sees no tokens. Names of row functions (:mod:`megarl.data.remote_columns`) end with
``_of_rows``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms import (
    Moments,
    RatioMoments,
    TurnCounts,
    add_at_last,
    apply_kl_penalty,
    blend_quality,
    expand_to_tokens,
    have_tokens,
    kl_penalty,
    masked_whiten,
    on_trained_tokens,
    select_tokens,
    sequence_counts,
    sequence_quality,
    sequence_sums,
    whiten_rewards,
)
from megarl.base.reductions import Largest, Metrics, Smallest
from megarl.data import DataProto, sequence_lengths
from megarl.data.images import IMAGE_COUNTS

MASKS = ("attention_mask", "response_mask")
"""Columns with the lengths and the trained tokens of the rows."""
FINISH_REASON = "finish_reason"
"""Column with the reason for the end of each conversation, see :class:`megarl.agents.types.Trajectory`."""
GENERATED_TOKENS = "generated_tokens"
"""Key in a batch's ``meta_info``: number of tokens generated for the step, including dropped samples."""
REWARD_COLUMNS = (*MASKS, "token_level_scores", "token_level_rewards")
KL_COLUMNS = ("old_log_probs", "ref_log_prob", "ref_kl")
SHAPING_COLUMNS = (*MASKS, "token_level_scores", "ref_log_prob", "ref_similarity")
WHITENED_COLUMNS = (*MASKS, "token_level_rewards", "advantages", "returns")
STATISTIC_COLUMNS = (*WHITENED_COLUMNS, "token_level_scores", "values")
MISMATCH_COLUMNS = (*MASKS, "generated_mask", "old_log_probs", "rollout_log_probs", IMAGE_COUNTS)
ALL_ROWS, IMAGE_ROWS = "", "/images"
"""Ends of the names of metrics over all rows, and over rows with images alone."""
ROW_ADVANTAGES = "row_advantages"
"""Column with one advantage per row, ``[b]`` double."""
EXPANDED_COLUMNS = (*MASKS, "token_level_rewards", "values", "entropys", ROW_ADVANTAGES)


def summary(prefix: str, values: Tensor) -> Metrics:
    """Compute ``{prefix}/{mean,max,min}`` of a tensor of any shape; empty for an empty tensor."""
    if values.numel() == 0:
        return {}
    array = values.numpy(force=True)
    return {
        f"{prefix}/mean": float(array.mean(dtype=np.float64)),
        f"{prefix}/max": Largest(array.max()),
        f"{prefix}/min": Smallest(array.min()),
    }


def trained_tokens(batch: DataProto) -> Tensor:
    """Mark trained response tokens, packed ``[n]`` bool."""
    return batch.packed("response_mask", torch.bool)


def counted_rows(batch: DataProto) -> Tensor:
    """Mark rows that have a score and a trained token, ``[b]`` bool."""
    return have_tokens(trained_tokens(batch), sequence_lengths(batch)[1])


def truncated_rows(batch: DataProto) -> Tensor:
    """Mark responses that a limit of tokens or turns ended, not the policy: ``[b]`` bool."""
    return torch.tensor([reason in ("length", "turns") for reason in batch.non_tensor_batch[FINISH_REASON]])


def row_sums(batch: DataProto, name: str) -> Tensor:
    """Sum a response-aligned column, such as ``token_level_scores``, over each row: ``[b]`` doubles."""
    ends = batch.ends(name)
    if ends is not None:
        return ends.double()
    values = batch.packed(name)
    return sequence_sums(values, torch.ones_like(values, dtype=torch.bool), sequence_lengths(batch)[1])


def generated_tokens(batch: DataProto) -> Tensor:
    """Mark response tokens that the policy generated, not a tool or a search: packed ``[n]`` bool."""
    if "generated_mask" in batch.tensors:
        return batch.packed("generated_mask", torch.bool)
    return torch.ones(int(sequence_lengths(batch)[1].sum()), dtype=torch.bool)


def compared_tokens(batch: DataProto) -> Tensor:
    """Mark trained tokens that have a log-prob of both engine and actor, packed ``[n]`` bool."""
    return trained_tokens(batch) & generated_tokens(batch)


def shaped_rewards_of_rows(
    batch: DataProto, quality_weight: float | None, bonus_weight: float | None
) -> tuple[DataProto, None]:
    """Shape scores into ``token_level_rewards``: blend in the reference quality, then add the alignment bonus.

    Args:
        batch: with :data:`SHAPING_COLUMNS`.
        quality_weight: of the reference quality; None = not blended in. The result then has ``quality`` ``[b]``, and
            its change of the reward ``quality_change`` ``[b]``.
        bonus_weight: of ``ref_similarity``; None = no bonus.
    """
    rows, lengths = counted_rows(batch), sequence_lengths(batch)[1]
    scores = rewards = batch.packed("token_level_scores")
    facts = {"counted": rows}
    if quality_weight is not None:
        quality = sequence_quality(batch.packed("ref_log_prob"), trained_tokens(batch), lengths)
        rewards = blend_quality(scores, quality, rows, lengths - 1, quality_weight, lengths)
        change = sequence_sums(rewards.double() - scores.double(), torch.ones_like(scores), lengths)
        facts |= {"quality": quality, "quality_change": change}
    if bonus_weight is not None:
        rewards = add_at_last(rewards, bonus_weight * batch.tensors["ref_similarity"], rows, lengths - 1, lengths)
    return batch.token_columns({"token_level_rewards": rewards}).with_columns(facts), None


@dataclass(frozen=True)
class RewardTerms:
    """Reward penalties in a step.

    Attributes:
        truncation_penalty: subtracted from truncated responses; None = not.
        kl_coefficient: of the KL penalty; None = without.
        kl_kind: estimator of the KL per token; None = the exact KL in ``ref_kl``.
        on_mask: whether rewards outside the mask are moved to trained tokens, as whitening needs.
    """

    truncation_penalty: float | None = None
    kl_coefficient: float | None = None
    kl_kind: str | None = None
    on_mask: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that the rewards depend on."""
        kl = KL_COLUMNS if self.kl_coefficient is not None else ()
        return (*REWARD_COLUMNS, *kl, *((FINISH_REASON,) if self.truncation_penalty is not None else ()))


def penalized_rewards_of_rows(batch: DataProto, terms: RewardTerms) -> tuple[DataProto, Moments]:
    """Compute ``token_level_rewards``: shaped rewards, or scores, minus the penalties.

    Returns:
        The rewards, and by row ``[b]``: ``trained_counts``, the number of trained tokens; ``counted``, whether there is
        one; ``reward_sums``, ``truncated`` with their penalty, ``kl`` with a KL penalty. And the moments of the
        rewards at trained tokens.
    """
    mask, lengths = trained_tokens(batch), sequence_lengths(batch)[1]
    shaped = "token_level_rewards" if "token_level_rewards" in batch.tensors else "token_level_scores"
    counts = sequence_counts(mask, lengths)
    rewards, facts = batch.packed(shaped), {"trained_counts": counts, "counted": counts > 0}
    if terms.truncation_penalty is not None:
        facts["truncated"] = truncated_rows(batch)
        penalties = torch.full((len(batch),), -terms.truncation_penalty)
        rewards = add_at_last(rewards, penalties, facts["counted"] & facts["truncated"], lengths - 1, lengths)
    if terms.kl_coefficient is not None:
        if terms.kl_kind is None:
            distance = batch.packed("ref_kl")
        else:
            distance = kl_penalty(batch.packed("old_log_probs"), batch.packed("ref_log_prob"), terms.kl_kind)
        rewards, facts["kl"] = apply_kl_penalty(rewards, distance, mask, terms.kl_coefficient, lengths)
    if terms.on_mask:
        rewards = on_trained_tokens(rewards, mask, lengths)
    facts["reward_sums"] = sequence_sums(rewards, torch.ones_like(mask), lengths)
    return batch.token_columns({"token_level_rewards": rewards}).with_columns(facts), Moments.of(rewards[mask])


class AdvantageFacts(NamedTuple):
    """Moments over the trained tokens of some rows.

    Attributes:
        advantages: of the advantages before whitening.
        entropy: of the policy's entropy; empty without it.
        returns: of the returns; empty without values.
        errors: of returns minus values; empty without values.
        turns: numbers of turns, for estimators that compare them.
    """

    advantages: Moments
    entropy: Moments
    returns: Moments
    errors: Moments
    turns: TurnCounts = TurnCounts()

    @classmethod
    def of(
        cls, batch: DataProto, advantages: Tensor, returns: Tensor, turns: TurnCounts | None = None
    ) -> AdvantageFacts:
        """Compute the moments of packed advantages and returns, and of batch columns."""
        mask, columns = trained_tokens(batch), batch.tensors
        targets = errors = entropy = Moments()
        if "entropys" in columns:
            entropy = Moments.of(select_tokens(batch.packed("entropys"), mask))
        if "values" in columns:
            goals, values = (select_tokens(one, mask).double() for one in (returns, batch.packed("values")))
            targets, errors = Moments.of(goals), Moments.of(goals - values)
        return cls(Moments.of(select_tokens(advantages, mask)), entropy, targets, errors, turns or TurnCounts())

    @classmethod
    def merged(cls, parts: Sequence[AdvantageFacts]) -> AdvantageFacts:
        """Merge the moments of disjoint rows."""
        columns: list[Any] = list(zip(*parts, strict=True))
        return cls(*(type(column[0]).merged(column) for column in columns))


def expanded_advantages_of_rows(batch: DataProto) -> tuple[DataProto, AdvantageFacts]:
    """Repeat :data:`ROW_ADVANTAGES` on the trained tokens of each row, as ``advantages`` and ``returns``."""
    mask, rewards = trained_tokens(batch), batch.packed("token_level_rewards")
    per_row = batch.tensors[ROW_ADVANTAGES].to(rewards.dtype)
    tokens = torch.where(mask, expand_to_tokens(per_row, rewards, sequence_lengths(batch)[1]), 0.0)
    return batch.token_columns({"advantages": tokens, "returns": tokens}), AdvantageFacts.of(batch, tokens, tokens)


def whitened_of_rows(batch: DataProto, names: Sequence[str], moments: Moments) -> tuple[DataProto, None]:
    """Whiten columns with the moments of all rows."""
    mask = trained_tokens(batch)
    return batch.token_columns({name: masked_whiten(batch.packed(name), mask, moments) for name in names}), None


def whitened_rewards_of_rows(batch: DataProto, moments: Moments) -> tuple[DataProto, None]:
    """Whiten ``token_level_rewards`` with the moments of all rows, keep their mean, and add ``reward_sums``."""
    rewards = whiten_rewards(batch.packed("token_level_rewards"), trained_tokens(batch), moments)
    sums = sequence_sums(rewards, torch.ones_like(rewards, dtype=torch.bool), sequence_lengths(batch)[1])
    return batch.token_columns({"token_level_rewards": rewards}).with_columns({"reward_sums": sums}), None


def scores_of_rows(batch: DataProto) -> tuple[DataProto, None]:
    """Compute ``counted`` and ``scores_sums``, the sums of the scores, by row."""
    sums = row_sums(batch, "token_level_scores")
    return DataProto.from_dict({"counted": counted_rows(batch), "scores_sums": sums}), None


def entropy_of_rows(batch: DataProto) -> tuple[DataProto, Moments]:
    """Compute the moments of the policy's entropy over trained tokens, and ``counted`` by row."""
    entropy = select_tokens(batch.packed("entropys"), trained_tokens(batch))
    return DataProto.from_dict({"counted": counted_rows(batch)}), Moments.of(entropy)


class _RowStatistics(NamedTuple):
    """Moments over the tokens of some rows, for the metrics of a step.

    Attributes:
        trained: of advantages, returns and values over the trained tokens, by column; of those that exist.
        mismatch: of the log-probs of engine and actor over the compared tokens, by kind of rows (:data:`ALL_ROWS`,
            :data:`IMAGE_ROWS`); empty without both.
    """

    trained: dict[str, Moments]
    mismatch: dict[str, RatioMoments]


def statistics_of_rows(batch: DataProto) -> tuple[DataProto, _RowStatistics]:
    """Compute the sums of scores and rewards and ``counted`` by row, and the moments of the metrics.

    Args:
        batch: with :data:`STATISTIC_COLUMNS`, and :data:`MISMATCH_COLUMNS` to compare log-probs.
    """
    mask, mismatch = trained_tokens(batch), dict[str, RatioMoments]()
    names = [name for name in ("advantages", "returns", "values") if name in batch.tensors]
    moments = {name: Moments.of(select_tokens(batch.packed(name), mask)) for name in names}
    sums = {f"{kind}_sums": row_sums(batch, f"token_level_{kind}") for kind in ("scores", "rewards")}
    if {"old_log_probs", "rollout_log_probs"} <= batch.tensors.keys():
        old, rollout = batch.packed("old_log_probs"), batch.packed("rollout_log_probs")
        compared, lengths = compared_tokens(batch), sequence_lengths(batch)[1]
        mismatch[ALL_ROWS] = RatioMoments.of(old, rollout, compared, lengths)
        if IMAGE_COUNTS in batch.tensors:
            with_images = expand_to_tokens(batch.tensors[IMAGE_COUNTS] > 0, compared, lengths)
            mismatch[IMAGE_ROWS] = RatioMoments.of(old, rollout, compared & with_images, lengths)
    return DataProto.from_dict({"counted": counted_rows(batch), **sums}), _RowStatistics(moments, mismatch)
