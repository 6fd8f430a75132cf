"""Top-level schema of the six jobs: train, sft, reward_model, preference, evaluate and generate."""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, TypeVar

from megarl.base.algorithm_names import KTO, PREFERENCE_LOSS_TYPES, estimator_needs
from megarl.config.keys import AUTO, derived_key, key, section
from megarl.config.schema.algorithm import LOGLINEAR, RECOMPUTE, AlgorithmConfig, AsyncTrainingConfig
from megarl.config.schema.data import (
    DataConfig,
    GenerateDataConfig,
    PairDataConfig,
    PreferenceDataConfig,
    PromptsConfig,
    RewardPairDataConfig,
    SFTDataConfig,
    SupervisedDataConfig,
)
from megarl.config.schema.distillation import DistillationConfig
from megarl.config.schema.model import (
    MegatronConfig,
    ModelPathConfig,
    OptimConfig,
    OwnDevicesConfig,
    TrainedModelConfig,
)
from megarl.config.schema.rewards import RewardConfig, TrainingRewardConfig
from megarl.config.schema.roles import ActorConfig, CriticConfig, RefConfig
from megarl.config.schema.rollout import RolloutConfig, TrainingRolloutConfig
from megarl.config.schema.run import (
    EvaluateRunConfig,
    HubConfig,
    PairRunConfig,
    ProfilerConfig,
    RoleProfilerConfig,
    RunConfig,
    SupervisedRunConfig,
    TrainerConfig,
)

ACTOR, ROLLOUT, REFERENCE = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
CRITIC, REWARD_MODEL, TEACHERS = "critic", "reward.model", "distillation"
"""Paths of the sections of roles; all but the actor can have devices of their own."""
SEARCH = f"{ROLLOUT}.multi_turn.search"
POOL_OWNERS = {
    ROLLOUT: "the engines",
    CRITIC: "the critic",
    REFERENCE: "the reference",
    REWARD_MODEL: "the reward model",
    TEACHERS: "the teachers",
}
"""Owners of resource pools in the words of reports."""
STANDARD_INPUT = "-"
"""Entry of `data.prompts` that stands for the lines of the standard input."""


@dataclass(frozen=True)
class PolicyConfig:
    """A policy for generation: its model and its rollout."""

    model: ModelPathConfig = section(ModelPathConfig)
    rollout: RolloutConfig = section(RolloutConfig)

    @property
    def replays_engine_routes(self) -> bool:
        """Whether training replays the experts that the rollout engine selects (routing replay R3)."""
        return False

    @property
    def trains_tower(self) -> bool:
        """Whether the vision tower, if the model has one, is trained."""
        return False


@dataclass(frozen=True)
class ActorRolloutRefConfig(PolicyConfig):
    """The policy: its model, its update, the reference, and generation."""

    model: TrainedModelConfig = section(TrainedModelConfig)
    rollout: TrainingRolloutConfig = section(TrainingRolloutConfig)
    actor: ActorConfig = section(ActorConfig)
    ref: RefConfig = section(RefConfig)

    @property
    def replays_engine_routes(self) -> bool:
        """See :class:`PolicyConfig`."""
        return self.actor.router_replay.from_engine

    @property
    def trains_tower(self) -> bool:
        """See :class:`PolicyConfig`."""
        return self.model.trains_tower if self.model.lora_rank else not self.actor.freeze_vision_tower


@dataclass(frozen=True)
class GenerationJobConfig:
    """Sections of all jobs that generate, as agent loops read them: prompts and policy."""

    data: PromptsConfig = section(PromptsConfig)
    actor_rollout_ref: PolicyConfig = section(PolicyConfig)
    hub: HubConfig = section(HubConfig)


@dataclass(frozen=True)
class ScoredJobConfig(GenerationJobConfig):
    """Sections of training and evaluation: generation and a reward."""

    reward: RewardConfig = section(RewardConfig)

    @property
    def own_pools(self) -> dict[str, OwnDevicesConfig]:
        """Resource pools of the job's roles with devices of their own, by the path of the role's section."""
        keys = self.reward.model
        return {REWARD_MODEL: keys} if keys.enable and keys.nnodes else {}


