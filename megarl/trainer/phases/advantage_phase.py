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
    turn_numbers,
    warmup_steps,
    whiten_rewards,
)
from megarl.base.errors import DataError
from megarl.config.schema.algorithm import AlgorithmConfig, ScheduledWeightConfig
from megarl.data import DataProto, sequence_lengths
from megarl.trainer.phases.correction_phase import RolloutCorrectionPhase
from megarl.trainer.records.metrics import Metrics, generated_tokens, summary

ANCHOR_STATES = "anchor_states"
"""Column with the states before the turns of a response, from agent loops that know them."""


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
        tensors = batch.tensors
        rewards = tensors["token_level_scores"]
        if self.quality is not None:
            rewards = self._blend_quality(batch, self.quality.weight(step), metrics)
        if self.alignment is not None:
            weight, fired = self.alignment.weight(step), "ref_similarity" in tensors
            metrics |= {"repr_align/weight": weight, "repr_align/fired": float(fired)}
            rows, last = _trained_rows_and_last_tokens(batch)
            bonus = weight * tensors["ref_similarity"] if fired else torch.zeros(len(batch))
            metrics |= summary("repr_align/reward_added", bonus[rows])
            rewards = add_at_last(rewards, bonus, rows, last)
        return batch.with_columns({"token_level_rewards": rewards}, {})

    @staticmethod
    def _blend_quality(batch: DataProto, weight: float, metrics: Metrics) -> Tensor:
        tensors = batch.tensors
        rows, last = _trained_rows_and_last_tokens(batch)
        quality = sequence_quality(tensors["ref_log_prob"], tensors["response_mask"])
        invalid = quality.isnan().nonzero()
        if len(invalid):
            raise DataError(f"ref_log_prob of row {int(invalid[0])} is not a number: ref_quality_score cannot blend it")
        scores = tensors["token_level_scores"]
        blended = blend_quality(scores, quality, rows, last, weight)
        change = (blended.double() - scores.double()).sum(-1)[rows]
        metrics |= {"ref_quality/weight": weight, "ref_quality/left_out": float((~rows).sum())}
        metrics |= summary("ref_quality/quality", quality[rows])
        metrics |= summary("ref_quality/reward_change", change)
        return blended


def _trained_rows_and_last_tokens(batch: DataProto) -> tuple[Tensor, Tensor]:
    """Rows with a trained token (bool), and the index of each row's last response token: ``[b]`` both."""
    return batch.tensors["response_mask"].bool().any(-1), sequence_lengths(batch)[1] - 1


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
        batch = self._penalize(batch, metrics)
        tensors, config = batch.tensors, self.config
        advantages, returns = self.estimate(
            AdvantageInputs(
                token_level_rewards=tensors["token_level_rewards"],
                response_mask=tensors["response_mask"],
                values=tensors.get("values"),
                group_ids=batch.non_tensor_batch["uid"],
                reward_baselines=tensors.get("reward_baselines"),
                old_log_probs=tensors.get("old_log_probs"),
                sum_pi_squared=tensors.get("sum_pi_squared"),
                turns=self._turns(batch, metrics) if "turns" in self.estimate.needs else None,
                step_advantage_w=config.gigpo.step_advantage_w,
                rollout_is_weights=None if self.correction is None else self.correction.weights(batch)[0],
                gamma=config.gamma,
                lam=config.lam,
                norm_by_std=config.norm_by_std,
            )
        )
        mask = tensors["response_mask"]
        if "entropys" in tensors:
            metrics["actor/entropy"] = masked_mean(tensors["entropys"], mask).item()
        if "values" in tensors:
            metrics["critic/vf_explained_var"] = explained_variance(tensors["values"], returns, mask)
        return batch.with_columns({"advantages": advantages, "returns": returns}, {})

    def _turns(self, batch: DataProto, metrics: Metrics) -> Turns:
        """Find the turns of each response, and the turns of a prompt that begin in the same state.

        Raises:
            DataError: ``anchor_states`` of a row has not one state per turn.
        """
        generated, config = generated_tokens(batch), self.config.gigpo
        numbers = turn_numbers(generated)
        states = observations(batch.tensors["responses"], generated, numbers)
        for row, named in enumerate(batch.non_tensor_batch.get(ANCHOR_STATES, [])):
            if named is None or not batch.tensors["response_mask"][row].any():
                continue
            if len(named) != len(states[row]):
                raise DataError(
                    f"row {row}: {ANCHOR_STATES} has {len(named)} states, and its response has {len(states[row])} "
                    "turns; the agent loop must give one state per turn of the policy"
                )
            states[row] = [state if isinstance(state, str) else tuple(state) for state in named]
        threshold = config.similarity_thresh if config.enable_similarity else None
        turns = Turns(numbers, anchor_groups(states, batch.non_tensor_batch["uid"].tolist(), threshold))
        sizes, count = anchored_turns(turns, batch.tensors["response_mask"])
        if count:
            metrics["gigpo/step_group_size/mean"] = float(sizes.mean())
            metrics["gigpo/compared_turn_fraction"] = float(sizes[sizes > 1].sum()) / count
        return turns

    def _penalize(self, batch: DataProto, metrics: Metrics) -> DataProto:
        """Compute ``token_level_rewards``: shaped scores minus the EOS and KL penalties, then whitened."""
        tensors = batch.tensors
        rewards = tensors.get("token_level_rewards", tensors["token_level_scores"])  # after reward shaping
        rewards = self._subtract_eos_penalty(batch, rewards, metrics)
        rewards = self._subtract_kl_penalty(batch, rewards, metrics)
        if self.config.whiten_rewards:
            rewards = whiten_rewards(rewards, batch.tensors["response_mask"])
        return batch.with_columns({"token_level_rewards": rewards}, {})

    def _subtract_eos_penalty(self, batch: DataProto, rewards: Tensor, metrics: Metrics) -> Tensor:
        if self.config.missing_eos_penalty is None:
            return rewards
        counted = batch.tensors["response_mask"].bool().any(-1)
        last = sequence_lengths(batch)[1] - 1
        missing = missing_eos(batch.tensors["responses"], last, self.eos_token_ids)
        metrics["reward/missing_eos_fraction"] = masked_mean(missing.double(), counted).item()
        penalties = torch.full((len(batch),), -self.config.missing_eos_penalty, device=rewards.device)
        return add_at_last(rewards, penalties, counted & missing, last)

    def _subtract_kl_penalty(self, batch: DataProto, rewards: Tensor, metrics: Metrics) -> Tensor:
        if self.kl_controller is None:
            return rewards
        tensors, coefficient = batch.tensors, self.kl_controller.value
        if self.config.uses_full_kl:
            distance = tensors["ref_kl"]
        else:
            distance = kl_penalty(tensors["old_log_probs"], tensors["ref_log_prob"], self.config.kl_penalty)
        rewards, kl = apply_kl_penalty(rewards, distance, tensors["response_mask"], coefficient)
        self.kl_controller.update(kl, len(batch))
        metrics["actor/reward_kl_penalty"] = kl
        metrics["actor/reward_kl_penalty_coeff"] = coefficient
        return rewards
