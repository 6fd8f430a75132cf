"""Everything that can be refused before a process is started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megarl.algorithms import find_shape, load_advantage, load_policy_loss, warmup_steps
from megarl.config import EvaluateConfig, GenerateConfig, MegatronConfig, OptimConfig, TrainConfig
from megarl.config.batch import BatchPlan
from megarl.config.parts import DataSourceConfig
from megarl.config.problems import InvalidConfigError, Problem, value_at
from megarl.config.shaping import ALIGNMENT, QUALITY, ScheduledWeightConfig
from megarl.config.supervised import SupervisedConfig
from megarl.data import check_files
from megarl.errors import ConfigError, ModelError
from megarl.models import ModelConfig, ParallelLayout, check_layout, check_model_folder, read_model_config
from megarl.models.eos import all_eos_token_ids
from megarl.rollout import check_engine_model
from megarl.rollout.agents import check_agent_loops
from megarl.rollout.settings import engine_options
from megarl.tracking import check_trackers
from megarl.trainer.prompts import mixture_weights, own_dataset, own_sampler
from megarl.trainer.reward_functions import check_rewards
from megarl.trainer.roles import run_updates
from megarl.workers.layouts import check_role
from megarl.workers.schedule import schedule_steps


def check_train(config: TrainConfig) -> None:
    """Check models, layouts, files, algorithm, reward functions and agents of a reinforcement-learning job.

    Raises:
        ModelError, ConfigError, DataError, RewardError: names the field, its value, and what would be right.
    """
    check_trackers(config.trainer.logger)
    check_learners(config)
    check_data(config)
    check_algorithm(config)
    check_answers(config, check_model_folder(config.actor_rollout_ref.model.path).config)


def check_learners(config: TrainConfig | SupervisedConfig, *, weights: bool = True) -> None:
    """Check the models of the roles that learn and of the reference, and that each fits its layout.

    Args:
        config: complete.
        weights: whether they must be there; without, a ``config.json`` is enough.

    Raises:
        ModelError, ConfigError: names the field, its value, and what would be right.
    """
    if isinstance(config, SupervisedConfig):
        _check_model(config.model.path, config.megatron, "megatron", weights=weights)
        check_export(config.trainer.hf_export_dir, [config.model.path])
        return
    policy = config.actor_rollout_ref
    _check_model(policy.model.path, policy.actor.megatron, "actor_rollout_ref.actor.megatron", weights=weights)
    if config.uses_reference and policy.ref.megatron is not None:
        _check_model(policy.model.path, policy.ref.megatron, "actor_rollout_ref.ref.megatron", weights=weights)
    if config.uses_critic:
        _check_model(str(config.critic.model.path), config.critic.megatron, "critic.megatron", weights=weights)
    others = [path for path in (config.critic.model.path, config.reward_model.model.path) if path]
    check_export(config.trainer.hf_export_dir, [policy.model.path, *others])


def check_data(config: TrainConfig) -> None:
    """Check the files to train on, and what of the user's own reads and orders them.

    Raises:
        DataError, ConfigError: names the key, the file, and what would be right.
    """
    data = config.data
    check_training_rows(data, (data.reward_fn_key, "reward_model"), (), data.prompt_key, data.reward_fn_key)
    own_sampler(data.sampler)
    own_dataset(data.custom_cls)


def check_algorithm(config: TrainConfig) -> None:
    """Check that estimator and loss can be called, and that answers can end where one that does not is punished.

    Raises:
        ConfigError, ModelError: names the field, its value, and what would be right.
    """
    load_advantage(config.algorithm.adv_estimator)
    load_policy_loss(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    model = config.actor_rollout_ref.model.path
    if config.algorithm.missing_eos_penalty is not None and not all_eos_token_ids(model):
        raise ConfigError(
            f"algorithm.missing_eos_penalty={config.algorithm.missing_eos_penalty:g}: generation_config.json and "
            f"config.json of {model} name no eos_token_id"
        )


def check_answers(config: TrainConfig | EvaluateConfig, model: ModelConfig) -> None:
    """Check layout, held-out files, the reward functions and the agents of a job that has prompts answered.

    Args:
        config: complete.
        model: the policy.

    Raises:
        ModelError, ConfigError, DataError, RewardError: names the field, its value, and what would be right.
    """
    if config.reward_model.enable:
        check_reward_model(config)
    check_generation(config, model)
    if config.data.val_files:
        data = config.data
        columns = (data.reward_fn_key, "reward_model")
        check_files(data.val_files, columns, "data.val_files", data.prompt_key, source_key=data.reward_fn_key)
    check_rewards(config)


def check_generation(config: TrainConfig | EvaluateConfig | GenerateConfig, model: ModelConfig) -> None:
    """Check layout, engine and agents of a job that has prompts answered.

    Args:
        config: complete.
        model: the policy.

    Raises:
        ModelError, ConfigError: names the field, its value, and what would be right.
    """
    check_engine(config, model)
    check_agent_loops(config)


def check_engine(config: TrainConfig | EvaluateConfig | GenerateConfig, model: ModelConfig) -> None:
    """Check that the rollout engine runs the model, in its layout.

    Raises:
        ModelError, ConfigError: names the field, its value, and what would be right.
    """
    rollout = config.actor_rollout_ref.rollout
    check_layout(model, ParallelLayout(tp=rollout.tensor_model_parallel_size), "actor_rollout_ref.rollout")
    check_engine_model(rollout.name, model, engine_options(rollout, config.trainer.device))


def check_training_rows(
    data: DataSourceConfig,
    columns: Sequence[str],
    texts: Sequence[str],
    prompt: str | None,
    source_key: str = "data_source",
) -> None:
    """Check the files to train on, of each data set where there is a mixture, and the mixture's weights.

    Args:
        data: section of the configuration.
        columns: that the files must have.
        texts: columns that must hold strings or messages.
        prompt: column that must hold chat messages, None where there is none.
        source_key: column with the name of the data source.

    Raises:
        DataError: names the key, the file, and what would be right.
    """
    mixture_weights(data)
    named = {f"data.mixture.{name}.files": entry["files"] for name, entry in data.mixture.items()}
    for field, files in (named or {"data.train_files": data.train_files}).items():
        check_files(files, columns, field, prompt, texts, source_key)


def check_schedules(config: TrainConfig | SupervisedConfig, batches: BatchPlan, total_steps: int) -> None:
    """Check that learning rates and weights have schedules that fit into the run, whose length the data tell.

    Args:
        config: complete.
        batches: its batch arithmetic.
        total_steps: training steps of the whole run.

    Raises:
        InvalidConfigError: with every length that does not fit, by its key.
    """
    if isinstance(config, SupervisedConfig):
        sections = {config.role: "optim"}
    elif config.trainer.val_only:
        sections = {}
    else:
        sections = {"actor": "actor_rollout_ref.actor.optim"} | (
            {"critic": "critic.optim"} if config.uses_critic else {}
        )
    updates = {path: run_updates(config, batches, phase, total_steps) for phase, path in sections.items()}
    problems = [problem for path in updates for problem in _schedule(config, path, updates[path])]
    if isinstance(config, TrainConfig) and not config.trainer.val_only:
        problems += [problem for path in (QUALITY, ALIGNMENT) for problem in _weight(config, path, total_steps)]
    if problems:
        raise InvalidConfigError(problems)


def _schedule(config: TrainConfig | SupervisedConfig, path: str, updates: int) -> Iterator[Problem]:
    optim: OptimConfig = value_at(config, path)
    total, warmup, decay, warmup_key, decay_key = schedule_steps(optim, updates)
    if total > updates:
        text = f"must be at most the run's {updates} optimizer steps; null = as many"
        yield Problem.at(config, f"{path}.total_training_steps", text)
    elif warmup > total:
        yield Problem.at(config, f"{path}.{warmup_key}", f"must be at most the schedule's {total} optimizer steps")
    elif optim.lr_decay_style != "constant" and warmup == total:
        text = f"the warm-up of {warmup} optimizer steps leaves none of the schedule's {total} to lr_decay_style"
        yield Problem.at(config, f"{path}.{warmup_key}", f"{text}={optim.lr_decay_style}; lower it")
    elif optim.lr_decay_style == "wsd" and warmup + decay > total:
        text = (
            f"a decay of {decay} optimizer steps does not fit behind a warm-up of {warmup} into {total}; "
            f"at most {total - warmup}"
        )
        yield Problem.at(config, f"{path}.{decay_key}", text)


def _weight(config: TrainConfig, path: str, total_steps: int) -> Iterator[Problem]:
    """What is wrong with the schedule of a weight in the reward."""
    weight: ScheduledWeightConfig = value_at(config, path)
    if not weight.enable:
        return
    warmup = warmup_steps(weight.warmup_ratio, total_steps)
    if weight.schedule == "step" and 0 < warmup < weight.steps:
        text = f"{warmup} of the run's {total_steps} training steps have no room for so many stairs; at most {warmup}"
        yield Problem.at(config, f"{path}.steps", text)
    try:
        find_shape(weight.schedule)
    except ConfigError as error:
        yield Problem.at(config, f"{path}.schedule", str(error))


def check_export(folder: str | None, models: Sequence[str]) -> None:
    """An export replaces its folder, which therefore must be none of the folders that the run starts from.

    Raises:
        ConfigError: it is.
    """
    if folder is not None and Path(folder).resolve() in {Path(path).resolve() for path in models}:
        raise ConfigError(
            f"trainer.hf_export_dir={folder} is the model that the run starts from, which the export would replace; "
            "choose another folder"
        )


def check_reward_model(config: TrainConfig | EvaluateConfig, *, weights: bool = True) -> None:
    """Check that the reward model is one, and fits its layout; ``weights``: whether they must be there.

    Raises:
        ModelError, ConfigError: names the field, its value, and what would be right.
    """
    path = str(config.reward_model.model.path)
    if not read_model_config(path).is_value_model:
        raise ModelError(
            f"reward_model.model.path={path} is a language model and has no scalar head; name a model of sequence "
            "classification with one label, such as megarl.reward_model writes"
        )
    _check_model(path, config.reward_model.megatron, "reward_model.megatron", weights=weights)


def _check_model(path: str, megatron: MegatronConfig, field: str, *, weights: bool = True) -> None:
    model = check_model_folder(path).config if weights else read_model_config(path)
    check_role(model, megatron, field)