@dataclass(frozen=True)
class SyncConfig:
    """Weight sync from the actor to the rollout engines."""

    transport: str = key(
        "auto",
        "Transport of the weights; auto = the fastest for each pair of processes: CUDA IPC between GPUs of one node, "
        "shared memory on one node, NCCL or gloo between nodes; inline = Ray's object store.",
        choices=("auto", "shared_memory", "cuda_ipc", "nccl", "gloo", "inline"),
    )
    bucket_megabytes: int = key(
        256, "Bucket size per sending and per receiving process, in MiB; at most two buckets are in flight.", at_least=1
    )
    timeout_s: float = key(
        600.0,
        "Seconds that each part of a sync, and the joining of processes (gloo, NCCL), may take; then the sync fails "
        "and names the late process. A single late replica is replaced.",
        above=0,
    )
    verify_freq: int = key(
        20,
        "Syncs between checks of the engines' weight checksums against the actor's, from the first sync on; 1 = every "
        "sync, 0 = never.",
        at_least=0,
    )


def _layout_key() -> Any:
    return key(
        "manual",
        "auto = choose the keys of parallel sizes, offloading, recomputation, token budgets and engine size that are "
        "not set by hand, for the devices found; see docs/how_to/layouts.md#automatic-layouts.",
        choices=(AUTO, "manual"),
    )


