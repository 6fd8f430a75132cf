"""Early preflight: packages, folders, models, data, devices and logins of a job, before anything imports torch.

The command line runs these checks within a second or two, before the imports of a job. The checks in
:mod:`megarl.trainer.jobs.preflight` need the imports.

A check raises a :class:`~megarl.base.errors.ConfigError`, ``ModelError`` or ``DataError`` that names the key, its value
and the remedy.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.base.errors import ConfigError, ModelError
from megarl.base.files import WRITABLE, write_error
from megarl.base.packages import is_installed, require_sglang
from megarl.base.provenance import install_command
from megarl.config import (
    AdapterKeys,
    EvaluateConfig,
    GenerateConfig,
    MegatronConfig,
    PairTrainingConfig,
    SFTConfig,
    TrainConfig,
)
from megarl.config.schema.data import DataSourceConfig, PreferenceDataConfig, RewardPairDataConfig
from megarl.config.schema.distillation import TeacherConfig
from megarl.config.schema.jobs import GenerationJobConfig, JobConfig, SupervisedConfig, own_pools
from megarl.config.schema.rollout import SUPPORT_KEY
from megarl.config.stored import output_files, output_folders
from megarl.data import check_files
from megarl.models import check_model_folder, read_model_config
from megarl.models.carried_tensors import unused_tensors, warn_of_unused
from megarl.models.hf_folder import image_grid
from megarl.rollout.image_reader import image_reader
from megarl.tracking import check_trackers
from megarl.trainer.jobs.output_folders import check_output_files
from megarl.trainer.phases.prompt_images import unread_columns
from megarl.trainer.roles.devices import check_dashboard, check_devices
from megarl.workers.settings import check_adapters, check_role, check_router_replay

logger = logging.getLogger(__name__)


def check_early(config: JobConfig) -> None:
    """Check everything that needs no torch; a second or two after the command, a wrong input is reported.

    Raises:
        ConfigError, ModelError, DataError: names the key, its value, and the remedy.
        ResourceError: the cluster at ``RAY_ADDRESS`` does not answer.
    """
    check_packages(config)
    check_writable(config)
    if isinstance(config, EvaluateConfig | GenerateConfig):
        check_output_files(config)
    if isinstance(config, TrainConfig | SupervisedConfig):
        check_learners(config)
    if isinstance(config, TrainConfig | EvaluateConfig) and config.reward.model.enable:
        check_reward_model(config)
    _name_unused_tensors(config)
    _note_unrecorded_filter(config)
    check_rows(config)
    check_devices(config.trainer, own_pools(config))
    if not isinstance(config, GenerateConfig):  # it tracks nothing
        check_trackers(config.trainer.logger)


def _name_unused_tensors(config: JobConfig) -> None:
    """Warn of tensors in the model folders that nothing loads, such as biases not announced in ``config.json``."""
    paths: list[str | None] = []
    if isinstance(config, SupervisedConfig):
        paths = [config.model.path]
    elif isinstance(config, TrainConfig):
        teachers = config.distillation.local_teachers.values() if config.distillation.enabled else ()
        paths = [config.actor_rollout_ref.model.path, *(teacher.model_path for teacher in teachers)]
        paths += [config.critic.model.path] * config.uses_critic
    if isinstance(config, TrainConfig | EvaluateConfig) and config.reward.model.enable:
        paths.append(config.reward.model.path)
    for path in dict.fromkeys(map(str, paths)):
        warn_of_unused(path, unused_tensors(check_model_folder(path)))


def _note_unrecorded_filter(config: JobConfig) -> None:
    """Warn of a token filter in training whose log-probs are those of the whole vocabulary."""
    if isinstance(config, TrainConfig):
        rollout = config.actor_rollout_ref.rollout
        if rollout.filters_tokens and not rollout.support.enable:
            logger.warning(
                "training samples with top_p=%g, top_k=%d, min_p=%g, but its log-probs are over the whole vocabulary, "
                "so the ratio is biased; %s.enable=true normalizes them over the tokens that were sampled from",
                *(rollout.top_p, rollout.top_k, rollout.min_p, SUPPORT_KEY),
            )


def check_packages(config: JobConfig) -> None:
    """Check that SGLang and the packages of Ray's dashboard are installed, if the job uses them; warn without plotly.

    Raises:
        ConfigError: one is missing; the message has the installation command.
    """
    if not isinstance(config, SupervisedConfig) and config.actor_rollout_ref.rollout.name == "sglang":
        require_sglang()
    check_dashboard(config.trainer)
    if not is_installed("plotly"):
        command = install_command("report")
        logger.warning("plotly is not installed, so the job will end without an HTML report; to get one, %s", command)


def check_writable(config: JobConfig) -> None:
    """Check that the folders of checkpoints, export and responses can be written.

    Raises:
        ConfigError: names the first that cannot, by key.
    """
    files = {key: str(Path(file).parent) for key, file in output_files(config).items()}
    for key, folder in (output_folders(config) | files).items():
        if problem := write_error(Path(folder)):
            raise ConfigError(f"{key}={folder}: cannot be written to ({problem}); {WRITABLE}", code="disk.not-writable")


def check_learners(config: TrainConfig | SupervisedConfig, *, weights: bool = True) -> None:
    """Check the models of the training roles and the reference, and their layouts.

    Args:
        weights: require weights; if False, a ``config.json`` is enough.
    """
    if isinstance(config, SupervisedConfig):
        _check_model(config.model.path, config.megatron, "megatron", weights=weights)
        value_head = config.role == "reward_model"
        _check_adapters(
            config.model.path, config.model, config.megatron, "model", value_head=value_head, weights=weights
        )
        _check_export(config.trainer.hf_export_dir, [config.model.path])
        return
    policy = config.actor_rollout_ref
    trained = policy.trains_tower
    _check_model(policy.model.path, policy.actor.megatron, "actor_rollout_ref.actor.megatron", trained, weights=weights)
    _check_tower(config)
    _check_adapters(policy.model.path, policy.model, policy.actor.megatron, "actor_rollout_ref.model", weights=weights)
    check_router_replay(read_model_config(policy.model.path), policy.actor.router_replay.mode)
    if config.uses_reference and policy.ref.megatron is not None:
        _check_model(policy.model.path, policy.ref.megatron, "actor_rollout_ref.ref.megatron", weights=weights)
    if config.uses_critic:
        critic = config.critic
        check_same_images(policy.model.path, str(critic.model.path), "critic.model.path")
        trained = critic.model.trains_tower
        _check_model(str(critic.model.path), critic.megatron, "critic.megatron", trained, weights=weights)
        _check_adapters(
            str(critic.model.path), critic.model, critic.megatron, "critic.model", value_head=True, weights=weights
        )
    others = [path for path in (config.critic.model.path, config.reward.model.path) if path]
    others += [str(teacher.model_path) for teacher in check_teachers(config, weights=weights)]
    _check_export(config.trainer.hf_export_dir, [policy.model.path, *others])


def check_teachers(config: TrainConfig, *, weights: bool = True) -> list[TeacherConfig]:
    """Check that the teachers of a distillation are language models, fit their layouts, and have enough tokens.

    Returns:
        The teachers, without those that are servers; empty without distillation.
    """
    if not config.distillation.enabled:
        return []
    loss, student = config.distillation.distillation_loss, config.actor_rollout_ref.model.path
    vocab_size = read_model_config(student).vocab_size
    if loss.teacher_topk > vocab_size:
        raise ConfigError(
            f"distillation.distillation_loss.topk={loss.teacher_topk}: the policy has {vocab_size} tokens; set at most "
            "that many",
            code="teacher.topk-tokens",
        )
    teachers = config.distillation.local_teachers
    for name, teacher in teachers.items():
        path, field = str(teacher.model_path), f"distillation.teacher_models.{name}"
        model = read_model_config(path)
        if model.is_value_model:
            raise ModelError(
                f"{field}.model_path={path} has a scalar head; a teacher is a language model",
                code="teacher.scalar-head",
            )
        check_same_images(student, path, f"{field}.model_path")
        tokens = min(model.vocab_size, vocab_size)
        if loss.reads_teacher_hidden and tokens < vocab_size:
            raise ConfigError(
                f"distillation.distillation_loss.loss_mode={loss.loss_mode}: the teacher {field}.model_path={path} has "
                f"{tokens} of the policy's {vocab_size} tokens, and the KL is infinite where it has no probability; "
                "set k2 or k3, or take a teacher with as many tokens",
                code="teacher.fewer-tokens",
            )
        if loss.teacher_topk > tokens:
            raise ConfigError(
                f"distillation.distillation_loss.topk={loss.teacher_topk}: teacher and student share {tokens} "
                "tokens; set at most that many",
                code="teacher.topk-tokens",
            )
        _check_model(path, teacher.megatron, f"{field}.megatron", weights=weights)
    return list(teachers.values())


def _check_tower(config: TrainConfig) -> None:
    """Check the keys of the policy's vision tower against its model."""
    policy, field = config.actor_rollout_ref, "actor_rollout_ref.actor"
    model, frozen = read_model_config(policy.model.path), policy.actor.freeze_vision_tower
    if model.vision is None and frozen:
        raise ConfigError(
            f"{field}.freeze_vision_tower=true has no effect: {model.architecture} of {policy.model.path} has no "
            "vision tower; remove the key",
            code="image.no-tower",
        )
    if policy.actor.vision_lr_factor != 1 and (model.vision is None or not policy.trains_tower):
        raise ConfigError(
            f"{field}.vision_lr_factor={policy.actor.vision_lr_factor} has no effect: no vision tower is trained; "
            "remove the key",
            code="image.no-trained-tower",
        )
    if frozen and policy.trains_tower:
        raise ConfigError(
            f"{field}.freeze_vision_tower=true: keys of actor_rollout_ref.model.lora train the vision tower; set it to "
            "false, or remove lora.adapt_vision_tower and lora.freeze_vision_*",
            code="image.frozen-tower",
        )


