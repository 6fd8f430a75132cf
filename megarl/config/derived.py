"""Derived values: fill keys documented as "auto = ..." from the keys that they follow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

from megarl.base.algorithm_names import default_aggregation
from megarl.config.schema.data import PromptsConfig
from megarl.config.schema.devices import OwnDevicesConfig
from megarl.config.schema.distillation import DistillationConfig
from megarl.config.schema.jobs import (
    EvaluateConfig,
    GenerateConfig,
    GenerationJobConfig,
    JobT,
    PreferenceConfig,
    ScoredJobConfig,
    SupervisedConfig,
    TrainConfig,
)
from megarl.config.schema.model import LogProbBatchConfig, MegatronConfig, ModelPathConfig
from megarl.config.schema.rewards import RewardConfig
from megarl.config.schema.roles import ActorConfig, CriticConfig
from megarl.config.schema.rollout import RolloutConfig, TrainingRolloutConfig
from megarl.config.schema.run import RunConfig

_Value = TypeVar("_Value")
_GenerationJob = TypeVar("_GenerationJob", bound=GenerationJobConfig)
_Supervised = TypeVar("_Supervised", bound=SupervisedConfig)
_ModelPath = TypeVar("_ModelPath", bound=ModelPathConfig)
_OwnDevices = TypeVar("_OwnDevices", bound=OwnDevicesConfig)
_Reward = TypeVar("_Reward", bound=RewardConfig)
_LogProbKeys = TypeVar("_LogProbKeys", bound=LogProbBatchConfig)

SIMPO_GAMMA = 0.5
"""Target margin of SimPO unless configured."""


def with_derived(config: JobT, files_root: str | None = None) -> JobT:
    """Return a copy of a configuration with the keys that follow others filled.

    A layout that does not divide the devices leaves its size None; the checks report it.

    Args:
        files_root: folder of files without an explicit path; None = ``outputs/<experiment_name>``.
    """
    root = files_root or f"outputs/{config.trainer.experiment_name}"
    if isinstance(config, TrainConfig):
        return cast(JobT, _train(_generation_job(config, config.trainer, root), root))
    if isinstance(config, EvaluateConfig | GenerateConfig):
        return cast(JobT, _generation_job(config, config.trainer, root))
    config = _supervised(config, root)
    return cast(JobT, _preference(config) if isinstance(config, PreferenceConfig) else config)


def _train(config: TrainConfig, root: str) -> TrainConfig:
    policy, trainer, data = config.actor_rollout_ref, config.trainer, config.data
    actor = _actor(policy.actor, data.max_response_length, trainer.num_devices)
    by_tokens = policy.actor.use_dynamic_bsz
    ref = _with_devices(policy.ref, trainer)
    if ref.megatron is not None:
        ref = replace(ref, megatron=_layout(ref.megatron, ref.own_devices or trainer.num_devices, bool(ref.nnodes)))
    return replace(
        config,
        distillation=_distillation(config.distillation, actor, by_tokens, trainer),
        actor_rollout_ref=replace(
            policy,
            actor=actor,
            ref=_log_prob(ref, actor, by_tokens),
            rollout=_old_log_prob(policy.rollout, actor, by_tokens),
        ),
        critic=_critic(config.critic, actor, policy.model, trainer),
        data=replace(
            data,
            seed=_first(data.seed, trainer.seed),
            gen_batch_size=_first(data.gen_batch_size, data.train_batch_size),
        ),
        trainer=replace(trainer, default_local_dir=_first(trainer.default_local_dir, f"{root}/checkpoints")),
    )


def _generation_job(config: _GenerationJob, trainer: RunConfig, root: str) -> _GenerationJob:
    policy = config.actor_rollout_ref
    rollout = _rollout(policy.rollout, trainer, root)
    config = replace(config, actor_rollout_ref=replace(policy, model=_model(policy.model), rollout=rollout))
    if isinstance(config, ScoredJobConfig):
        return replace(config, reward=_reward(config.reward, config.data, trainer))
    return config


def _supervised(config: _Supervised, root: str) -> _Supervised:
    data, trainer = config.data, config.trainer
    return replace(
        config,
        data=replace(data, seed=_first(data.seed, trainer.seed)),
        model=_model(config.model),
        megatron=_layout(config.megatron, trainer.num_devices),
        trainer=replace(
            trainer,
            hf_export_dir=_first(trainer.hf_export_dir, f"{root}/hf"),
            default_local_dir=_first(trainer.default_local_dir, f"{root}/checkpoints"),
        ),
    )


def _preference(config: PreferenceConfig) -> PreferenceConfig:
    loss = config.loss
    if loss.type == "simpo":
        loss = replace(loss, simpo_gamma=_first(loss.simpo_gamma, SIMPO_GAMMA))
    if not loss.uses_pairs:
        desirable, undesirable = _first(loss.desirable_weight, 1.0), _first(loss.undesirable_weight, 1.0)
        loss = replace(loss, desirable_weight=desirable, undesirable_weight=undesirable)
    return replace(config, loss=loss)


def _first(value: _Value | None, default: _Value) -> _Value:
    return default if value is None else value


def _model(model: _ModelPath) -> _ModelPath:
    return replace(model, tokenizer_path=_first(model.tokenizer_path, model.path))


def _with_devices(keys: _OwnDevices, trainer: RunConfig) -> _OwnDevices:
    return replace(keys, n_gpus_per_node=_first(keys.n_gpus_per_node, trainer.n_gpus_per_node))


def _distillation(
    keys: DistillationConfig, actor: ActorConfig, actor_by_tokens: bool | None, trainer: RunConfig
) -> DistillationConfig:
    keys = _with_devices(keys, trainer)
    devices, alone = keys.own_devices or trainer.num_devices, keys.teacher_is_alone
    teachers = {
        name: _log_prob(replace(teacher, megatron=_layout(teacher.megatron, devices, alone)), actor, actor_by_tokens)
        if not teacher.server.urls
        else teacher
        for name, teacher in keys.teacher_models.items()
    }
    return replace(keys, teacher_models=teachers)


def _layout(megatron: MegatronConfig, devices: int, alone: bool = False) -> MegatronConfig:
    """Fill the layout of a role; alone on its devices, it keeps its weights there between phases."""
    if alone:
        megatron = replace(megatron, param_offload=False)
    replica = megatron.devices_per_replica
    if megatron.data_parallel_size is None and devices % replica == 0:
        return replace(megatron, data_parallel_size=devices // replica)
    return megatron


def _rollout(rollout: RolloutConfig, trainer: RunConfig, root: str) -> RolloutConfig:
    if isinstance(rollout, TrainingRolloutConfig):
        rollout = _with_devices(rollout, trainer)
        rollout = replace(rollout, free_cache_engine=rollout.free_cache_engine and not rollout.nnodes)
    devices = rollout.own_devices or trainer.num_devices
    per_replica, replicas = rollout.devices_per_replica, rollout.replicas
    if replicas is None and devices % per_replica == 0:
        replicas = len(rollout.server_urls) or devices // per_replica
    access_file = _first(rollout.endpoint.access_file, f"{root}/endpoint.json")
    return replace(
        rollout,
        replicas=replicas,
        seed=_first(rollout.seed, trainer.seed),
        endpoint=replace(rollout.endpoint, access_file=access_file),
    )


def _reward(keys: _Reward, data: PromptsConfig, trainer: RunConfig) -> _Reward:
    model = _with_devices(keys.model, trainer)
    model_alone = model.enable and not keys.custom_reward_function.path and not keys.functions
    model = replace(
        model,
        megatron=_layout(model.megatron, model.own_devices or trainer.num_devices, bool(model.nnodes)),
        max_length=_first(model.max_length, data.max_prompt_length + data.max_response_length),
    )
    return replace(keys, model=model, function_weight=_first(keys.function_weight, 0.0 if model_alone else 1.0))


def _actor(actor: ActorConfig, max_response_length: int, devices: int) -> ActorConfig:
    loss_mode = _absolute_spec(actor.policy_loss.loss_mode)
    return replace(
        actor,
        clip_ratio_low=_first(actor.clip_ratio_low, actor.clip_ratio),
        clip_ratio_high=_first(actor.clip_ratio_high, actor.clip_ratio),
        policy_loss=replace(actor.policy_loss, loss_mode=loss_mode),
        loss_agg_mode=_first(actor.loss_agg_mode, default_aggregation(loss_mode)),
        loss_scale_factor=_first(actor.loss_scale_factor, max_response_length),
        use_dynamic_bsz=_first(actor.use_dynamic_bsz, actor.micro_batch_size_per_gpu is None),
        megatron=_layout(actor.megatron, devices),
    )


def _absolute_spec(name: str) -> str:
    """A custom function with the absolute path of its file: workers have different working folders."""
    path, colon, function = name.rpartition(":")
    return f"{Path(path).expanduser().absolute()}:{function}" if colon else name


def _log_prob(keys: _LogProbKeys, actor: ActorConfig, actor_by_tokens: bool | None) -> _LogProbKeys:
    """Micro-batches of a log-prob pass, as in the actor's update.

    Args:
        actor: with its derived values.
        actor_by_tokens: ``use_dynamic_bsz`` as the user set it; if auto, a size in samples decides for the pass.
    """
    in_samples = keys.micro_batch_size_per_gpu is not None and actor_by_tokens is None
    by_tokens = _first(keys.use_dynamic_bsz, False if in_samples else bool(actor.use_dynamic_bsz))
    samples = keys.micro_batch_size_per_gpu
    if samples is None and not by_tokens:
        samples = actor.micro_batch_size_per_gpu
    return replace(
        keys,
        use_dynamic_bsz=by_tokens,
        max_token_len_per_gpu=_first(keys.max_token_len_per_gpu, actor.max_token_len_per_gpu),
        micro_batch_size_per_gpu=samples,
    )


def _old_log_prob(
    rollout: TrainingRolloutConfig, actor: ActorConfig, actor_by_tokens: bool | None
) -> TrainingRolloutConfig:
    keys = _log_prob(rollout.log_prob_batch, actor, actor_by_tokens)
    return replace(
        rollout,
        log_prob_use_dynamic_bsz=keys.use_dynamic_bsz,
        log_prob_max_token_len_per_gpu=keys.max_token_len_per_gpu,
        log_prob_micro_batch_size_per_gpu=keys.micro_batch_size_per_gpu,
    )


def _critic(critic: CriticConfig, actor: ActorConfig, model: ModelPathConfig, trainer: RunConfig) -> CriticConfig:
    critic = _with_devices(critic, trainer)
    return replace(
        critic,
        model=replace(critic.model, path=_first(critic.model.path, model.path)),
        ppo_mini_batch_size=_first(critic.ppo_mini_batch_size, actor.ppo_mini_batch_size),
        ppo_epochs=_first(critic.ppo_epochs, actor.ppo_epochs),
        loss_agg_mode=_first(critic.loss_agg_mode, actor.loss_agg_mode),
        use_dynamic_bsz=_first(critic.use_dynamic_bsz, critic.micro_batch_size_per_gpu is None),
        megatron=_layout(critic.megatron, critic.own_devices or trainer.num_devices, bool(critic.nnodes)),
    )
