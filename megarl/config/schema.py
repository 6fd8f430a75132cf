"""Schema of the reinforcement-learning job, ``python -m megarl.train``: the one source of its keys and defaults."""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

from dataclasses import dataclass

from megarl.config.agents import AgentConfig, EndpointConfig, MultiTurnConfig, RetrieverConfig
from megarl.config.engines import EngineKwargsConfig
from megarl.config.keys import key, section
from megarl.config.parts import (
    DTYPES,
    KL_KINDS,
    LOSS_AGG_MODES,
    DataSourceConfig,
    LogProbBatchConfig,
    MegatronConfig,
    ModelPathConfig,
    OptimConfig,
    RowConfig,
    TrainingRunConfig,
    UpdateBatchConfig,
)
from megarl.config.rollout_correction import RolloutCorrectionConfig
from megarl.config.saving import CheckpointConfig


@dataclass
class PromptsConfig(RowConfig):
    """Prompts to answer: held-out files and lengths."""

    val_files: list[str] = key([], "Parquet file or files to validate on; empty = no validation.")
    max_prompt_length: int = key(512, "Longest prompt, in tokens.", at_least=1)
    max_response_length: int = key(512, "Longest response, in tokens.", at_least=1)
    max_obs_length: int = key(
        500, "Longest answer of the retrieval server in a conversation, in tokens; a longer one is cut.", at_least=16
    )
    val_batch_size: int | None = key(None, "Prompts per validation batch; null = all at once.", at_least=1)
    filter_overlong_prompts: bool = key(
        False, "Drop prompts longer than `max_prompt_length` (counted) instead of applying `truncation`."
    )


@dataclass
class DataConfig(DataSourceConfig, PromptsConfig):
    """Prompts: files, lengths and how many make a step. `train_batch_size` counts prompts."""


@dataclass
class PolicyLossConfig:
    """Which policy loss."""

    loss_mode: str = key("vanilla", "Registered policy loss; vanilla = PPO's clipped one.", choices=("vanilla",))


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
    loss_agg_mode: str = key("token-mean", "How per-token losses become one number.", choices=LOSS_AGG_MODES)
    entropy_coeff: float = key(0.0, "Weight of the entropy bonus.", at_least=0)
    use_kl_loss: bool = key(False, "Add the KL to the reference policy to the loss.")
    kl_loss_coef: float = key(0.001, "Weight of the KL loss; read with `use_kl_loss`.", at_least=0)
    kl_loss_type: str = key("low_var_kl", "Estimator of the KL loss; read with `use_kl_loss`.", choices=KL_KINDS)
    state_masking: bool = key(
        True,
        "Leave what tools and the retrieval server said out of losses, KL, advantages and entropy; it stays in the "
        "context. Without, it is trained on like the policy's own tokens.",
    )
    policy_loss: PolicyLossConfig = section(PolicyLossConfig)
    optim: OptimConfig = section(OptimConfig)
    megatron: MegatronConfig = section(MegatronConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)


@dataclass
class RefConfig(LogProbBatchConfig):
    """The reference policy; it exists where `use_kl_loss` or `use_kl_in_reward` is on."""

    megatron: MegatronConfig | None = section(
        None,
        "Layout of the reference's own workers; null = the actor's layout: its weights rest in host memory and are "
        "swapped into the actor's own model.",
    )


@dataclass
class ValSamplingConfig:
    """Sampling in validation."""

    temperature: float = key(0.0, "Sampling temperature; 0 = greedy.", at_least=0)
    top_p: float = key(1.0, "Smallest probability mass to sample from.", above=0, at_most=1)
    top_k: int = key(-1, "Most likely tokens to sample from; -1 = all.", at_least=1, allowed=(-1,))
    n: int = key(1, "Answers per prompt.", at_least=1)


@dataclass
class HealthConfig:
    """When a rollout replica counts as lost: its requests go to others, and a new one takes its place."""

    timeout_s: float = key(300.0, "Seconds that a replica may take to report.", above=0)


@dataclass
class RolloutConfig(LogProbBatchConfig):
    """Generation. The `log_prob_*` keys are those of the actor's recomputed log-probs."""

    name: str = key("embedded", "Rollout engine.", choices=("embedded", "sglang"))
    n: int = key(1, "Answers per prompt.", at_least=1)
    temperature: float = key(1.0, "Sampling temperature; log-probs in training are taken at it too.", above=0)
    top_p: float = key(1.0, "Smallest probability mass to sample from.", above=0, at_most=1)
    top_k: int = key(-1, "Most likely tokens to sample from; -1 = all.", at_least=1, allowed=(-1,))
    tensor_model_parallel_size: int = key(1, "Devices per engine replica.", at_least=1)
    replicas: int | None = key(None, "Engine replicas; null = as many as fit the trainer's devices.", at_least=1)
    max_num_seqs: int = key(256, "Sequences that one replica generates at a time.", at_least=1)
    dtype: str = key("bfloat16", "Number format of the engine's weights.", choices=DTYPES)
    free_cache_engine: bool = key(
        True, "Engines give the memory of their weights and cache to the trainer while they have nothing to generate."
    )
    seed: int | None = key(None, "Seed of sampling; null = `trainer.seed`.", at_least=0)
    calculate_log_probs: bool = key(
        False,
        "Compare the engine's log-probs with the actor's (`training/rollout_probs_diff_*`, `rollout_corr/*`), and keep "
        "them beside `trainer.rollout_data_dir`'s answers as `<step>.npz`, for `megarl doctor logprobs`.",
    )
    engine_kwargs: EngineKwargsConfig = section(EngineKwargsConfig)
    multi_turn: MultiTurnConfig = section(MultiTurnConfig)
    agent: AgentConfig = section(AgentConfig)
    endpoint: EndpointConfig = section(EndpointConfig)
    health: HealthConfig = section(HealthConfig)
    val_kwargs: ValSamplingConfig = section(ValSamplingConfig)

    @property
    def server_urls(self) -> list[str]:
        """Of servers that somebody else started, one per replica; empty where replicas start their own engines."""
        return self.engine_kwargs.sglang.urls if self.name == "sglang" else []

    @property
    def devices_per_replica(self) -> int:
        """Devices of the run that a replica takes; a server elsewhere has its own, and only its client is here."""
        return 1 if self.server_urls else self.tensor_model_parallel_size

    @property
    def serves_endpoint(self) -> bool:
        """Whether the policy is served over OpenAI's chat interface."""
        return self.endpoint.enable or self.agent.external_agent is not None


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
class CriticModelConfig:
    """Where the critic starts from."""

    path: str | None = key(None, "Folder of the Hugging Face model; null = the actor's. A value head is added.")


