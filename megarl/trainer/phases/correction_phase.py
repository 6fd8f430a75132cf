"""Rows, weights and mask of the updates: rollout correction, truncated responses, and the reweighting of PF-PPO.

Row functions compute tokens, in the processes that hold them; the driver merges moments and counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from megarl.algorithms import Correction, Rejection, RejectionCounts, Truncation, WeightMoments
from megarl.algorithms.selection import policy_filtration_rows
from megarl.base.errors import DataError
from megarl.base.reductions import Metrics
from megarl.config.schema.algorithm import PFPPOConfig, RolloutCorrectionConfig, rejection_rules, weight_bounds
from megarl.data import DataProto
from megarl.data.remote_columns import RowMap, map_in_process, token_part, with_tokens
from megarl.workers.advantage_rows import (
    CORRECTED_COLUMNS,
    ENGINE_COLUMNS,
    LOG_PROB_COLUMNS,
    NON_FINITE,
    corrected_of_rows,
    engine_log_probs_of_rows,
    untruncated_of_rows,
    weights_of_rows,
)
from megarl.workers.row_math import FINISH_REASON, MASKS, scores_of_rows


class RolloutCorrectionPhase:
    """Weights and rejects tokens by the ratio of the actor's probability to the engine's (importance sampling).

    It runs after the advantages. A rejected response still counts in the baseline of its group, and a reward at a
    rejected token still belongs to the tokens before it. Only the updates see the rejection, and their means skip
    rejected tokens. Scores and lengths are reported of all samples.

    Args:
        loglinear: the actor interpolates the proximal policy and computes the importance weights within the loss.
        version: returns the version of the last weight sync, that of the proximal policy; read with ``loglinear``.

    Attributes:
        reads_rollout: whether ``old_log_probs`` are the engine's (bypass mode, and ``loglinear``).
    """

    name = "rollout_correction"

    def __init__(
        self,
        config: RolloutCorrectionConfig,
        *,
        loglinear: bool = False,
        version: Callable[[], int] | None = None,
        rows: RowMap = map_in_process,
    ) -> None:
        self.rows = rows
        self.reads_rollout = config.bypass_mode or loglinear
        self.version = version if loglinear else None
        self.normalize = config.rollout_is_batch_normalize
        bounds = weight_bounds(config)
        self.correction = Correction(
            None if loglinear else config.rollout_is,
            Truncation(bounds.upper, bounds.lower),
            tuple(Rejection(rule.option, rule.upper, rule.lower) for rule in rejection_rules(config)),
        )

    def rollout_log_probs(self, batch: DataProto) -> DataProto:
        """Use the engine's log-probs as ``old_log_probs``, without a pass of the actor.

        A log-linear proximal policy also needs ``proximal_fractions``, from the batch's ``weight_versions``.

        Raises:
            DataError: a log-prob of the engine is not finite.
        """
        version = None if self.version is None else self.version()
        columns, _ = self.rows(engine_log_probs_of_rows, ENGINE_COLUMNS, batch, version)
        _check_finite(batch, columns.tensors[NON_FINITE])
        return token_part(columns)

    def is_active(self, batch: DataProto, step: int) -> bool:
        """Return whether importance weights or rejection rules are configured."""
        return self.correction.level is not None or bool(self.correction.rules)

    def mean_weight(self, batch: DataProto, rows: RowMap) -> float:
        """Return the mean by which the importance weights are divided; 1 unless they are normalized.

        Raises:
            DataError: a log-prob of the engine or the actor is not finite.
        """
        if self.correction.level is None or not self.normalize:
            return 1.0
        columns, parts = rows(weights_of_rows, CORRECTED_COLUMNS, batch, self.correction)
        _check_finite(batch, columns.tensors[NON_FINITE])
        return WeightMoments.merged(parts).mean

    def run(self, batch: DataProto, step: int, metrics: Metrics) -> DataProto:
        """Add ``rollout_is_weights`` to the batch, and remove rejected tokens from ``response_mask``.

        Raises:
            DataError: a log-prob of the engine or the actor is not finite.
        """
        correction, mean = self.correction, self.mean_weight(batch, self.rows)
        columns, parts = self.rows(corrected_of_rows, CORRECTED_COLUMNS, batch, correction, mean)
        _check_finite(batch, columns.tensors[NON_FINITE])
        statistics: Metrics = {}
        if correction.level is not None:
            statistics |= WeightMoments.merged([part.weights for part in parts]).statistics()
        if correction.rules:
            statistics |= RejectionCounts.merged([part.rejections for part in parts]).statistics()
        metrics |= {f"rollout_corr/{name}": value for name, value in statistics.items()}
        return with_tokens(batch, columns)


class TruncatedResponsesPhase:
    """Masks responses that a limit of tokens or turns ended (TRL's ``mask_truncated_completions``).

    It runs after the advantages: a truncated response still counts in the baseline of its group.
    """

    name = "truncated_responses"

    def __init__(self, rows: RowMap = map_in_process) -> None:
        self.rows = rows

    def is_active(self, batch: DataProto, step: int) -> bool:
        """Return True: every step may have truncated responses."""
        return True

    def run(self, batch: DataProto, step: int, metrics: Metrics) -> DataProto:
        """Clear ``response_mask`` of truncated responses; ``actor/truncated_masked_fraction`` is their share."""
        columns, _ = self.rows(untruncated_of_rows, (*MASKS, FINISH_REASON), batch)
        metrics["actor/truncated_masked_fraction"] = columns.tensors["truncated"].double().mean().item()
        return with_tokens(batch, columns)


@dataclass(eq=False)
class PreferencePhase:
    """Redraws the rows of the batch by their scores (PF-PPO).

    Args:
        seed: of the run; the draw depends on it and on the step.
    """

    config: PFPPOConfig
    seed: int
    rows: RowMap = map_in_process
    name: ClassVar[str] = "pf_ppo"

    def is_active(self, batch: DataProto, step: int) -> bool:
        """Return True: PF-PPO redraws the rows in every step."""
        return True

    def run(self, batch: DataProto, step: int, metrics: Metrics) -> DataProto:
        """Draw as many rows as the batch has; ``pf_ppo/rows_fraction`` is the share of different rows."""
        columns, _ = self.rows(scores_of_rows, (*MASKS, "token_level_scores"), batch)
        scores, counted = (columns.tensors[name].numpy() for name in ("scores_sums", "counted"))
        method, power = self.config.reweight_method, self.config.weight_pow
        rows = policy_filtration_rows(scores, counted, method, power, (self.seed, step))
        metrics["pf_ppo/rows_fraction"] = len(set(rows.tolist())) / len(rows)
        return batch[rows]


def _check_finite(batch: DataProto, non_finite: Tensor) -> None:
    """Check that the compared tokens have finite log-probs.

    Raises:
        DataError: names the first row and token without.
    """
    rows = (non_finite >= 0).nonzero()
    if len(rows):
        row = int(rows[0])
        token, one = int(non_finite[row]), batch[[row]]
        numbers = {name: one.packed(name)[token].item() for name in LOG_PROB_COLUMNS if name in batch.tensors}
        name, number = next((name, number) for name, number in numbers.items() if not math.isfinite(number))
        raise DataError(
            f"{name}={number} of row {row}, token {token}: algorithm.rollout_correction needs finite log-probs",
            code="algorithm.log-probs-not-finite",
        )
