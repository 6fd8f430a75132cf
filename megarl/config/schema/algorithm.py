"""The sections `algorithm` (advantages, KL in the reward, selection, rollout correction) and `async_training`."""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from megarl.base.algorithm_names import (
    ADV_ESTIMATORS,
    FULL_KL,
    GIGPO,
    GIGPO_MODES,
    KL_CONTROLLER_TYPES,
    KL_KINDS,
    REWEIGHT_KINDS,
    WEIGHT_SCHEDULES,
)
from megarl.config.keys import key, section

SYNC, COLOCATED, DISAGGREGATED = "sync", "colocated", "disaggregated"
RECOMPUTE, LOGLINEAR = "recompute", "loglinear"
SCOPES = ("token", "seq_sum", "seq_mean", "seq_max")
EARLIER_NAMES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""Earlier names of verl for some of the options."""


@dataclass(frozen=True)
class KLControlConfig:
    """Coefficient of the KL in the reward; read with `use_kl_in_reward`."""

    type: str = key(
        "fixed", "fixed = constant coefficient; adaptive = steered towards `target_kl`.", choices=KL_CONTROLLER_TYPES
    )
    kl_coef: float = key(0.001, "Coefficient; for adaptive, the initial one.", at_least=0)
    horizon: int = key(10000, "Samples over which the adaptive coefficient reacts.", at_least=1)
    target_kl: float = key(0.1, "Target of the adaptive coefficient: mean KL, in nats per token.", above=0)


@dataclass(frozen=True)
class PFPPOConfig:
    """Reweighting of PF-PPO; read with `use_pf_ppo`."""

    reweight_method: str = key(
        "pow",
        "Probability of a response: pow = a power of its absolute score; max_min = only the best and the worst; "
        "max_random = the best four times as likely as others.",
        choices=REWEIGHT_KINDS,
    )
    weight_pow: float = key(2.0, "Exponent of pow.", at_least=0)


@dataclass(frozen=True)
class FilterGroupsConfig:
    """Dynamic sampling, as in DAPO: drop zero-variance groups and generate replacements."""

    enable: bool = key(False, "Train only on groups whose responses differ in `metric`.")
    metric: str = key(
        "score",
        "Value to compare responses by: score (or seq_reward), or a number that the reward function returns with the "
        "score, such as acc.",
    )
    max_num_gen_batches: int = key(
        0, "Most prompts that are admitted for a batch, in units of `data.gen_batch_size`; 0 = no limit.", at_least=0
    )
    on_shortage: str = key(
        "stop",
        "Behaviour if `max_num_gen_batches` give too few groups: stop = save and stop the run; fill = fill the "
        "step with zero-variance groups.",
        choices=("stop", "fill"),
    )


@dataclass(frozen=True)
class BestOfNConfig:
    """Rejection sampling: train only on the best of a prompt's `rollout.n` responses."""

    enable: bool = key(False, "Train on the best `keep` responses to each prompt.")
    keep: int = key(1, "Responses per prompt to train on; fewer than `rollout.n`.", at_least=1)
    min_score: float | None = key(None, "Mask selected responses below this score in the loss; null = none.")


@dataclass(frozen=True)
class ScheduledWeightConfig:
    """Weight ``w`` that rises from 0 over a warm-up and then stays constant."""

    enable: bool = key(False, "Use this weight.")
    max_weight: float = key(0.0, "Largest w.", at_least=0)
    warmup_ratio: float = key(0.7, "Warm-up as a share of the run's training steps; 0 = none.", at_least=0, at_most=1)
    schedule: str = key(
        "linear",
        "Shape of the warm-up; constant = the largest w from the first step.",
        choices=WEIGHT_SCHEDULES,
        custom="function",
    )
    steps: int = key(3, "Number of equal stairs; read with `schedule=step`.", at_least=1)


@dataclass(frozen=True)
class RefQualityConfig(ScheduledWeightConfig):
    """Blend the score with the response's likelihood under the reference policy (docs/reference/reward_shaping.md)."""

    enable: bool = key(False, "Blend: reward = (1 - w) * score + w * quality.")
    max_weight: float = key(0.3, "Largest w.", at_least=0, at_most=1)


@dataclass(frozen=True)
class RefAlignmentConfig(ScheduledWeightConfig):
    """Cosine similarity of response and ground truth in the reference policy's representation."""

    enable: bool = key(False, "Add w * cosine to the reward, in steps with a high entropy of the policy.")
    max_weight: float = key(0.2, "Largest w.", at_least=0)
    schedule: str = key(
        "sigmoid",
        "Shape of the warm-up; constant = the largest w from the first step.",
        choices=WEIGHT_SCHEDULES,
        custom="function",
    )
    entropy_high_threshold: float = key(
        0.2, "Mean entropy of a step's response tokens, in nats, above which the bonus is added.", at_least=0
    )


