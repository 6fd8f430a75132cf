"""Schema of the reinforcement-learning job, ``python -m megarl.train``: the one source of its keys and defaults."""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

from dataclasses import dataclass

from megarl.config.agents import RetrieverConfig
from megarl.config.algorithm import AlgorithmConfig
from megarl.config.choices import FULL_KL, estimator_needs
from megarl.config.data import DataConfig, PromptsConfig
from megarl.config.keys import key, section
from megarl.config.learners import ActorConfig, CriticConfig, RefConfig
from megarl.config.parts import ModelPathConfig, TrainingRunConfig
from megarl.config.rewards import CustomRewardConfig, RewardModelConfig
from megarl.config.rollout import RolloutConfig
from megarl.config.tracing import ProfilerConfig


@dataclass
class PolicyConfig:
    """A policy that only answers: its model, and generation."""

    model: ModelPathConfig = section(ModelPathConfig)
    rollout: RolloutConfig = section(RolloutConfig)


@dataclass
class ActorRolloutRefConfig(PolicyConfig):
    """The policy: its model, its update, the reference, and generation."""

    actor: ActorConfig = section(ActorConfig)
    ref: RefConfig = section(RefConfig)


@dataclass
class AnswersConfig:
    """What all jobs that generate share, and agent loops may read: prompts and a policy that answers."""

    data: PromptsConfig = section(PromptsConfig)
    actor_rollout_ref: PolicyConfig = section(PolicyConfig)
    do_search: bool = key(False, "Lead conversations with `search_agent`, which asks `retriever.url`.")
    max_turns: int = key(
        2, "Turns after which `search_agent` is answered; one more follows, without a search.", at_least=0
    )
    retriever: RetrieverConfig = section(RetrieverConfig)


@dataclass
class ScoredConfig(AnswersConfig):
    """What training and evaluation share: answers, and a reward."""

    reward_model: RewardModelConfig = section(RewardModelConfig)
    custom_reward_function: CustomRewardConfig = section(CustomRewardConfig)


@dataclass
class SyncConfig:
    """How weights move from the actor into the rollout engine."""

    transport: str = key(
        "auto",
        "What carries the weights; auto = the shortest way between each two processes: CUDA IPC on one node's GPUs, "
        "shared memory on one node, NCCL or gloo between nodes; inline = Ray's object store.",
        choices=("auto", "shared_memory", "cuda_ipc", "nccl", "gloo", "inline"),
    )
    bucket_megabytes: int = key(
        256,
        "Most that one process sends, or receives, at a time, in MiB; two such buckets are on the way at most.",
        at_least=1,
    )
    timeout_s: float = key(
        600.0,
        "Seconds that any part of a sync may take, and that processes wait for each other to join (gloo, NCCL); then "
        "the sync fails and names who is late. A replica that alone is late is replaced.",
        above=0,
    )
    verify_freq: int = key(
        20,
        "Compare checksums of the engines' weights with the actor's at the first sync and at every so many after it; "
        "1 = always, 0 = never.",
        at_least=0,
    )


@dataclass
class ValidationRecordsConfig:
    """What is kept of validation answers."""

    validation_data_dir: str | None = key(None, "Folder for validation answers as `<step>.jsonl`; null = none.")
    log_val_generations: int = key(0, "Validation answers to show in the trackers.", at_least=0)


@dataclass
class TrainerConfig(ValidationRecordsConfig, TrainingRunConfig):
    """The run: length, devices, validation, checkpoints and records."""

    critic_warmup: int = key(0, "Steps in which only the critic learns.", at_least=0)
    balance_batch: bool = key(
        True,
        "Order samples by their lengths so that mini-batches are alike, and give data-parallel ranks equal work by "
        "the model's own cost. Results do not depend on how many ranks there are.",
    )
    val_before_train: bool = key(False, "Validate before the first step.")
    val_only: bool = key(False, "Validate and stop.")
    test_freq: int = key(-1, "Validate every so many steps, and after the last; -1 = never.", at_least=1, allowed=(-1,))
    max_actor_ckpt_to_keep: int | None = key(
        None, "Newest checkpoints in which the actor is kept; null = all. One without any role is removed.", at_least=1
    )
    max_critic_ckpt_to_keep: int | None = key(
        None,
        "Newest checkpoints in which the critic is kept; null = all. PPO continues only from one with both.",
        at_least=1,
    )
    best_metric: str | None = key(
        None,
        "Validation metric, such as `val-core/<data_source>/reward/mean@1`, by which the best checkpoint is told and "
        "kept whole; a validation that beats all before is saved even where `save_freq` does not ask for it.",
    )
    best_mode: str = key(
        "max", "Whether the best is the largest or the smallest; read with `best_metric`.", choices=("max", "min")
    )
    rollout_data_dir: str | None = key(None, "Folder for every step's answers as `<step>.jsonl`; null = none.")


@dataclass
class TrainConfig(ScoredConfig):
    """Reinforcement learning: PPO or GRPO."""

    data: DataConfig = section(DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig)
    critic: CriticConfig = section(CriticConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    sync: SyncConfig = section(SyncConfig)
    trainer: TrainerConfig = section(TrainerConfig)
    global_profiler: ProfilerConfig = section(ProfilerConfig)

    @property
    def uses_critic(self) -> bool:
        """Whether there are values, for the advantage estimator."""
        needed = estimator_needs(self.algorithm.adv_estimator, "values")
        return needed if self.critic.enable is None else self.critic.enable

    @property
    def uses_baselines(self) -> bool:
        """Whether each prompt gets a greedy answer too, which the others are compared with."""
        return estimator_needs(self.algorithm.adv_estimator, "reward_baselines")

    @property
    def samples_per_prompt(self) -> int:
        """Answers to a prompt that are learned from."""
        best, n = self.algorithm.best_of_n, self.actor_rollout_ref.rollout.n
        return best.keep if best.enable else n

    @property
    def answers_per_prompt(self) -> int:
        """Answers to a prompt that are generated and scored; a greedy one, to compare with, is among them."""
        return self.actor_rollout_ref.rollout.n + self.uses_baselines

    @property
    def uses_ref_log_prob(self) -> bool:
        """Whether the reference's log-probs are read: for a KL in the reward or in the loss, or for the quality."""
        in_reward = self.algorithm.use_kl_in_reward or self.algorithm.ref_quality_score.enable
        actor = self.actor_rollout_ref.actor
        return in_reward or (actor.use_kl_loss and actor.kl_loss_type != FULL_KL)

    @property
    def uses_reference(self) -> bool:
        """Whether there is a reference policy."""
        in_loss = self.actor_rollout_ref.actor.use_kl_loss
        return self.uses_ref_log_prob or in_loss or self.algorithm.repr_align.enable
