"""Rows, weights and mask of the updates: rollout correction, truncated responses, and the reweighting of PF-PPO."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch

from megarl.algorithms import (
    Rejection,
    Truncation,
    importance_weights,
    log_ratios,
    missing_eos,
    proximal_fractions,
    rejected_tokens,
)
from megarl.algorithms.selection import policy_filtration_rows
from megarl.base.errors import DataError
from megarl.config.correction_bounds import rejection_rules, weight_bounds
from megarl.config.schema.algorithm import PFPPOConfig, RolloutCorrectionConfig
from megarl.data import DataProto, sequence_lengths
from megarl.trainer.records.metrics import Metrics, train_rows
from megarl.workers.row_math import compared_tokens, counted_rows, row_sums, trained_tokens

LOG_PROB_COLUMNS = ("rollout_log_probs", "old_log_probs")


class RolloutCorrectionPhase:
    """Weights and rejects tokens by the ratio of the actor's probability to the engine's (importance sampling).

    It runs after the advantages. A rejected response still counts in the baseline of its group, and a reward at a
    rejected token still belongs to the tokens before it. Only the updates see the rejection, and their means skip
    rejected tokens. Scores and lengths are reported of all samples.

    Args:
        config: complete section ``algorithm.rollout_correction``.
        loglinear: the actor interpolates the proximal policy and computes the importance weights within the loss.
        version: returns the version of the last weight sync, that of the proximal policy; read with ``loglinear``.

    Attributes:
        reads_rollout: whether ``old_log_probs`` are the engine's (bypass mode, and ``loglinear``).
    """

    name = "rollout_correction"

    def __init__(
        self, config: RolloutCorrectionConfig, *, loglinear: bool = False, version: Callable[[], int] | None = None
    ) -> None:
        self.reads_rollout = config.bypass_mode or loglinear
        self.version = version if loglinear else None
        self.level = None if loglinear else config.rollout_is
        self.normalize = config.rollout_is_batch_normalize
        bounds = weight_bounds(config)
        self.truncation = Truncation(bounds.upper, bounds.lower)
        self.rules = [Rejection(rule.option, rule.upper, rule.lower) for rule in rejection_rules(config)]

    def rollout_log_probs(self, batch: DataProto) -> DataProto:
        """Use the engine's log-probs as ``old_log_probs``, without a pass of the actor.

        A log-linear proximal policy also needs ``proximal_fractions``, from the batch's ``weight_versions``.

        Raises:
            DataError: a log-prob of the engine is not finite.
        """
        _check_finite(batch)
        columns = {"old_log_probs": batch.packed("rollout_log_probs")}
        if self.version is not None:
            fractions = proximal_fractions(batch.packed("weight_versions"), self.version())
            columns["proximal_fractions"] = fractions * compared_tokens(batch)
        return batch.token_columns(columns)

    def is_active(self, batch: DataProto, step: int) -> bool:
        """Return whether importance weights or rejection rules are configured."""
        return self.level is not None or bool(self.rules)

    def weights(self, batch: DataProto) -> tuple[torch.Tensor, Metrics]:
        """Compute the importance weights of the configured level, packed ``[n]``, with their statistics.

        Raises:
            DataError: a log-prob of the engine or the actor is not finite.
        """
        return self._weights(_compare(batch))

    def run(self, batch: DataProto, step: int, metrics: Metrics) -> DataProto:
        """Add ``rollout_is_weights`` to the batch, and remove rejected tokens from ``response_mask``.

        Raises:
            DataError: a log-prob of the engine or the actor is not finite.
        """
        tokens = _compare(batch)
        columns: dict[str, torch.Tensor] = {}
        statistics: Metrics = {}
        if self.level is not None:
            columns["rollout_is_weights"], statistics = self._weights(tokens)
        if self.rules:
            rejected, rejection_statistics = rejected_tokens(
                tokens.ratios, tokens.compared, tokens.trained, self.rules, tokens.lengths
            )
            columns["response_mask"] = tokens.trained & ~rejected
            statistics |= rejection_statistics
        metrics |= {f"rollout_corr/{name}": value for name, value in statistics.items()}
        return batch.with_packed(columns)

    def _weights(self, tokens: _ComparedTokens) -> tuple[torch.Tensor, Metrics]:
        assert self.level is not None, "importance weights are configured"
        return importance_weights(
            tokens.ratios,
            tokens.compared,
            tokens.trained,
            level=self.level,
            truncation=self.truncation,
            normalize=self.normalize,
            lengths=tokens.lengths,
        )


class _ComparedTokens(NamedTuple):
    """Packed response tokens: log-ratios of actor to engine, masks of compared and trained tokens, row lengths."""

    ratios: torch.Tensor
    compared: torch.Tensor
    trained: torch.Tensor
    lengths: torch.Tensor


def _compare(batch: DataProto) -> _ComparedTokens:
    _check_finite(batch)
    compared = compared_tokens(batch)
    ratios = log_ratios(batch.packed("old_log_probs"), batch.packed("rollout_log_probs"), compared)
    return _ComparedTokens(ratios, compared, trained_tokens(batch), sequence_lengths(batch)[1])


class TruncatedResponsesPhase:
    """Masks responses without a final end-of-sequence token (TRL's ``mask_truncated_completions``).

    It runs after the advantages: a truncated response still counts in the baseline of its group.

    Args:
        eos_token_ids: tokens that end a response.
    """

    name = "truncated_responses"

    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self.eos_token_ids = eos_token_ids

    def is_active(self, batch: DataProto, step: int) -> bool:
        """Return True: every step may have truncated responses."""
        return True

    def run(self, batch: DataProto, step: int, metrics: Metrics) -> DataProto:
        """Clear ``response_mask`` of truncated responses; ``actor/truncated_masked_fraction`` is their share."""
        lengths = sequence_lengths(batch)[1]
        truncated = missing_eos(batch.packed("responses"), lengths - 1, self.eos_token_ids, lengths)
        metrics["actor/truncated_masked_fraction"] = truncated.double().mean().item()
        return train_rows(batch, ~truncated)


class PreferencePhase:
    """Redraws the rows of the batch by their scores (PF-PPO).

    Args:
        config: section ``algorithm.pf_ppo``.
        seed: of the run; the draw depends on it and on the step.
    """

    name = "pf_ppo"

    def __init__(self, config: PFPPOConfig, seed: int) -> None:
        self.config = config
        self.seed = seed

    def is_active(self, batch: DataProto, step: int) -> bool:
        """Return True: PF-PPO redraws the rows in every step."""
        return True

    def run(self, batch: DataProto, step: int, metrics: Metrics) -> DataProto:
        """Draw as many rows as the batch has; ``metrics`` gets the share of different rows.

        Args:
            batch: with advantages.
            step: global step.
            metrics: gets ``pf_ppo/rows_fraction``.
        """
        scores, counted = row_sums(batch, "token_level_scores").numpy(), counted_rows(batch).numpy()
        method, power = self.config.reweight_method, self.config.weight_pow
        rows = policy_filtration_rows(scores, counted, method, power, (self.seed, step))
        metrics["pf_ppo/rows_fraction"] = len(set(rows.tolist())) / len(rows)
        return batch[rows]


def _check_finite(batch: DataProto) -> None:
    compared = compared_tokens(batch)
    for name in LOG_PROB_COLUMNS:
        if name in batch.tensors:
            values = batch.packed(name)
            invalid = (compared & ~torch.isfinite(values)).nonzero()[:, 0]
            if len(invalid):
                first = int(invalid[0])
                ends = sequence_lengths(batch)[1].cumsum(0)
                row = int(torch.searchsorted(ends, first, right=True))
                token = first - int(ends[row - 1]) if row else first
                raise DataError(
                    f"{name}={values[first].item()} of row {row}, token {token}: algorithm.rollout_correction needs "
                    "finite log-probs"
                )
