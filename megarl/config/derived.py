"""Fills the keys whose documentation says "null = ...", so that code reads a value and never repeats the rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.config.choices import default_aggregation
from megarl.config.evaluate_schema import EvaluateConfig
from megarl.config.generate_schema import GenerateConfig
from megarl.config.jobs import JobConfig
from megarl.config.layouts import devices_per_replica
from megarl.config.learners import ActorConfig, CriticConfig
from megarl.config.parts import LogProbBatchConfig, MegatronConfig, ModelPathConfig, RunConfig
from megarl.config.reward_model import fill_reward_model
from megarl.config.rollout import RolloutConfig
from megarl.config.schema import AnswersConfig, ScoredConfig, TrainConfig
from megarl.config.supervised import SupervisedConfig


def fill_derived(config: JobConfig, files_root: str | None = None) -> None:
    """Fills null keys of a configuration in place from the keys they follow.

    A size that does not come out (a layout that does not divide the devices) stays null for the checks to report.

    Args:
        config: of any job.
        files_root: folder under which files without an explicit place go; None = ``outputs/<experiment_name>``.
    """
    root = files_root or f"outputs/{config.trainer.experiment_name}"
    if isinstance(config, TrainConfig):
        _fill_train(config, root)
    elif isinstance(config, EvaluateConfig | GenerateConfig):
        _fill_answers(config, config.trainer, root)
    else:
        _fill_supervised(config, root)


def _fill_train(config: TrainConfig, root: str) -> None:
    policy, trainer = config.actor_rollout_ref, config.trainer
    _fill_answers(config, trainer, root)
    _fill_loss(policy.actor, config.data.max_response_length)
    _fill_dynamic(config)
    _fill_log_prob(policy.rollout, policy.actor)
    _fill_log_prob(policy.ref, policy.actor)
    _fill_critic(config.critic, policy.actor, policy.model)
    for megatron in (policy.actor.megatron, policy.ref.megatron, config.critic.megatron):
        if megatron is not None:
            _fill_layout(megatron, trainer.num_devices)
    config.data.seed = _first(config.data.seed, trainer.seed)
    config.data.gen_batch_size = _first(config.data.gen_batch_size, config.data.train_batch_size)
    trainer.default_local_dir = _first(trainer.default_local_dir, f"{root}/checkpoints")


def _fill_answers(config: AnswersConfig, trainer: RunConfig, root: str) -> None:
    rollout = config.actor_rollout_ref.rollout
    _fill_model(config.actor_rollout_ref.model)
    if isinstance(config, ScoredConfig):
        _fill_layout(config.reward_model.megatron, trainer.num_devices)
        fill_reward_model(config)
    _fill_replicas(rollout, trainer.num_devices)
    rollout.seed = _first(rollout.seed, trainer.seed)
    rollout.endpoint.access_file = _first(rollout.endpoint.access_file, f"{root}/endpoint.json")


def _fill_supervised(config: SupervisedConfig, root: str) -> None:
    _fill_model(config.model)
    _fill_layout(config.megatron, config.trainer.num_devices)
    config.data.seed = _first(config.data.seed, config.trainer.seed)
    config.trainer.hf_export_dir = _first(config.trainer.hf_export_dir, f"{root}/hf")
    config.trainer.default_local_dir = _first(config.trainer.default_local_dir, f"{root}/checkpoints")


def _first(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def _fill_model(model: ModelPathConfig) -> None:
    model.tokenizer_path = _first(model.tokenizer_path, model.path)


def _fill_loss(actor: ActorConfig, longest_response: int) -> None:
    actor.clip_ratio_low = _first(actor.clip_ratio_low, actor.clip_ratio)
    actor.clip_ratio_high = _first(actor.clip_ratio_high, actor.clip_ratio)
    actor.policy_loss.loss_mode = _own_by_place(actor.policy_loss.loss_mode)
    actor.loss_agg_mode = _first(actor.loss_agg_mode, default_aggregation(actor.policy_loss.loss_mode))
    actor.loss_scale_factor = _first(actor.loss_scale_factor, longest_response)


def _own_by_place(name: str) -> str:
    """A user's own function, its file by an absolute path: workers have working folders of their own."""
    path, colon, function = name.rpartition(":")
    return f"{Path(path).expanduser().absolute()}:{function}" if colon else name


def _fill_dynamic(config: TrainConfig) -> None:
    """A micro-batch size in samples is read where it is set, and nothing says that tokens are counted."""
    actor, critic = config.actor_rollout_ref.actor, config.critic
    for keys in (config.actor_rollout_ref.rollout, config.actor_rollout_ref.ref):
        if keys.log_prob_micro_batch_size_per_gpu is not None and actor.use_dynamic_bsz is None:
            keys.log_prob_use_dynamic_bsz = _first(keys.log_prob_use_dynamic_bsz, False)
    for update in (actor, critic):
        update.use_dynamic_bsz = _first(update.use_dynamic_bsz, update.ppo_micro_batch_size_per_gpu is None)


def _fill_log_prob(keys: LogProbBatchConfig, actor: ActorConfig) -> None:
    keys.log_prob_use_dynamic_bsz = _first(keys.log_prob_use_dynamic_bsz, actor.use_dynamic_bsz)
    keys.log_prob_max_token_len_per_gpu = _first(keys.log_prob_max_token_len_per_gpu, actor.ppo_max_token_len_per_gpu)
    if not keys.log_prob_use_dynamic_bsz:
        keys.log_prob_micro_batch_size_per_gpu = _first(
            keys.log_prob_micro_batch_size_per_gpu, actor.ppo_micro_batch_size_per_gpu
        )


def _fill_critic(critic: CriticConfig, actor: ActorConfig, model: ModelPathConfig) -> None:
    critic.model.path = _first(critic.model.path, model.path)
    critic.ppo_mini_batch_size = _first(critic.ppo_mini_batch_size, actor.ppo_mini_batch_size)
    critic.ppo_epochs = _first(critic.ppo_epochs, actor.ppo_epochs)
    critic.loss_agg_mode = _first(critic.loss_agg_mode, actor.loss_agg_mode)


def _fill_layout(megatron: MegatronConfig, devices: int) -> None:
    replica = devices_per_replica(megatron)
    if megatron.data_parallel_size is None and devices % replica == 0:
        megatron.data_parallel_size = devices // replica


def _fill_replicas(rollout: RolloutConfig, devices: int) -> None:
    if rollout.replicas is None and devices % rollout.devices_per_replica == 0:
        rollout.replicas = len(rollout.server_urls) or devices // rollout.devices_per_replica
