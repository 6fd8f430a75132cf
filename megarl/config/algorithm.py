"""From scores to what is learned from: the `algorithm` section."""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

from dataclasses import dataclass

from megarl.config.choices import ADV_ESTIMATORS, FULL_KL, KL_KINDS, REWEIGHT_METHODS
from megarl.config.keys import key, section
from megarl.config.rollout_correction import RolloutCorrectionConfig
from megarl.config.selection import BestOfNConfig, FilterGroupsConfig
from megarl.config.shaping import RefQualityConfig, ReprAlignConfig


@dataclass
class KLControlConfig:
    """Coefficient of the KL in the reward; read with `use_kl_in_reward`."""

    type: str = key("fixed", "Keep the coefficient, or steer it towards `target_kl`.", choices=("fixed", "adaptive"))
    kl_coef: float = key(0.001, "Coefficient, or the one to start from.", at_least=0)
    horizon: int = key(10000, "Samples over which the adaptive coefficient reacts.", at_least=1)
    target_kl: float = key(0.1, "Mean KL that the adaptive coefficient aims at, in nats per token.", above=0)


@dataclass
class PFPPOConfig:
    """How the answers to learn from are drawn; read with `use_pf_ppo`."""

    reweight_method: str = key(
        "pow",
        "An answer's chance: pow = a power of its score's size; max_min = only the best and the worst; max_random = "
        "the best four times as likely as others.",
        choices=REWEIGHT_METHODS,
    )
    weight_pow: float = key(2.0, "The power of pow.", at_least=0)


@dataclass
class AlgorithmConfig:
    """Advantages, and the KL in the reward."""

    adv_estimator: str = key(
        "gae",
        "How advantages are estimated: gae has a critic, reinforce_plus_plus has none, remax compares with a greedy "
        "answer, the others compare the `rollout.n` answers to a prompt; formulas in docs/algorithms.md.",
        choices=tuple(ADV_ESTIMATORS),
        custom="function",
    )
    gamma: float = key(1.0, "Discount per token.", above=0, at_most=1)
    lam: float = key(1.0, "Lambda of GAE.", at_least=0, at_most=1)
    norm_adv_by_std_in_grpo: bool = key(
        True, "Divide a group's advantages by the standard deviation of its scores; read by grpo and grpo_passk."
    )
    missing_eos_penalty: float | None = key(
        None, "Subtracted from the score of an answer that does not end with an end-of-sequence token.", at_least=0
    )
    whiten_rewards: bool = key(
        False, "Scale the rewards of all trained tokens of a batch to variance 1 about their mean, before advantages."
    )
    use_kl_in_reward: bool = key(False, "Subtract the KL to the reference policy from each token's reward.")
    kl_penalty: str = key(
        "kl", "Estimator of the KL in the reward; full = exact, over the whole vocabulary.", choices=KL_KINDS
    )
    kl_ctrl: KLControlConfig = section(KLControlConfig)
    use_pf_ppo: bool = key(
        False, "PF-PPO: learn from answers drawn by their scores, as many as there are and some more than once."
    )
    pf_ppo: PFPPOConfig = section(PFPPOConfig)
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig)
    best_of_n: BestOfNConfig = section(BestOfNConfig)
    ref_quality_score: RefQualityConfig = section(RefQualityConfig)
    repr_align: ReprAlignConfig = section(ReprAlignConfig)
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)

    @property
    def uses_full_kl(self) -> bool:
        """Whether the exact KL to the reference is taken off the reward."""
        return self.use_kl_in_reward and self.kl_penalty == FULL_KL