def check_same_images(policy: str, other: str, key: str) -> None:
    """Check that another model, named by ``key``, sees the policy's images with the same tokens."""
    models = [read_model_config(path) for path in (policy, other)]
    if models[0].vision is None:
        return
    tokens = [model.vision and model.vision.image_token for model in models]
    grids = [image_grid(path) for path in (policy, other)]
    for name, values in {"image_token_id": tokens, **{n: [grid[n] for grid in grids] for n in grids[0]}}.items():
        if values[0] != values[1]:
            raise ConfigError(
                f"{key}={other}: {name} is {values[1]}, and {values[0]} in the policy {policy}, whose images it would "
                "not see with the same tokens; name a model with the same image processor",
                code="image.other-processor",
            )


def _check_export(folder: str | None, models: Sequence[str]) -> None:
    """Check that the export replaces none of the models that the run starts from."""
    if folder is not None and Path(folder).resolve() in {Path(path).resolve() for path in models}:
        raise ConfigError(
            f"trainer.hf_export_dir={folder} is the model that the run starts from, which the export would replace; "
            "choose another folder",
            code="disk.export-replaces-model",
        )


def check_reward_model(config: TrainConfig | EvaluateConfig, *, weights: bool = True) -> None:
    """Check that the reward model has a scalar head and fits its layout."""
    path = str(config.reward.model.path)
    if not read_model_config(path).is_value_model:
        raise ModelError(
            f"reward.model.path={path} is a language model and has no scalar head; name a model of sequence "
            "classification with one label, such as megarl reward-model writes",
            code="reward.no-scalar-head",
        )
    if isinstance(config, TrainConfig):
        check_same_images(config.actor_rollout_ref.model.path, path, "reward.model.path")
    _check_model(path, config.reward.model.megatron, "reward.model.megatron", weights=weights)


def _check_model(
    path: str, megatron: MegatronConfig, field: str, trained_tower: bool = False, *, weights: bool = True
) -> None:
    model = check_model_folder(path).config if weights else read_model_config(path)
    check_role(model.with_trained_tower(trained_tower), megatron, field)


def _check_adapters(
    path: str, keys: AdapterKeys, megatron: MegatronConfig, field: str, *, value_head: bool = False, weights: bool
) -> None:
    model = read_model_config(path)
    if value_head and not model.is_value_model:
        model = model.as_reward_model(None)
    check_adapters(model, keys, megatron, field, value_head=value_head, base=path if weights else None)


def check_rows(config: JobConfig) -> None:
    """Check the data files of a job: schema, and for JSON the first rows.

    A user's data set class may read files of any kind, so its files are checked when the class is imported.
    """
    if isinstance(config, GenerateConfig):
        if config.data.val_files:  # otherwise the prompts are texts, or on the standard input
            check_files(config.data.val_files, (), "data.val_files", config.data.prompt_key, **_media(config))
    elif isinstance(config, SFTConfig):
        texts = () if config.data.messages_key else (config.data.response_key,)
        _check_training_files(config.data, prompt=config.data.messages_key or config.data.prompt_key, texts=texts)
    elif isinstance(config, PairTrainingConfig):
        _check_pairs(config)
    elif isinstance(config, EvaluateConfig) or (
        isinstance(config, TrainConfig) and config.data.custom_cls.path is None
    ):
        check_prompt_rows(config)


def check_prompt_rows(config: TrainConfig | EvaluateConfig) -> None:
    """Check that the files have prompts, data sources and ground truths."""
    data = config.data
    columns, options = (data.reward_fn_key, "reward_model"), {"source_key": data.reward_fn_key, **_media(config)}
    if isinstance(config, TrainConfig):
        _check_training_files(config.data, columns, data.prompt_key, **options)
    if data.val_files:
        check_files(data.val_files, columns, "data.val_files", data.prompt_key, **options)


def _media(config: GenerationJobConfig) -> dict[str, Any]:
    """Return the arguments of :func:`megarl.data.check_files` that depend on whether the policy reads images.

    The policy of other jobs than training may be a checkpoint, which is found later; their loaders check images.
    """
    if not isinstance(config, TrainConfig):
        return {"media": (), "parts": True}
    return {"media": unread_columns(config), "parts": image_reader(config) is not None}


def _check_pairs(config: PairTrainingConfig) -> None:
    data = config.data
    prompt = None if data.conversations else data.prompt_key
    numbers = [data.margin_key] if isinstance(data, RewardPairDataConfig) and data.margin_key else []
    texts = [data.chosen_key, data.rejected_key]
    if isinstance(data, PreferenceDataConfig) and data.label_key:
        numbers, texts = [data.label_key], [data.response_key]
    _check_training_files(data, numbers, prompt, texts)
    if data.val_files:
        check_files(data.val_files, numbers, "data.val_files", prompt, texts)


def _check_training_files(
    data: DataSourceConfig,
    columns: Sequence[str] = (),
    prompt: str | None = None,
    texts: Sequence[str] = (),
    **options: Any,
) -> None:
    """Check the training files, or the files of a mixture; arguments as of :func:`megarl.data.check_files`."""
    mixture: Mapping[str, Sequence[str]] = {
        f"data.mixture.{name}.files": entry["files"] for name, entry in data.mixture.items()
    }
    for field, files in (mixture or {"data.train_files": data.train_files}).items():
        check_files(files, columns, field, prompt, texts, **options)