@dataclass(frozen=True)
class TrainConfig(ScoredJobConfig):
    """Reinforcement learning: PPO or GRPO."""

    layout: str = _layout_key()
    data: DataConfig = section(DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig)
    critic: CriticConfig = section(CriticConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    distillation: DistillationConfig = section(DistillationConfig)
    reward: TrainingRewardConfig = section(TrainingRewardConfig)
    async_training: AsyncTrainingConfig = section(AsyncTrainingConfig)
    sync: SyncConfig = section(SyncConfig)
    trainer: TrainerConfig = section(TrainerConfig)
    global_profiler: ProfilerConfig = section(ProfilerConfig)

    @property
    def num_devices(self) -> int:
        """Devices of all pools."""
        return self.trainer.num_devices + sum(pool.own_devices for pool in self.own_pools.values())

    @property
    def hybrid_replicas(self) -> int:
        """Number of engine replicas on the trainer's devices, besides those with devices of their own."""
        if not self.async_training.hybrid_rollout:
            return 0
        return self.trainer.num_devices // self.actor_rollout_ref.rollout.devices_per_replica

    @property
    def own_pools(self) -> dict[str, OwnDevicesConfig]:
        """See :class:`ScoredJobConfig`; ``val_only`` needs neither critic nor reference nor teachers."""
        policy, trains = self.actor_rollout_ref, not self.trainer.val_only
        sections: dict[str, tuple[OwnDevicesConfig, bool]] = {
            ROLLOUT: (policy.rollout, True),
            CRITIC: (self.critic, trains and self.uses_critic),
            REFERENCE: (policy.ref, trains and self.uses_reference and policy.ref.megatron is not None),
            TEACHERS: (self.distillation, trains and bool(self.distillation.local_teachers)),
        }
        pools = {path: keys for path, (keys, is_used) in sections.items() if is_used and keys.nnodes}
        return pools | super().own_pools

    @property
    def uses_critic(self) -> bool:
        """Whether the job has a critic."""
        default = estimator_needs(self.algorithm.adv_estimator, "values")
        return default if self.critic.enable is None else self.critic.enable

    @property
    def estimates_proximal_policy(self) -> bool:
        """Whether old log-probs are a log-linear estimate by weight versions, computed with the loss."""
        return self.async_training.proximal == LOGLINEAR and not self.algorithm.rollout_correction.bypass_mode

    @property
    def holds_proximal_policy(self) -> bool:
        """Whether the actor holds the weights of the last sync through several updates, for old log-probs."""
        keys, correction = self.async_training, self.algorithm.rollout_correction
        return keys.sync_interval > 1 and keys.proximal == RECOMPUTE and not correction.bypass_mode

    @property
    def uses_task_rewards(self) -> bool:
        """Whether the actor learns from rewards; false in distillation alone."""
        return not self.distillation.enabled or self.distillation.distillation_loss.use_task_rewards

    @property
    def uses_baselines(self) -> bool:
        """Whether each prompt also gets a greedy response as baseline (ReMax)."""
        return estimator_needs(self.algorithm.adv_estimator, "reward_baselines")

    @property
    def uses_sum_pi_squared(self) -> bool:
        """Whether old log-probs come with the sum of squared probabilities of each token's distribution."""
        default = estimator_needs(self.algorithm.adv_estimator, "sum_pi_squared")
        enabled = self.actor_rollout_ref.actor.calculate_sum_pi_squared
        return default if enabled is None else enabled

    @property
    def samples_per_prompt(self) -> int:
        """Samples per prompt to train on."""
        best, n = self.algorithm.best_of_n, self.actor_rollout_ref.rollout.n
        return best.keep if best.enable else n

    @property
    def responses_per_prompt(self) -> int:
        """Responses per prompt that are generated and scored, including the greedy baseline of ReMax."""
        return self.actor_rollout_ref.rollout.n + self.uses_baselines

    @property
    def uses_ref_log_prob(self) -> bool:
        """Whether the reference's log-probs are read: for the KL in reward or loss, or the quality score."""
        in_reward = self.algorithm.use_kl_in_reward or self.algorithm.ref_quality_score.enable
        actor = self.actor_rollout_ref.actor
        return in_reward or (actor.use_kl_loss and not actor.uses_full_kl)

    @property
    def uses_reference(self) -> bool:
        """Whether the job has a reference policy."""
        in_loss = self.actor_rollout_ref.actor.use_kl_loss
        return self.uses_ref_log_prob or in_loss or self.algorithm.repr_align.enable

    @property
    def role_profilers(self) -> dict[str, RoleProfilerConfig]:
        """The ``profiler`` sections by the path of their role."""
        policy = self.actor_rollout_ref
        return {
            "actor_rollout_ref.actor": policy.actor.profiler,
            "actor_rollout_ref.ref": policy.ref.profiler,
            "critic": self.critic.profiler,
        }


@dataclass(frozen=True)
class SupervisedConfig:
    """A job that trains on given responses, with the same Megatron workers as reinforcement learning."""

    role: ClassVar[str]
    """Name of the role in checkpoints and in the batch plan."""
    sequences_per_row: ClassVar[int] = 1
    """Sequences of at most `data.max_length` tokens per row of the data."""

    layout: str = _layout_key()
    data: SupervisedDataConfig = section(SupervisedDataConfig)
    model: TrainedModelConfig = section(TrainedModelConfig)
    optim: OptimConfig = section(OptimConfig, lr=1e-5)
    megatron: MegatronConfig = section(MegatronConfig)
    hub: HubConfig = section(HubConfig)
    trainer: SupervisedRunConfig = section(SupervisedRunConfig)


@dataclass(frozen=True)
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning through the same Megatron workers."""

    role: ClassVar[str] = "sft"

    data: SFTDataConfig = section(SFTDataConfig)


@dataclass(frozen=True)
class PairLossConfig:
    """The loss on a pair: -log sigmoid(chosen reward - rejected reward - margin), averaged over the pairs of a step."""

    center_rewards_coefficient: float = key(
        0.0, "Weight of (chosen reward + rejected reward)^2, which keeps rewards around zero.", at_least=0
    )


@dataclass(frozen=True)
class PairTrainingConfig(SupervisedConfig):
    """Training on pairs of responses, with validation on held-out pairs."""

    sequences_per_row: ClassVar[int] = 2

    data: PairDataConfig = section(PairDataConfig)
    trainer: PairRunConfig = section(PairRunConfig)


@dataclass(frozen=True)
class RewardTrainingConfig(PairTrainingConfig):
    """Training of a reward model on pairs of responses (Bradley-Terry)."""

    role: ClassVar[str] = "reward_model"

    data: RewardPairDataConfig = section(RewardPairDataConfig)
    loss: PairLossConfig = section(PairLossConfig)


@dataclass(frozen=True)
class PreferenceLossConfig:
    """The loss on a pair or a response, averaged over those of a step; docs/how_to/preference.md has the formulas."""

    type: str = key(
        "dpo",
        "On pairs: dpo, ipo, hinge (SLiC), or simpo, which needs no reference. On single responses: kto.",
        choices=(*PREFERENCE_LOSS_TYPES, KTO),
    )
    beta: float = key(0.1, "Strength of the pull towards the reference; SimPO: scale of the rewards.", above=0)
    label_smoothing: float = key(
        0.0, "Probability that a pair's label is wrong, for dpo and simpo.", at_least=0, at_most=0.5
    )
    simpo_gamma: float | None = derived_key(
        "Target margin between the rewards of simpo; auto = 0.5. Other losses have none.", at_least=0
    )

    desirable_weight: float | None = derived_key(
        "Weight of desirable responses in kto; auto = 1. Other losses have none.", at_least=0
    )
    undesirable_weight: float | None = derived_key(
        "Weight of undesirable responses in kto; auto = 1. Other losses have none.", at_least=0
    )

    @property
    def uses_pairs(self) -> bool:
        """Whether the loss compares the responses of a pair; KTO reads single responses."""
        return self.type != KTO

    @property
    def uses_reference(self) -> bool:
        """Whether the loss reads log-probs of the initial model."""
        return self.type == KTO or PREFERENCE_LOSS_TYPES[self.type]


@dataclass(frozen=True)
class PreferenceConfig(PairTrainingConfig):
    """Preference optimization of a policy on pairs of responses (DPO, IPO, SLiC, SimPO) or single ones (KTO).

    The reference is the initial model. Its weights stay in host memory and are swapped in.
    """

    role: ClassVar[str] = "preference"

    data: PreferenceDataConfig = section(PreferenceDataConfig)
    optim: OptimConfig = section(OptimConfig, lr=1e-6)
    loss: PreferenceLossConfig = section(PreferenceLossConfig)


@dataclass(frozen=True)
class BestAnswersConfig:
    """Rejection sampling: the best responses as training data for `megarl sft`."""

    file: str | None = key(None, "Parquet file to write, with `prompt` and `response`; null = none.")
    keep: int = key(1, "Most responses per prompt; see `actor_rollout_ref.rollout.val_kwargs.n`.", at_least=1)
    min_score: float | None = key(None, "Smallest score of a response to keep; null = no limit.")


@dataclass(frozen=True)
class EvaluateConfig(ScoredJobConfig):
    """Responses, scores and metrics of a fixed policy, as in validation during training.

    `actor_rollout_ref.model.path` may also be a checkpoint. Sampling is that of `actor_rollout_ref.rollout.val_kwargs`;
    the sampling keys of `rollout` itself belong to training.
    """

    best_answers: BestAnswersConfig = section(BestAnswersConfig)
    trainer: EvaluateRunConfig = section(EvaluateRunConfig)


@dataclass(frozen=True)
class GenerateConfig(GenerationJobConfig):
    """Responses of a policy, without scores.

    `actor_rollout_ref.model.path` may also be a checkpoint. Sampling is that of `actor_rollout_ref.rollout.val_kwargs`,
    as in evaluation. Nothing is tracked: `trainer.logger` and `trainer.project_name` have no effect.
    """

    data: GenerateDataConfig = section(GenerateDataConfig)
    trainer: RunConfig = section(RunConfig)


JobConfig: TypeAlias = TrainConfig | SupervisedConfig | EvaluateConfig | GenerateConfig
JobT = TypeVar("JobT", bound=JobConfig)


def own_pools(config: JobConfig) -> dict[str, OwnDevicesConfig]:
    """Return the resource pools of roles with devices of their own, by the path of the role's section."""
    return config.own_pools if isinstance(config, ScoredJobConfig) else {}
