"""Everything that can be refused before a process is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.config import MegatronConfig, TrainConfig
from megarl.config.sft_schema import SFTConfig
from megarl.data import check_parquet
from megarl.data.parquet import RLHF_COLUMNS
from megarl.errors import ConfigError
from megarl.models import ParallelLayout, check_layout, check_model_folder
from megarl.rewards import custom_reward_spec, load_reward_function
from megarl.rewards.registry import RewardFunction
from megarl.trainer.roles import layout_of


def check_train(config: TrainConfig) -> None:
    """Check models, layouts, data files and the reward function of a reinforcement-learning job.

    Raises:
        ModelError, ConfigError, DataError, RewardError: names the field, its value, and what would be right.
    """
    policy = config.actor_rollout_ref
    _check_model(policy.model.path, policy.actor.megatron, "actor_rollout_ref.actor.megatron")
    if config.uses_reference and policy.ref.megatron is not None:
        _check_model(policy.model.path, policy.ref.megatron, "actor_rollout_ref.ref.megatron")
    if config.uses_critic:
        _check_model(str(config.critic.model.path), config.critic.megatron, "critic.megatron")
    rollout = ParallelLayout(tp=policy.rollout.tensor_model_parallel_size)
    check_layout(check_model_folder(policy.model.path).config, rollout, "actor_rollout_ref.rollout")
    check_parquet(config.data.train_files, RLHF_COLUMNS, "data.train_files", config.data.prompt_key)
    if config.data.val_files:
        check_parquet(config.data.val_files, RLHF_COLUMNS, "data.val_files", config.data.prompt_key)
    check_export(config.trainer.hf_export_dir, [policy.model.path, str(config.critic.model.path)])
    reward_function(config)


def check_sft(config: SFTConfig) -> None:
    """Check model, layout and data files of a supervised job.

    Raises:
        ModelError, ConfigError, DataError: names the field, its value, and what would be right.
    """
    _check_model(config.model.path, config.megatron, "megatron")
    check_export(config.trainer.hf_export_dir, [config.model.path])
    data = config.data
    check_parquet(data.train_files, [], "data.train_files", data.prompt_key, text_columns=[data.response_key])


def reward_function(config: TrainConfig) -> RewardFunction:
    """The reward function that the configuration names.

    Raises:
        RewardError: it cannot be imported, or cannot be called as a reward function.
    """
    custom = config.custom_reward_function
    spec = custom_reward_spec(custom.path, custom.name) if custom.path else config.reward_model.name
    return load_reward_function(spec)


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


def _check_model(path: str, megatron: MegatronConfig, field: str) -> None:
    check_layout(check_model_folder(path).config, layout_of(megatron), field)
