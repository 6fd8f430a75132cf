"""Combinations of keys that cannot work, each refused before anything starts.

A check takes the complete configuration and yields problems; all of them run, so that the user sees everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megarl.config.agents import agent_problems
from megarl.config.batch import batch_problems, reward_batch_problems
from megarl.config.choices import ADV_ESTIMATORS, FULL_KL, estimator_needs
from megarl.config.data_checks import data_problems, own_class_problems
from megarl.config.evaluate_schema import EvaluateConfig
from megarl.config.generate_schema import GenerateConfig
from megarl.config.jobs import JobConfig
from megarl.config.layouts import describe_pool, layout_problems
from megarl.config.parts import OptimConfig
from megarl.config.problems import Problem, value_at
from megarl.config.reward_model import reward_model_problems
from megarl.config.reward_model_schema import RewardTrainingConfig, pair_problems
from megarl.config.rewards import reward_problems
from megarl.config.rollout_correction import correction_problems
from megarl.config.saving import saving_problems, supervised_saving_problems
from megarl.config.schema import TrainConfig
from megarl.config.selection import selection_problems
from megarl.config.sft_schema import SFTConfig
from megarl.config.shaping import shaping_problems
from megarl.config.supervised import SupervisedConfig
from megarl.config.tracing_checks import profiler_problems, tracing_problems

Check = Callable[[Any], Iterator[Problem]]


def check(config: JobConfig) -> list[Problem]:
    """All problems of a configuration whose keys are, one by one, right."""
    return [problem for one in _CHECKS[type(config)] for problem in one(config)]


def _layouts(config: TrainConfig) -> Iterator[Problem]:
    yield from layout_problems(config, "actor_rollout_ref.actor.megatron")
    if config.uses_reference and config.actor_rollout_ref.ref.megatron is not None:
        yield from layout_problems(config, "actor_rollout_ref.ref.megatron")
    if config.uses_critic:
        yield from layout_problems(config, "critic.megatron")


def _supervised_layout(config: SupervisedConfig) -> Iterator[Problem]:
    yield from layout_problems(config, "megatron")


def _replicas(config: TrainConfig | EvaluateConfig | GenerateConfig) -> Iterator[Problem]:
    rollout, path = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    tp, size, pool = rollout.tensor_model_parallel_size, rollout.devices_per_replica, describe_pool(config.trainer)
    servers = len(rollout.server_urls)
    if rollout.replicas is None:
        yield Problem.at(config, f"{path}.tensor_model_parallel_size", f"replicas of {tp} devices do not divide {pool}")
    elif servers and servers != rollout.replicas:
        yield Problem.at(config, f"{path}.replicas", f"{path}.engine_kwargs.sglang.urls has {servers}, one per replica")
    elif rollout.replicas * size > config.trainer.num_devices:
        needed = f"{rollout.replicas} replicas x {size} = {rollout.replicas * size} devices"
        yield Problem.at(config, f"{path}.replicas", f"{needed} are more than {pool}")
    elif tp > 1 and rollout.name == "embedded":
        text = f"{path}.name=embedded runs each replica on one device; set 1"
        yield Problem.at(config, f"{path}.tensor_model_parallel_size", text)
    elif config.trainer.nnodes > 1 and config.trainer.n_gpus_per_node % size:
        text = (
            f"must divide trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}: a replica that the run starts does "
            f"not span nodes; one that is started by hand does, see {path}.engine_kwargs.sglang.urls"
        )
        yield Problem.at(config, f"{path}.tensor_model_parallel_size", text)


def _verification(config: TrainConfig) -> Iterator[Problem]:
    rollout, path = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout.engine_kwargs.sglang.weight_transport"
    transport = value_at(config, path)
    if rollout.name == "sglang" and transport != "tensor" and config.sync.verify_freq > 0:
        text = f"{path}={transport} brings weights when the sync ends, after the comparison; set 0, or 'tensor' there"
        yield Problem.at(config, "sync.verify_freq", text)


def _transport(config: TrainConfig) -> Iterator[Problem]:
    transport, device = config.sync.transport, config.trainer.device
    if device == "cpu" and transport in ("cuda_ipc", "nccl"):
        yield Problem.at(config, "sync.transport", "moves GPU memory and trainer.device is cpu; set auto")
    one_node = config.trainer.nnodes == 1
    if not one_node and transport in ("shared_memory", "cuda_ipc"):
        text = f"does not lead from one node to another and trainer.nnodes={config.trainer.nnodes}; set auto"
        yield Problem.at(config, "sync.transport", text)


def _estimator(config: TrainConfig) -> Iterator[Problem]:
    name, enabled = config.algorithm.adv_estimator, config.critic.enable
    chosen = f"algorithm.adv_estimator={name}"
    if estimator_needs(name, "group_ids") and config.actor_rollout_ref.rollout.n == 1:
        text = f"{chosen} compares the answers of a group; set at least 2"
        yield Problem.at(config, "actor_rollout_ref.rollout.n", text)
    if enabled is False and estimator_needs(name, "values"):
        yield Problem.at(config, "critic.enable", f"{chosen} needs a critic; leave it null")
    if enabled and name in ADV_ESTIMATORS and not estimator_needs(name, "values"):
        yield Problem.at(config, "critic.enable", f"{chosen} reads no values; leave it null")
    if config.algorithm.whiten_rewards and config.uses_baselines:
        text = f"{chosen} compares with the scores of greedy answers, which are not whitened; set false"
        yield Problem.at(config, "algorithm.whiten_rewards", text)


def _policy_loss(config: TrainConfig) -> Iterator[Problem]:
    path = "actor_rollout_ref.actor.policy_loss"
    loss = config.actor_rollout_ref.actor.policy_loss
    if loss.clip_cov_lb >= loss.clip_cov_ub:
        yield Problem.at(config, f"{path}.clip_cov_lb", f"must be below {path}.clip_cov_ub={loss.clip_cov_ub:g}")


def _full_kl(config: TrainConfig) -> Iterator[Problem]:
    actor = config.actor_rollout_ref.actor
    keys = {"algorithm.kl_penalty": config.algorithm.uses_full_kl}
    keys["actor_rollout_ref.actor.kl_loss_type"] = actor.use_kl_loss and actor.kl_loss_type == FULL_KL
    for path, used in keys.items():
        if used and config.actor_rollout_ref.ref.megatron is not None:
            text = (
                "compares whole distributions, which do not leave a process; leave actor_rollout_ref.ref.megatron "
                "null, so that the reference lives in the actor's"
            )
            yield Problem.at(config, path, text)


def _critic_warmup(config: TrainConfig) -> Iterator[Problem]:
    if config.trainer.critic_warmup and not config.uses_critic:
        yield Problem.at(
            config,
            "trainer.critic_warmup",
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} has no critic to warm up; set 0",
        )


def _validation(config: TrainConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if not config.data.val_files:
        for name, active in (("val_only", trainer.val_only), ("val_before_train", trainer.val_before_train)):
            if active:
                yield Problem.at(config, f"trainer.{name}", "needs data.val_files, which is empty")
        if trainer.test_freq > 0:
            yield Problem.at(config, "trainer.test_freq", "needs data.val_files, which is empty; -1 = never validate")


def _val_sampling(config: TrainConfig | EvaluateConfig | GenerateConfig) -> Iterator[Problem]:
    sampling = config.actor_rollout_ref.rollout.val_kwargs
    if sampling.n > 1 and sampling.temperature == 0:
        path = "actor_rollout_ref.rollout.val_kwargs"
        yield Problem.at(config, f"{path}.n", f"{path}.temperature=0 is greedy and gives {sampling.n} equal answers")


def _resume(config: TrainConfig | SupervisedConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        yield Problem.at(config, "trainer.resume_from_path", "must be set with trainer.resume_mode=resume_path")
    if trainer.resume_mode != "resume_path" and trainer.resume_from_path:
        text = f"has no effect with trainer.resume_mode={trainer.resume_mode}; set that to resume_path"
        yield Problem.at(config, "trainer.resume_from_path", text)


def _val_files(config: EvaluateConfig) -> Iterator[Problem]:
    if not config.data.val_files:
        yield Problem.at(config, "data.val_files", "must name at least one file")


def _asked(config: GenerateConfig) -> Iterator[Problem]:
    data = config.data
    if not data.val_files and not data.prompts:
        yield Problem.at(config, "data.prompts", "nothing is asked: give texts here, or files as data.val_files")
    if data.output_path is not None and Path(data.output_path).suffix not in (".jsonl", ".parquet"):
        yield Problem.at(config, "data.output_path", "must end in .jsonl or .parquet")


def _names(config: JobConfig) -> Iterator[Problem]:
    if not config.trainer.experiment_name.strip():
        yield Problem.at(config, "trainer.experiment_name", "must not be empty; the run's folder has this name")


def _optims(config: TrainConfig) -> Iterator[Problem]:
    yield from _optim(config, "actor_rollout_ref.actor.optim")
    if config.uses_critic:
        yield from _optim(config, "critic.optim")


def _supervised_optim(config: SupervisedConfig) -> Iterator[Problem]:
    yield from _optim(config, "optim")


def _optim(config: TrainConfig | SupervisedConfig, path: str) -> Iterator[Problem]:
    optim: OptimConfig = value_at(config, path)
    if optim.min_lr > optim.lr:
        yield Problem.at(config, f"{path}.min_lr", f"must not exceed {path}.lr={optim.lr:g}")
    if optim.total_training_steps is not None and optim.lr_warmup_steps > optim.total_training_steps:
        text = f"must not exceed {path}.total_training_steps={optim.total_training_steps}"
        yield Problem.at(config, f"{path}.lr_warmup_steps", text)
    if 1 in optim.betas:
        yield Problem.at(config, f"{path}.betas", "both must be below 1")


def _batches(config: TrainConfig | SupervisedConfig) -> Iterator[Problem]:
    yield from batch_problems(config)


def _reward_batches(config: EvaluateConfig) -> Iterator[Problem]:
    yield from reward_batch_problems(config)


_TRAIN_CHECKS: tuple[Check, ...] = (
    data_problems,
    own_class_problems,
    _names,
    tracing_problems,
    _layouts,
    _replicas,
    _verification,
    _transport,
    _estimator,
    _policy_loss,
    _full_kl,
    _critic_warmup,
    _validation,
    _val_sampling,
    _resume,
    saving_problems,
    agent_problems,
    reward_problems,
    correction_problems,
    selection_problems,
    shaping_problems,
    reward_model_problems,
    profiler_problems,
    _optims,
    _batches,
)
_SUPERVISED_CHECKS: tuple[Check, ...] = (
    data_problems,
    _names,
    tracing_problems,
    _supervised_layout,
    _supervised_optim,
    _batches,
    _resume,
    supervised_saving_problems,
)
_EVALUATE_CHECKS: tuple[Check, ...] = (
    _val_files,
    _names,
    tracing_problems,
    _replicas,
    _val_sampling,
    agent_problems,
    reward_model_problems,
    reward_problems,
    _reward_batches,
)
_GENERATE_CHECKS: tuple[Check, ...] = (_asked, _names, _replicas, _val_sampling, agent_problems)
_CHECKS: dict[type, tuple[Check, ...]] = {
    TrainConfig: _TRAIN_CHECKS,
    SFTConfig: _SUPERVISED_CHECKS,
    RewardTrainingConfig: (*_SUPERVISED_CHECKS, pair_problems),
    EvaluateConfig: _EVALUATE_CHECKS,
    GenerateConfig: _GENERATE_CHECKS,
}