@dataclass
class CriticConfig(UpdateBatchConfig):
    """The value function; it exists where `algorithm.adv_estimator` is gae."""

    model: CriticModelConfig = section(CriticModelConfig)
    ppo_mini_batch_size: int | None = key(None, "PROMPTS per optimizer step; null = the actor's.", at_least=1)
    ppo_epochs: int | None = key(None, "Passes over a step's samples; null = the actor's.", at_least=1)
    cliprange_value: float = key(0.5, "How far a value may move from the old one before it is clipped.", above=0)
    loss_agg_mode: str | None = key(
        None, "How per-token losses become one number; null = the actor's.", choices=LOSS_AGG_MODES
    )
    optim: OptimConfig = section(OptimConfig, lr=1e-5)
    megatron: MegatronConfig = section(MegatronConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)


@dataclass
class RewardModelConfig:
    """The reward, and what happens when it fails."""

    name: str = key(
        "arithmetic",
        "Reward function that comes with megarl; not read where `custom_reward_function.path` is set.",
        choices=("arithmetic", "search_em", "agent_score"),
        custom=True,
    )
    on_error: str = key(
        "raise",
        "A reward that raises or is not a number: stop with the sample shown, or mask the sample and count it.",
        choices=("raise", "mask"),
    )


@dataclass
class CustomRewardConfig:
    """A reward function of one's own."""

    path: str | None = key(None, "Python file that holds the function; null = use `reward_model.name`.")
    name: str = key(
        "compute_score", "Its name; it is called as fn(data_source, solution_str, ground_truth, extra_info)."
    )


@dataclass
class AnswersConfig:
    """What training and evaluation share, and agent loops may read: prompts, a policy that answers, and a reward."""

    data: PromptsConfig = section(PromptsConfig)
    actor_rollout_ref: PolicyConfig = section(PolicyConfig)
    do_search: bool = key(False, "Lead conversations with `search_agent`, which asks `retriever.url`.")
    max_turns: int = key(
        2, "Turns after which `search_agent` is answered; one more follows, without a search.", at_least=0
    )
    retriever: RetrieverConfig = section(RetrieverConfig)
    reward_model: RewardModelConfig = section(RewardModelConfig)
    custom_reward_function: CustomRewardConfig = section(CustomRewardConfig)


@dataclass
class KLControlConfig:
    """Coefficient of the KL in the reward; read with `use_kl_in_reward`."""

    type: str = key("fixed", "Keep the coefficient, or steer it towards `target_kl`.", choices=("fixed", "adaptive"))
    kl_coef: float = key(0.001, "Coefficient, or the one to start from.", at_least=0)
    horizon: int = key(10000, "Samples over which the adaptive coefficient reacts.", at_least=1)
    target_kl: float = key(0.1, "Mean KL that the adaptive coefficient aims at, in nats per token.", above=0)


@dataclass
class AlgorithmConfig:
    """Advantages, and the KL in the reward."""

    adv_estimator: str = key("gae", "gae = PPO with a critic; grpo = groups of answers.", choices=("gae", "grpo"))
    gamma: float = key(1.0, "Discount per token.", above=0, at_most=1)
    lam: float = key(1.0, "Lambda of GAE.", at_least=0, at_most=1)
    norm_adv_by_std_in_grpo: bool = key(True, "Divide a group's advantages by the standard deviation of its scores.")
    use_kl_in_reward: bool = key(False, "Subtract the KL to the reference policy from each token's reward.")
    kl_penalty: str = key("kl", "Estimator of the KL in the reward.", choices=KL_KINDS)
    kl_ctrl: KLControlConfig = section(KLControlConfig)
    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)


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
class TrainConfig(AnswersConfig):
    """Reinforcement learning: PPO or GRPO."""

    data: DataConfig = section(DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig)
    critic: CriticConfig = section(CriticConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    sync: SyncConfig = section(SyncConfig)
    trainer: TrainerConfig = section(TrainerConfig)

    @property
    def uses_critic(self) -> bool:
        """Whether the advantage estimator needs values."""
        return self.algorithm.adv_estimator == "gae"

    @property
    def uses_reference(self) -> bool:
        """Whether a KL to the reference policy is taken, in the reward or in the loss."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss
