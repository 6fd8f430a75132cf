"""Layouts of the roles against the sizes of their models, before a run starts; imports no torch."""

from __future__ import annotations

from pathlib import Path

from megarl.base.errors import ConfigError
from megarl.config import EvaluateConfig, GenerateConfig, MegatronConfig, SupervisedConfig, TrainConfig
from megarl.config.derived import inheritance_note
from megarl.config.schema.jobs import JobConfig
from megarl.models import read_model_config
from megarl.workers.settings import check_role


def check_models(config: JobConfig) -> None:
    """Check the layout of every role against its model, if the model folder exists already.

    Raises:
        ConfigError: a parallel size does not divide a dimension of the model.
        ModelError: the folder's ``config.json`` is missing, malformed, or of an unknown architecture.
    """
    for path, megatron, field in _models_of(config):
        if not Path(path).is_dir():
            continue  # created before the run starts, or reported when the run loads the model
        model = read_model_config(path)
        try:
            check_role(model, megatron, field)
        except ConfigError as error:
            raise ConfigError(f"{error.text}{inheritance_note(config, error.text)}", code=error.code) from error


def _models_of(config: JobConfig) -> list[tuple[str, MegatronConfig, str]]:
    """Model folder, layout and config key of the layout, for every role of a job."""
    if isinstance(config, SupervisedConfig):
        return [(config.model.path, config.megatron, "megatron")]
    if isinstance(config, GenerateConfig):
        return []
    if isinstance(config, EvaluateConfig):
        return _reward_model_of(config)  # the policy may be a checkpoint, which is opened when the run starts
    policy = config.actor_rollout_ref
    rollout = MegatronConfig(tensor_model_parallel_size=policy.rollout.tensor_model_parallel_size)
    roles = [
        (policy.model.path, policy.actor.megatron, "actor_rollout_ref.actor.megatron"),
        (policy.model.path, rollout, "actor_rollout_ref.rollout"),
    ]
    if config.uses_reference and policy.ref.megatron is not None:
        roles.append((policy.model.path, policy.ref.megatron, "actor_rollout_ref.ref.megatron"))
    roles += _teachers_of(config)
    if config.uses_critic:
        roles.append((str(config.critic.model.path), config.critic.megatron, "critic.megatron"))
    return roles + _reward_model_of(config)


def _teachers_of(config: TrainConfig) -> list[tuple[str, MegatronConfig, str]]:
    return [
        (str(teacher.model_path), teacher.megatron, f"distillation.teacher_models.{name}.megatron")
        for name, teacher in config.distillation.local_teachers.items()
    ]


def _reward_model_of(config: TrainConfig | EvaluateConfig) -> list[tuple[str, MegatronConfig, str]]:
    keys = config.reward.model
    return [(str(keys.path), keys.megatron, "reward.model.megatron")] if keys.enable else []
