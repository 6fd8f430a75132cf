"""Sections of the trained roles and the reference: `actor_rollout_ref.{actor,ref}` and `critic`."""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

from dataclasses import dataclass

from megarl.base.algorithm_names import FULL_KL, KL_KINDS, LOSS_AGG_MODES, LOSS_MODES
from megarl.config.keys import derived_key, key, section
from megarl.config.schema.model import (
    AdapterKeys,
    CheckpointConfig,
    LogProbBatchConfig,
    MegatronConfig,
    OptimConfig,
    OwnDevicesConfig,
    UpdateBatchConfig,
)
from megarl.config.schema.run import RoleProfilerConfig


@dataclass(frozen=True)
class PolicyLossConfig:
    """Policy loss; formulas in docs/reference/algorithms.md."""

    loss_mode: str = key(
        "vanilla",
        "Policy loss; vanilla = PPO's clipped loss. gspo and geo_mean clip a different ratio: set the clip range with "
        "them. clip_cov, kl_cov and m2po cost an additional forward pass. dppo_tv, dppo_kl, m2po and topr suit stale "
        "data.",
        choices=tuple(LOSS_MODES),
        custom="function",
    )
    clip_cov_ratio: float = key(0.0002, "Share of the tokens that clip_cov removes.", above=0, at_most=1)
    clip_cov_lb: float = key(1.0, "clip_cov selects tokens whose covariance is above this value.")
    clip_cov_ub: float = key(5.0, "clip_cov selects tokens whose covariance is below this value.")
    kl_cov_ratio: float = key(0.0002, "Share of the tokens that kl_cov penalizes.", above=0, at_most=1)
    ppo_kl_coef: float = key(0.1, "Weight of the KL penalty of kl_cov.", at_least=0)
    m2_threshold: float = key(
        0.04, "m2po masks outliers until the mean of the squared log-ratios is at most this value.", above=0
    )


@dataclass(frozen=True)
class RouterReplayConfig:
    """Replay of the experts that each token was sent to, for models with a mixture of experts (docs/how_to/moe.md)."""

    mode: str = key(
        "disabled",
        "R2 = the update uses the experts that the pass for old log-probs selected. R3 = that pass and the update use "
        "those of the rollout engine.",
        choices=("disabled", "R2", "R3"),
    )

    @property
    def enable(self) -> bool:
        """Whether the update replays routes."""
        return self.mode != "disabled"

    @property
    def from_engine(self) -> bool:
        """Whether the rollout engine returns the routes."""
        return self.mode == "R3"