@dataclass(frozen=True)
class ReprAlignConfig:
    """Reward responses whose representation is close to the ground truth's (docs/reference/reward_shaping.md)."""

    enable: bool = key(False, "Align representations, by the settings of `ref_alignment`.")
    ref_alignment: RefAlignmentConfig = section(RefAlignmentConfig)


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Correction of the mismatch between rollout engine and actor; needs `rollout.calculate_log_probs`."""

    rollout_is: str | None = key(
        None,
        "Weight each token's policy loss by the importance ratio between actor and engine, of the token or of its "
        "whole sequence; null = no weights.",
        choices=("token", "sequence"),
    )
    rollout_is_threshold: str = key(
        "2.0",
        "Largest weight, above 1; larger weights are truncated. Two bounds, as '0.5_5.0': weights outside become 0.",
    )
    rollout_is_batch_normalize: bool = key(False, "Divide the weights by their mean over the batch.")
    rollout_rs: str | None = key(
        None,
        "Rejection: mask tokens or sequences with ratios outside the bounds. A comma-separated list of "
        "{token,seq_sum,seq_mean}_{k1,k2,k3}, seq_max_{k2,k3} (token, sequence and geometric mean token_k1, "
        "seq_sum_k1 and seq_mean_k1); null = no rejection.",
    )
    rollout_rs_threshold: str | None = key(
        None,
        "Bounds of `rollout_rs`, comma-separated, one for all options or one for each: for k1 of the ratio, as "
        "'0.5_2.0' or '2.0' (lower bound: 1/2.0); for k2 and k3 the largest estimate; null = none.",
    )
    bypass_mode: bool = key(
        False,
        "Use the engine's log-probs as old log-probs instead of computing them: PPO's ratio is relative to the engine.",
    )


@dataclass(frozen=True)
class GiGPOConfig:
    """Comparison of turns that begin in the same state; read with `adv_estimator=gigpo` (docs/how_to/agents.md)."""

    step_advantage_w: float = key(
        1.0, "Weight of the advantage of a turn; 0 = compare whole responses only.", at_least=0
    )
    mode: str = key(
        "mean_std_norm",
        "Normalization of both advantages: mean_norm = subtract the mean of the group, mean_std_norm = also divide by "
        "its standard deviation.",
        choices=tuple(GIGPO_MODES),
    )
    enable_similarity: bool = key(
        False, "Turns begin in the same state if their states are similar, not only if equal."
    )
    similarity_thresh: float = key(
        0.95,
        "Smallest ratio of similar states, by Python's difflib; read with `enable_similarity`.",
        above=0,
        at_most=1,
    )


@dataclass(frozen=True)
class AlgorithmConfig:
    """Advantages, and the KL in the reward."""

    adv_estimator: str = key(
        "gae",
        "Advantage estimator: gae has a critic, reinforce_plus_plus has none, remax compares with a greedy response, "
        "the others compare the `rollout.n` responses of a group, gigpo also their turns; formulas in "
        "docs/reference/algorithms.md.",
        choices=tuple(ADV_ESTIMATORS),
        custom="function",
    )
    gamma: float = key(1.0, "Discount per token; for gigpo per turn.", above=0, at_most=1)
    lam: float = key(1.0, "Lambda of GAE.", at_least=0, at_most=1)
    norm_adv_by_std_in_grpo: bool = key(
        True, "Divide a group's advantages by the standard deviation of its scores; read by grpo and grpo_passk."
    )
    gigpo: GiGPOConfig = section(GiGPOConfig)
    missing_eos_penalty: float | None = key(
        None, "Penalty on the score of a response that a limit of tokens or turns ended; null = none.", at_least=0
    )
    mask_truncated_completions: bool = key(
        False,
        "Leave responses that a limit of tokens or turns ended out of the updates; their scores still count in the "
        "baselines.",
    )
    whiten_rewards: bool = key(
        False, "Scale the rewards of all trained tokens of a batch to variance 1 around their mean, before advantages."
    )
    use_kl_in_reward: bool = key(False, "Subtract the KL to the reference policy from each token's reward.")
    kl_penalty: str = key(
        "kl", "Estimator of the KL in the reward; full = exact, over the whole vocabulary.", choices=KL_KINDS
    )
    kl_ctrl: KLControlConfig = section(KLControlConfig)
    use_pf_ppo: bool = key(
        False, "PF-PPO: resample the batch by score, with repetition; the number of responses stays the same."
    )
    pf_ppo: PFPPOConfig = section(PFPPOConfig)
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig)
    best_of_n: BestOfNConfig = section(BestOfNConfig)
    ref_quality_score: RefQualityConfig = section(RefQualityConfig)
    repr_align: ReprAlignConfig = section(ReprAlignConfig)
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)

    @property
    def norm_by_std(self) -> bool:
        """Whether the estimator divides by the standard deviation of a group."""
        return GIGPO_MODES[self.gigpo.mode] if self.adv_estimator == GIGPO else self.norm_adv_by_std_in_grpo

    @property
    def uses_full_kl(self) -> bool:
        """Whether the reward contains the exact KL to the reference."""
        return self.use_kl_in_reward and self.kl_penalty == FULL_KL


@dataclass(frozen=True)
class AsyncTrainingConfig:
    """Generation and training at the same time; see docs/how_to/asynchronous.md."""

    mode: str = key(
        SYNC,
        "sync = a step generates, then trains, on the same devices; colocated = likewise, and training begins when a "
        "batch is complete: responses in flight pause and continue after the weight sync; disaggregated = the engines "
        "have devices of their own (`rollout.nnodes`) and generate during training.",
        choices=(SYNC, COLOCATED, DISAGGREGATED),
    )
    max_staleness: float = key(
        0.0,
        "Largest staleness of a trained token, in weight versions; so many batches are admitted ahead. A fraction "
        "admits that part of a batch. 0 = synchronous.",
        at_least=0,
    )
    sync_interval: int = key(
        1,
        "Mini-batches between weight syncs in disaggregated mode, each trained as soon as its groups are complete; "
        "`sync_interval` x `ppo_mini_batch_size` = `train_batch_size`.",
        at_least=1,
    )
    partial_rollout: bool = key(
        True,
        "A weight sync interrupts the responses in flight and continues them with the new weights; false = it waits "
        "for their ends.",
    )
    sync_wave_size: int | None = key(
        None,
        "Replicas that hold their responses and receive the weights at the same time in disaggregated mode, wave after "
        "wave, while the others generate (rolling sync); null = all.",
        at_least=1,
    )
    hybrid_rollout: bool = key(
        False,
        "The trainer's devices have engine replicas too, which generate in disaggregated mode from a weight sync until "
        "the first mini-batch is complete, if that saves more time than the switch takes.",
    )
    proximal: str = key(
        RECOMPUTE,
        "Old log-probs of stale samples, about which the ratio is clipped: recompute = by a forward pass with the "
        "weights of the last sync; loglinear = an estimate by weight versions, without a pass "
        "(docs/reference/rollout_correction.md). `algorithm.rollout_correction.bypass_mode` uses the engine's instead.",
        choices=(RECOMPUTE, LOGLINEAR),
    )


REJECTION_OPTIONS = tuple(
    f"{scope}_{k}" for scope in SCOPES for k in ("k1", "k2", "k3") if (scope, k) != ("seq_max", "k1")
)


class UnknownRejection(ValueError):
    """`rollout_rs` has an option that does not exist."""


class WeightBounds(NamedTuple):
    """Bounds as a key holds them; ``lower`` is None for a single number."""

    lower: float | None
    upper: float


class RejectionRule(NamedTuple):
    """One rejection: its current name and the bounds of its ratio (``k1``) or estimate (``k2``, ``k3``)."""

    option: str
    lower: float
    upper: float


def weight_bounds(config: RolloutCorrectionConfig) -> WeightBounds:
    """Parse the bounds of `rollout_is_threshold`.

    Raises:
        ValueError: it is neither one bound nor two; the message shows the right form.
    """
    bounds = _bounds(config.rollout_is_threshold)
    if bounds.upper <= 1 or (bounds.lower is not None and bounds.lower > 1):
        raise ValueError("1, the ratio of equal policies, must be within: write '2.0', or '0.5_5.0' in quotes")
    return bounds


def rejection_rules(config: RolloutCorrectionConfig) -> list[RejectionRule]:
    """Parse the options of `rollout_rs` with their bounds; empty without rejection.

    Raises:
        UnknownRejection: an option is unknown.
        ValueError: the bounds do not fit; the message shows the right form.
    """
    options = [EARLIER_NAMES.get(name, name) for name in _entries(config.rollout_rs)]
    for option in options:
        if option not in REJECTION_OPTIONS:
            raise UnknownRejection(f"{option!r} is not known; known are {', '.join(REJECTION_OPTIONS)}")
    bounds = _entries(config.rollout_rs_threshold)
    if options and len(bounds) not in (1, len(options)):
        raise ValueError(f"needs bounds: one for all {len(options)} options of rollout_rs, or one for each")
    return [_rule(option, _bounds(text)) for option, text in zip(options, bounds * len(options), strict=False)]


def _rule(option: str, bounds: WeightBounds) -> RejectionRule:
    if not option.endswith("k1"):
        if bounds.lower is not None:
            raise ValueError(f"{option} has one bound, from above")
        return RejectionRule(option, 0.0, bounds.upper)
    lower = 1 / bounds.upper if bounds.lower is None else bounds.lower
    if not lower <= 1 <= bounds.upper:
        raise ValueError(f"1, the ratio of equal policies, must be within for {option}: write '0.5_2.0' in quotes")
    return RejectionRule(option, lower, bounds.upper)


def _entries(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(",")] if text else []


def _bounds(text: str) -> WeightBounds:
    try:
        *lower, upper = (float(part) for part in text.split("_"))
    except ValueError:
        raise ValueError(f"{text!r} is not a number, or two as '0.5_2.0'") from None
    if len(lower) > 1 or not all(a < b for a, b in pairwise([0.0, *lower, upper, math.inf])):
        raise ValueError(f"{text!r} must be a number above 0, or two that rise, as '0.5_2.0'")
    return WeightBounds(lower[0] if lower else None, upper)
