"""The roles with a Megatron model: actor, reference and critic."""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

from dataclasses import dataclass

from megarl.config.choices import KL_KINDS, LOSS_AGG_MODES, LOSS_MODES
from megarl.config.keys import key, section
from megarl.config.parts import (
    LogProbBatchConfig,
    MegatronConfig,
    OptimConfig,
    UpdateBatchConfig,
)
from megarl.config.saving import CheckpointConfig
from megarl.config.tracing import RoleProfilerConfig


@dataclass
class PolicyLossConfig:
    """Which policy loss; formulas in docs/algorithms.md."""

    loss_mode: str = key(
        "vanilla",
        "Policy loss; vanilla = PPO's clipped one. What gspo and geo_mean clip is another ratio: set the clip range "
        "with them. clip_cov and kl_cov cost a forward pass more.",
        choices=tuple(LOSS_MODES),
        custom="function",
    )
    clip_cov_ratio: float = key(0.0002, "Share of the tokens that clip_cov takes out.", above=0, at_most=1)
    clip_cov_lb: float = key(1.0, "clip_cov takes tokens whose covariance is above this.")
    clip_cov_ub: float = key(5.0, "clip_cov takes tokens whose covariance is below this.")
    kl_cov_ratio: float = key(0.0002, "Share of the tokens that kl_cov holds back.", above=0, at_most=1)
    ppo_kl_coef: float = key(0.1, "Weight of the KL by which kl_cov holds them back.", at_least=0)


@dataclass
class ActorConfig(UpdateBatchConfig):
    """The policy's update."""

    ppo_mini_batch_size: int = key(
        256, "PROMPTS per optimizer step; each brings its `rollout.n` samples, whatever the layout.", at_least=1
    )
    ppo_epochs: int = key(1, "Passes over a step's samples.", at_least=1)
    clip_ratio: float = key(0.2, "How far the probability ratio may move from 1 before it is clipped.", above=0)
    clip_ratio_low: float | None = key(None, "Clip range below 1; null = `clip_ratio`.", above=0, at_most=1)
    clip_ratio_high: float | None = key(None, "Clip range above 1; null = `clip_ratio`.", above=0)
    clip_ratio_c: float = key(3.0, "Dual clip: largest ratio that counts where the advantage is negative.", above=1)
    tau_pos: float = key(1.0, "sapo: steepness of its gate where the advantage is positive.", above=0)
    tau_neg: float = key(1.05, "sapo: the same where it is not.", above=0)
    loss_agg_mode: str | None = key(
        None,
        "How per-token losses become one number; null = as the policy loss has it: seq-mean-token-mean for gspo, "
        "geo_mean and sapo, else token-mean.",
        choices=LOSS_AGG_MODES,
    )
    loss_scale_factor: int | None = key(
        None, "What seq-mean-token-sum-norm divides by, in tokens; null = `data.max_response_length`.", at_least=1
    )
    entropy_coeff: float = key(0.0, "Weight of the entropy bonus.", at_least=0)
    use_kl_loss: bool = key(False, "Add the KL to the reference policy to the loss.")
    kl_loss_coef: float = key(0.001, "Weight of the KL loss; read with `use_kl_loss`.", at_least=0)
    kl_loss_type: str = key(
        "low_var_kl",
        "Estimator of the KL loss; read with `use_kl_loss`. A + takes the gradient of k2, which is the KL's own; full "
        "= exact, over the whole vocabulary.",
        choices=KL_KINDS,
    )
    state_masking: bool = key(
        True,
        "Leave what tools and the retrieval server said out of losses, KL, advantages and entropy; it stays in the "
        "context. Without, it is trained on like the policy's own tokens.",
    )
    policy_loss: PolicyLossConfig = section(PolicyLossConfig)
    optim: OptimConfig = section(OptimConfig)
    megatron: MegatronConfig = section(MegatronConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    profiler: RoleProfilerConfig = section(RoleProfilerConfig)


@dataclass
class RefConfig(LogProbBatchConfig):
    """The reference policy; it exists where a KL is taken to it or it has a part in the reward."""

    megatron: MegatronConfig | None = section(
        None,
        "Layout of the reference's own workers, in which what is left out is the actor's; null = the actor's layout: "
        "its weights rest in host memory and are swapped into the actor's own model.",
    )
    profiler: RoleProfilerConfig = section(RoleProfilerConfig)


@dataclass
class CriticModelConfig:
    """Where the critic starts from."""

    path: str | None = key(None, "Folder of the Hugging Face model; null = the actor's. A value head is added.")


@dataclass
class CriticConfig(UpdateBatchConfig):
    """The value function; it exists where the advantage estimator stands on it."""

    enable: bool | None = key(
        None, "Have a critic; null = where `algorithm.adv_estimator` is gae. An estimator of one's own may want one."
    )
    model: CriticModelConfig = section(CriticModelConfig)
    ppo_mini_batch_size: int | None = key(None, "PROMPTS per optimizer step; null = the actor's.", at_least=1)
    ppo_epochs: int | None = key(None, "Passes over a step's samples; null = the actor's.", at_least=1)
    vf_coef: float = key(
        1.0,
        "Weight of the value loss. The critic has an optimizer of its own: Adam's steps depend on it only through "
        "`optim.clip_grad`; how fast the critic learns is `optim.lr`.",
        above=0,
    )
    cliprange_value: float = key(0.5, "How far a value may move from the old one before it is clipped.", above=0)
    loss_agg_mode: str | None = key(
        None, "How per-token losses become one number; null = the actor's.", choices=LOSS_AGG_MODES
    )
    optim: OptimConfig = section(OptimConfig, lr=1e-5)
    megatron: MegatronConfig = section(MegatronConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    profiler: RoleProfilerConfig = section(RoleProfilerConfig)
