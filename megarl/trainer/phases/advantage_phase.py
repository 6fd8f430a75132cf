"""From scores to advantages: reward shaping, EOS and KL penalties, whitening, then the advantage estimator."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from megarl.algorithms import (
    AdvantageInputs,
    KLController,
    Turns,
    WeightSchedule,
    add_at_last,
    anchor_groups,
    anchored_turns,
    apply_kl_penalty,
    blend_quality,
    explained_variance,
    kl_penalty,
    load_advantage,
    load_schedule,
    make_kl_controller,
    masked_mean,
    missing_eos,
    observations,
    sequence_quality,
    sequence_sums,
    turn_numbers,
    warmup_steps,
    whiten_rewards,
)
from megarl.base.errors import DataError
from megarl.config.schema.algorithm import AlgorithmConfig, ScheduledWeightConfig
from megarl.data import DataProto, sequence_lengths
from megarl.trainer.phases.correction_phase import RolloutCorrectionPhase
from megarl.trainer.records.metrics import Metrics, counted_rows, generated_tokens, summary, trained_tokens

ANCHOR_STATES = "anchor_states"
"""Column with the states before the turns of a response, from agent loops that know them."""
_TOKEN_INPUTS = ("values", "old_log_probs", "sum_pi_squared")
"""Columns that an estimator reads if the batch has them."""


def weight_schedule(config: ScheduledWeightConfig, total_steps: int) -> WeightSchedule:
    """Build the schedule of a reward weight over ``total_steps`` training steps.

    Raises:
        ConfigError: the shape of the schedule is unknown or malformed.
    """
    warmup = warmup_steps(config.warmup_ratio, total_steps)
    return WeightSchedule(config.max_weight, warmup, load_schedule(config.schedule), config.steps)


class RewardShaping:
    """Shapes scores into rewards: blends in the reference quality, then adds the alignment bonus.

    Rows without a trained token, such as rows whose reward failed, are unchanged. The result depends only on the step
    and the batch, so a checkpoint needs no state of it.

    Args:
        config: complete.
        total_steps: training steps of the whole run; warm-ups are shares of it.
    """

    def __init__(self, config: AlgorithmConfig, total_steps: int) -> None:
        quality, align = config.ref_quality_score, config.repr_align
        aligns = align.enable and align.ref_alignment.enable
        self.quality = weight_schedule(quality, total_steps) if quality.enable else None
        self.alignment = weight_schedule(align.ref_alignment, total_steps) if aligns else None

    def shape(self, batch: DataProto, step: int, metrics: Metrics) -> DataProto:
        """Add ``token_level_rewards`` to the batch, and statistics to ``metrics``.

        Raises:
            DataError: a log-prob of the reference is NaN.
        """
        rewards = batch.packed("token_level_scores")
        if self.quality is not None:
            rewards = self._blend_quality(batch, self.quality.weight(step), metrics)
        if self.alignment is not None:
            weight, fired = self.alignment.weight(step), "ref_similarity" in batch.tensors
            metrics |= {"repr_align/weight": weight, "repr_align/fired": float(fired)}
            rows, lengths = counted_rows(batch), sequence_lengths(batch)[1]
            bonus = weight * batch.tensors["ref_similarity"] if fired else torch.zeros(len(batch))
            metrics |= summary("repr_align/reward_added", bonus[rows])
            rewards = add_at_last(rewards, bonus, rows, lengths - 1, lengths)
        return batch.with_packed({"token_level_rewards": rewards})

    @staticmethod
    def _blend_quality(batch: DataProto, weight: float, metrics: Metrics) -> Tensor:
        rows, lengths = counted_rows(batch), sequence_lengths(batch)[1]
        quality = sequence_quality(batch.packed("ref_log_prob"), trained_tokens(batch), lengths)
        invalid = quality.isnan().nonzero()
        if len(invalid):
            raise DataError(f"ref_log_prob of row {int(invalid[0])} is not a number: ref_quality_score cannot blend it")
        scores = batch.packed("token_level_scores")
        blended = blend_quality(scores, quality, rows, lengths - 1, weight, lengths)
        change = sequence_sums(blended.double() - scores.double(), torch.ones_like(scores), lengths)[rows]
        metrics |= {"ref_quality/weight": weight, "ref_quality/left_out": float((~rows).sum())}
        metrics |= summary("ref_quality/quality", quality[rows])
        metrics |= summary("ref_quality/reward_change", change)
        return blended


class AdvantagePhase:
    """Applies penalties to the rewards and estimates advantages, on the driver and over the whole batch.

    Args:
        config: estimator, discount and penalties.
        eos_token_ids: tokens that end a response; read with ``missing_eos_penalty``.
    """

    def __init__(self, config: AlgorithmConfig, eos_token_ids: Collection[int] = ()) -> None:
        self.config = config
        self.eos_token_ids = eos_token_ids
        self.estimate = load_advantage(config.adv_estimator)
        weighs = "sum_pi_squared" in self.estimate.needs and config.rollout_correction.rollout_is is not None
        self.correction = RolloutCorrectionPhase(config.rollout_correction) if weighs else None
        control = config.kl_ctrl
        self.kl_controller: KLController | None = None
        if config.use_kl_in_reward:
            self.kl_controller = make_kl_controller(control.type, control.kl_coef, control.target_kl, control.horizon)

    def compute(self, batch: DataProto, metrics: Metrics) -> DataProto:
        """Add ``token_level_rewards``, ``advantages`` and ``returns`` to the batch, and statistics to ``metrics``."""
        config, mask = self.config, trained_tokens(batch)
        tokens = {name: batch.packed(name) for name in _TOKEN_INPUTS if name in batch.tensors}
        rewards = self._penalized_rewards(batch, mask, metrics)
        advantages, returns = self.estimate(
            AdvantageInputs(
                token_level_rewards=rewards,
                response_mask=mask,
                values=tokens.get("values"),
                group_ids=batch.non_tensor_batch["uid"],
                reward_baselines=batch.tensors.get("reward_baselines"),
                old_log_probs=tokens.get("old_log_probs"),
                sum_pi_squared=tokens.get("sum_pi_squared"),
                turns=self._turns(batch, metrics) if "turns" in self.estimate.needs else None,
                step_advantage_w=config.gigpo.step_advantage_w,
                rollout_is_weights=None if self.correction is None else self.correction.weights(batch)[0],
                gamma=config.gamma,
                lam=config.lam,
                norm_by_std=config.norm_by_std,
                lengths=sequence_lengths(batch)[1],
            )
        )
        if "entropys" in batch.tensors:
            metrics["actor/entropy"] = masked_mean(batch.packed("entropys"), mask).item()
        if "values" in tokens:
            metrics["critic/vf_explained_var"] = explained_variance(tokens["values"], returns, mask)
        return batch.with_packed({"token_level_rewards": rewards, "advantages": advantages, "returns": returns})

    def _turns(self, batch: DataProto, metrics: Metrics) -> Turns:
        """Find the turns of each response, and the turns of a prompt that begin in the same state.

        Raises:
            DataError: ``anchor_states`` of a row has not one state per turn.
        """
        generated, lengths, config = generated_tokens(batch), sequence_lengths(batch)[1], self.config.gigpo
        numbers = turn_numbers(generated, lengths)
        states, counted = observations(batch.packed("responses"), generated, numbers, lengths), counted_rows(batch)
        for row, named in enumerate(batch.non_tensor_batch.get(ANCHOR_STATES, [])):
            if named is None or not counted[row]:
                continue
            if len(named) != len(states[row]):
                raise DataError(
                    f"row {row}: {ANCHOR_STATES} has {len(named)} states, and its response has {len(states[row])} "
                    "turns; the agent loop must give one state per turn of the policy"
                )
            states[row] = [state if isinstance(state, str) else tuple(state) for state in named]
        threshold = config.similarity_thresh if config.enable_similarity else None
        turns = Turns(numbers, anchor_groups(states, batch.non_tensor_batch["uid"].tolist(), threshold))
        sizes, count = anchored_turns(turns, trained_tokens(batch), lengths)
        if count:
            metrics["gigpo/step_group_size/mean"] = float(sizes.mean())
            metrics["gigpo/compared_turn_fraction"] = float(sizes[sizes > 1].sum()) / count
        return turns

    def _penalized_rewards(self, batch: DataProto, mask: Tensor, metrics: Metrics) -> Tensor:
        """Compute the rewards, packed ``[n]``: shaped scores minus the EOS and KL penalties, then whitened."""
        shaped = "token_level_rewards" if "token_level_rewards" in batch.tensors else "token_level_scores"
        rewards = self._subtract_eos_penalty(batch, batch.packed(shaped), metrics)
        rewards = self._subtract_kl_penalty(batch, rewards, mask, metrics)
        return whiten_rewards(rewards, mask, sequence_lengths(batch)[1]) if self.config.whiten_rewards else rewards

    def _subtract_eos_penalty(self, batch: DataProto, rewards: Tensor, metrics: Metrics) -> Tensor:
        if self.config.missing_eos_penalty is None:
            return rewards
        counted, lengths = counted_rows(batch), sequence_lengths(batch)[1]
        missing = missing_eos(batch.packed("responses"), lengths - 1, self.eos_token_ids, lengths)
        metrics["reward/missing_eos_fraction"] = masked_mean(missing.double(), counted).item()
        penalties = torch.full((len(batch),), -self.config.missing_eos_penalty)
        return add_at_last(rewards, penalties, counted & missing, lengths - 1, lengths)

    def _subtract_kl_penalty(self, batch: DataProto, rewards: Tensor, mask: Tensor, metrics: Metrics) -> Tensor:
        if self.kl_controller is None:
            return rewards
        coefficient = self.kl_controller.value
        if self.config.uses_full_kl:
            distance = batch.packed("ref_kl")
        else:
            distance = kl_penalty(batch.packed("old_log_probs"), batch.packed("ref_log_prob"), self.config.kl_penalty)
        rewards, kl = apply_kl_penalty(rewards, distance, mask, coefficient, sequence_lengths(batch)[1])
        self.kl_controller.update(kl, len(batch))
        metrics["actor/reward_kl_penalty"] = kl
        metrics["actor/reward_kl_penalty_coeff"] = coefficient
        return rewards
