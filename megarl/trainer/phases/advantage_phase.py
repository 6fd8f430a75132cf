"""From scores to advantages: reward shaping, truncation and KL penalties, whitening, then the advantage estimator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms import (
    ADVANTAGES,
    KL_CONTROLLERS,
    SCHEDULES,
    AdvantageInputs,
    KLController,
    Moments,
    TurnCounts,
    WeightSchedule,
    explained_variance,
    masked_mean,
    warmup_steps,
)
from megarl.base.errors import DataError
from megarl.base.reductions import Metrics, Total
from megarl.config.schema.algorithm import AlgorithmConfig, ScheduledWeightConfig
from megarl.data import DataProto
from megarl.data.remote_columns import RowMap, map_in_process, with_tokens
from megarl.trainer.phases.correction_phase import RolloutCorrectionPhase
from megarl.workers.advantage_rows import (
    ANCHOR_STATES,
    GROUPS,
    TURN_COUNTS,
    EstimateOptions,
    advantages_of_rows,
    estimate_columns,
)
from megarl.workers.row_math import (
    EXPANDED_COLUMNS,
    ROW_ADVANTAGES,
    SHAPING_COLUMNS,
    WHITENED_COLUMNS,
    AdvantageFacts,
    RewardTerms,
    expanded_advantages_of_rows,
    penalized_rewards_of_rows,
    shaped_rewards_of_rows,
    summary,
    whitened_of_rows,
    whitened_rewards_of_rows,
)


def _weight_schedule(config: ScheduledWeightConfig, total_steps: int) -> WeightSchedule:
    warmup = warmup_steps(config.warmup_ratio, total_steps)
    return WeightSchedule(config.max_weight, warmup, SCHEDULES.find(config.schedule), config.steps)


class RewardShaping:
    """Shapes scores into rewards: blends in the reference quality, then adds the alignment bonus.

    Rows without a trained token, such as rows whose reward failed, are unchanged. The result depends only on the step
    and the batch, so a checkpoint needs no state of it.

    Args:
        total_steps: training steps of the whole run; warm-ups are shares of it.
    """

    def __init__(self, config: AlgorithmConfig, total_steps: int, rows: RowMap = map_in_process) -> None:
        self.rows = rows
        quality, align = config.ref_quality_score, config.repr_align
        aligns = align.enable and align.ref_alignment.enable
        self.quality = _weight_schedule(quality, total_steps) if quality.enable else None
        self.alignment = _weight_schedule(align.ref_alignment, total_steps) if aligns else None

    def shape(self, batch: DataProto, step: int, metrics: Metrics) -> DataProto:
        """Add ``token_level_rewards`` to the batch if they differ from the scores, and statistics to ``metrics``.

        Raises:
            DataError: a log-prob of the reference is NaN.
        """
        if self.quality is None and self.alignment is None:
            return batch
        quality = None if self.quality is None else self.quality.weight(step)
        bonus = None if self.alignment is None else self.alignment.weight(step)
        fired = "ref_similarity" in batch.tensors
        columns, _ = self.rows(shaped_rewards_of_rows, SHAPING_COLUMNS, batch, quality, bonus if fired else None)
        facts = columns.tensors
        if quality is not None:
            metrics |= _quality_metrics(facts, quality)
        if bonus is not None:
            added = bonus * batch.tensors["ref_similarity"] if fired else torch.zeros(len(batch))
            metrics |= {"repr_align/weight": bonus, "repr_align/fired": float(fired)}
            metrics |= summary("repr_align/reward_added", added[facts["counted"]])
        return with_tokens(batch, columns)


def _quality_metrics(facts: Mapping[str, Tensor], weight: float) -> Metrics:
    quality, counted = facts["quality"], facts["counted"]
    invalid = quality.isnan().nonzero()
    if len(invalid):
        raise DataError(
            f"ref_log_prob of row {int(invalid[0])} is not a number: algorithm.ref_quality_score cannot use it",
            code="algorithm.ref-log-prob-nan",
        )
    metrics = {"ref_quality/weight": weight, "ref_quality/left_out": Total((~counted).sum())}
    metrics |= summary("ref_quality/quality", quality[counted])
    return metrics | summary("ref_quality/reward_change", facts["quality_change"][counted])


class RowRewards(NamedTuple):
    """Rewards by row.

    Attributes:
        sums: ``[b]`` double, each row's summed token rewards.
        counted: ``[b]`` bool, rows with a trained token.
        trained_counts: ``[b]``, trained tokens.
    """

    sums: Tensor
    counted: Tensor
    trained_counts: Tensor


class AdvantagePhase:
    """Applies penalties to the rewards, and estimates advantages.

    Row functions compute tokens, in the processes that hold them; the driver computes group baselines from sums of
    rewards, and merges moments for whitening. Estimators that compare the tokens of a group get whole groups. Only
    estimators over the tokens of all rows, such as a user's, run in the driver.

    Attributes:
        rows: runs the row functions; in this process until the workers have started.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config
        self.rows: RowMap = map_in_process
        self.estimate = ADVANTAGES.find(config.adv_estimator)
        weighs = "sum_pi_squared" in self.estimate.needs and config.rollout_correction.rollout_is is not None
        self.correction = RolloutCorrectionPhase(config.rollout_correction) if weighs else None
        control = config.kl_ctrl
        self.kl_controller: KLController | None = None
        if config.use_kl_in_reward:
            self.kl_controller = KL_CONTROLLERS[control.type](control.kl_coef, control.target_kl, control.horizon)

    def compute(self, batch: DataProto, metrics: Metrics) -> DataProto:
        """Add ``token_level_rewards``, ``advantages`` and ``returns`` to the batch, and statistics to ``metrics``."""
        estimate, terms = self.estimate, self._terms()
        if estimate.scope in ("rows", "group_tokens") and not self.config.whiten_rewards:
            columns, parts = self._estimate(batch, terms)  # with the rewards: each call of all processes takes time
            rewards = self._note_penalties(columns, metrics)
        else:
            batch, rewards = self._penalize(batch, terms, metrics)
            if estimate.scope == "groups":
                with_rows = batch.with_columns({ROW_ADVANTAGES: self._row_advantages(batch, rewards)})
                columns, parts = self.rows(expanded_advantages_of_rows, EXPANDED_COLUMNS, with_rows)
            else:
                columns, parts = self._estimate(batch)
        batch, facts = with_tokens(batch, columns), AdvantageFacts.merged(parts)
        if "turns" in estimate.needs:
            _check_states(batch, columns.tensors[TURN_COUNTS], rewards.counted)
            metrics |= _turn_metrics(facts.turns)
        if estimate.whitens:
            names = ("advantages", "returns") if estimate.scope == "groups" else ("advantages",)
            columns, _ = self.rows(whitened_of_rows, WHITENED_COLUMNS, batch, names, facts.advantages)
            batch = with_tokens(batch, columns)
        if "entropys" in batch.tensors:
            metrics["actor/entropy"] = facts.entropy.mean
        if "values" in batch.tensors:
            metrics["critic/vf_explained_var"] = explained_variance(facts.errors, facts.returns)
        return batch

    def _terms(self) -> RewardTerms:
        """Return the penalties of the next batch."""
        config, control = self.config, self.kl_controller
        return RewardTerms(
            truncation_penalty=config.missing_eos_penalty,
            kl_coefficient=None if control is None else control.value,
            kl_kind=None if config.uses_full_kl else config.kl_penalty,
            on_mask=config.whiten_rewards,
        )

    def _penalize(self, batch: DataProto, terms: RewardTerms, metrics: Metrics) -> tuple[DataProto, RowRewards]:
        """Compute the rewards: shaped scores minus the penalties, then whitened."""
        columns, moments = self.rows(penalized_rewards_of_rows, terms.columns, batch, terms)
        batch, rewards = with_tokens(batch, columns), self._note_penalties(columns, metrics)
        if self.config.whiten_rewards:
            columns, _ = self.rows(whitened_rewards_of_rows, WHITENED_COLUMNS, batch, Moments.merged(moments))
            batch, rewards = with_tokens(batch, columns), rewards._replace(sums=columns.tensors["reward_sums"])
        return batch, rewards

    def _note_penalties(self, columns: DataProto, metrics: Metrics) -> RowRewards:
        """Add the statistics of the penalties to ``metrics``, adapt the KL coefficient, and return rewards by row."""
        facts, control = columns.tensors, self.kl_controller
        counted, sums, counts = (facts[name] for name in ("counted", "reward_sums", "trained_counts"))
        if self.config.missing_eos_penalty is not None:
            metrics["reward/missing_eos_fraction"] = masked_mean(facts["truncated"].double(), counted).item()
        if control is not None:
            kl = masked_mean(facts["kl"], counted).item()
            metrics["actor/reward_kl_penalty"] = kl
            metrics["actor/reward_kl_penalty_coeff"] = control.value
            control.update(kl, len(counted))
        return RowRewards(sums, counted, counts)

    def _row_advantages(self, batch: DataProto, rewards: RowRewards) -> Tensor:
        """Estimate one advantage per row ``[b]`` from the sums of the rewards: each row as one token."""
        return self.estimate.unwhitened(
            AdvantageInputs(
                token_level_rewards=rewards.sums,
                response_mask=rewards.counted,
                group_ids=batch.non_tensor_batch[GROUPS],
                trained_counts=rewards.trained_counts,
                norm_by_std=self.config.norm_by_std,
                lengths=torch.ones(len(batch), dtype=torch.int64),
            )
        )[0]

    def _estimate(self, batch: DataProto, terms: RewardTerms | None = None) -> tuple[DataProto, list[AdvantageFacts]]:
        """Estimate advantages from the tokens of rows, of groups, or of the whole batch, by the estimator's scope.

        Args:
            terms: penalties; the result then has the columns of :func:`penalized_rewards_of_rows` too.
        """
        config, gigpo, scope = self.config, self.config.gigpo, self.estimate.scope
        correction = None if self.correction is None else self.correction.correction
        options = EstimateOptions(
            config.adv_estimator,
            gamma=config.gamma,
            lam=config.lam,
            norm_by_std=config.norm_by_std,
            step_advantage_w=gigpo.step_advantage_w,
            similarity=gigpo.similarity_thresh if gigpo.enable_similarity else None,
            correction=correction,
            mean_weight=1.0 if self.correction is None else self.correction.mean_weight(batch, self.rows),
        )
        rows, group_by = (map_in_process if scope == "batch" else self.rows), GROUPS if scope != "rows" else None
        read = [*estimate_columns(self.estimate, correction), *(terms.columns if terms else ())]
        return rows(advantages_of_rows, [*dict.fromkeys(read)], batch, options, terms, group_by=group_by)


def _check_states(batch: DataProto, turn_counts: Tensor, counted: Tensor) -> None:
    """Check that an agent loop names one state per turn.

    Raises:
        DataError: the states of a row have another number.
    """
    for row, named in enumerate(batch.non_tensor_batch.get(ANCHOR_STATES, [])):
        if named is not None and counted[row] and len(named) != turn_counts[row]:
            raise DataError(
                f"row {row}: {ANCHOR_STATES} has {len(named)} states, and its response has {int(turn_counts[row])} "
                "turns; the agent loop must give one state per turn of the policy",
                code="agent.states-per-turn",
            )


def _turn_metrics(counts: TurnCounts) -> Metrics:
    if not counts.turns:
        return {}
    return {
        "gigpo/step_group_size/mean": counts.turns / counts.states,
        "gigpo/compared_turn_fraction": counts.compared / counts.turns,
    }