@dataclass(frozen=True)
class ActorConfig(UpdateBatchConfig):
    """The policy's update."""

    ppo_mini_batch_size: int = key(
        256, "PROMPTS per optimizer step; each brings its `rollout.n` samples, in every layout.", at_least=1
    )
    ppo_epochs: int = key(1, "Passes over a step's samples.", at_least=1)
    shuffle: bool = key(
        False,
        "Shuffle a step's samples, also those of one prompt, before they are cut into mini-batches of actor and "
        "critic; false = samples of a prompt stay together (see `trainer.balance_batch`).",
    )
    clip_ratio: float = key(0.2, "Largest distance of the probability ratio from 1 before it is clipped.", above=0)
    clip_ratio_low: float | None = derived_key("Clip range below 1; auto = `clip_ratio`.", above=0, at_most=1)
    clip_ratio_high: float | None = derived_key("Clip range above 1; auto = `clip_ratio`.", above=0)
    clip_ratio_c: float = key(3.0, "Dual clip: largest ratio at a negative advantage.", above=1)
    tau_pos: float = key(1.0, "sapo: steepness of its gate at a positive advantage.", above=0)
    tau_neg: float = key(1.05, "sapo: steepness of its gate at other advantages.", above=0)
    loss_agg_mode: str | None = derived_key(
        "Aggregation of per-token losses; auto = the default of the policy loss: seq-mean-token-mean for gspo, "
        "geo_mean and sapo, seq-mean-token-sum for topr, else token-mean.",
        choices=LOSS_AGG_MODES,
    )
    loss_scale_factor: int | None = derived_key(
        "Divisor of seq-mean-token-sum-norm, in tokens; auto = `data.max_response_length`.", at_least=1
    )
    entropy_coeff: float = key(0.0, "Weight of the entropy bonus.", at_least=0)
    calculate_sum_pi_squared: bool | None = derived_key(
        "Compute the sum of the squared probabilities of each token's distribution with the old log-probs; auto = if "
        "`algorithm.adv_estimator` is an optimal token baseline. A custom estimator may need it.",
    )
    use_kl_loss: bool = key(False, "Add the KL to the reference policy to the loss.")
    kl_loss_coef: float = key(0.001, "Weight of the KL loss; read with `use_kl_loss`.", at_least=0)
    kl_loss_type: str = key(
        "low_var_kl",
        "Estimator of the KL loss; read with `use_kl_loss`. A + takes the gradient of k2, which is the gradient of "
        "the KL; full = exact, over the whole vocabulary.",
        choices=KL_KINDS,
    )
    state_masking: bool = key(
        True,
        "Mask tool results and retrieved documents in losses, KL, advantages and entropy; they stay in the context. "
        "false = train on them like on the policy's tokens.",
    )
    freeze_vision_tower: bool = key(
        False,
        "Leave the vision tower of a model with images as it is; refused for other models. With `lora_rank` it is "
        "left in any case, unless keys of `model.lora` train it.",
    )
    vision_lr_factor: float = key(
        1.0, "Learning rate of a trained vision tower, as a multiple of `optim.lr`; 1 without one.", above=0
    )
    policy_loss: PolicyLossConfig = section(PolicyLossConfig)
    router_replay: RouterReplayConfig = section(RouterReplayConfig)
    optim: OptimConfig = section(OptimConfig)
    megatron: MegatronConfig = section(MegatronConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    profiler: RoleProfilerConfig = section(RoleProfilerConfig)

    @property
    def uses_full_kl(self) -> bool:
        """Whether the loss contains the exact KL to the reference."""
        return self.use_kl_loss and self.kl_loss_type == FULL_KL


@dataclass(frozen=True)
class RefConfig(OwnDevicesConfig, LogProbBatchConfig):
    """The reference policy; it exists if a KL term or reward shaping reads it."""

    megatron: MegatronConfig | None = section(
        None,
        "Layout of separate reference workers; null = no separate workers: the reference's weights stay in host memory "
        "and are swapped into the actor's model.",
        inherits=True,
    )
    profiler: RoleProfilerConfig = section(RoleProfilerConfig)


@dataclass(frozen=True)
class CriticModelConfig(AdapterKeys):
    """Initial model of the critic, and its adapters."""

    path: str | None = derived_key("Folder of the Hugging Face model; auto = the actor's. A value head is added.")


@dataclass(frozen=True)
class CriticConfig(OwnDevicesConfig, UpdateBatchConfig):
    """The value function; it exists if the advantage estimator needs values."""

    enable: bool | None = derived_key(
        "Have a critic; auto = if `algorithm.adv_estimator` is gae. A custom estimator may need one."
    )
    model: CriticModelConfig = section(CriticModelConfig)
    ppo_mini_batch_size: int | None = derived_key("PROMPTS per optimizer step; auto = the actor's.", at_least=1)
    ppo_epochs: int | None = derived_key("Passes over a step's samples; auto = the actor's.", at_least=1)
    vf_coef: float = key(
        1.0,
        "Weight of the value loss. The critic has a separate optimizer: Adam's steps depend on this weight only "
        "through `optim.clip_grad`; the learning rate is `optim.lr`.",
        above=0,
    )
    cliprange_value: float = key(0.5, "Largest distance of a value from the old value before it is clipped.", above=0)
    loss_agg_mode: str | None = derived_key(
        "Aggregation of per-token losses; auto = the actor's.", choices=LOSS_AGG_MODES
    )
    optim: OptimConfig = section(OptimConfig, lr=1e-5)
    megatron: MegatronConfig = section(MegatronConfig, inherits=True)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    profiler: RoleProfilerConfig = section(RoleProfilerConfig)
