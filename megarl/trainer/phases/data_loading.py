"""Datasets and loaders of a job, built from the configuration and from classes of the user."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from omegaconf import DictConfig, OmegaConf
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from megarl.agents import check_agent_names
from megarl.agents.tools import load_tools
from megarl.agents.types import AGENT_NAME
from megarl.base.errors import ConfigError, DataError
from megarl.base.user_code import import_spec, load_user_class, load_user_function
from megarl.config.schema.data import CustomDatasetConfig, DataConfig, DataSourceConfig, PromptsConfig, SamplerConfig
from megarl.config.schema.jobs import GenerationJobConfig, TrainConfig
from megarl.data import DataProto, RLHFDataset, StatefulLoader
from megarl.data.dataset import CustomCollate, CustomPrompts, RowDataset, pad_id, takes_verls_arguments
from megarl.data.order import EpochOrder, MixedSet, MixtureOrder, MixtureSchedule, RowOrder, SamplerOrder
from megarl.data.rows import expand_files
from megarl.data.tokenization import PromptEncoder, PromptReader
from megarl.models import read_model_config
from megarl.rollout.image_reader import image_reader
from megarl.rollout.settings import context_tokens
from megarl.trainer.phases.model_passes import check_teacher_keys
from megarl.trainer.phases.prompt_images import unread_columns

Prompts: TypeAlias = RLHFDataset | CustomPrompts


def prompt_loader(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> StatefulLoader:
    """Build the loader of training prompts, in batches of ``data.train_batch_size``; it counts dropped rows.

    Raises:
        DataError, ConfigError: a file, a row, the sampler, the mixture or the curriculum is invalid.
    """
    data = config.data
    dataset = _prompts(config, training_files(data), tokenizer, **subset_options(data))
    if config.distillation.enabled and isinstance(dataset, RLHFDataset):
        _check_teachers(config, dataset)
    sampler = user_sampler(data.sampler)
    order = training_order(data, dataset) if sampler is None else _sampler_order(sampler, config, dataset)
    return StatefulLoader(dataset, data.train_batch_size, _collate(config, dataset), order=order)


def validation_loader(config: GenerationJobConfig, tokenizer: PreTrainedTokenizerBase) -> StatefulLoader:
    """Build the loader of held-out prompts in file order, at most ``data.val_max_samples``.

    A training job reads them with ``data.custom_cls`` and ``data.collate_fn``, like its training prompts.
    """
    dataset = _prompts(config, config.data.val_files, tokenizer, **_held_out(config))
    return _sequential_loader(config, dataset)


class _PromptOnlyDataset(RLHFDataset):
    """Prompts without the columns of a reward function."""

    scored = False


def generation_loader(
    config: GenerationJobConfig, files: list[str], tokenizer: PreTrainedTokenizerBase
) -> StatefulLoader:
    """Build the loader of prompts to generate from, in file order, with all columns of the rows."""
    return _sequential_loader(config, _dataset(config, files, tokenizer, _PromptOnlyDataset, **_held_out(config)))


def _sequential_loader(config: GenerationJobConfig, dataset: Prompts) -> StatefulLoader:
    collate = _collate(config, dataset)
    return StatefulLoader(dataset, config.data.val_batch_size, collate, shuffle=False, drop_last=False)


def _held_out(config: GenerationJobConfig) -> dict[str, Any]:
    return {
        "max_samples": config.data.val_max_samples,
        "sample_seed": config.actor_rollout_ref.rollout.seed or 0,
    }


def _collate(config: GenerationJobConfig, dataset: Prompts) -> Callable[[list[Any]], DataProto]:
    """The data set's way to collate samples, or the user's."""
    function = collate_function(config.data) if isinstance(config.data, DataConfig) else None
    return dataset.collate if function is None else CustomCollate(function, pad_id(dataset.encoder.tokenizer))


def training_files(data: DataSourceConfig) -> list[str]:
    """List all training files; for a mixture, the files of its data sets one after another."""
    return [file for name in data.mixture for file in _set_files(data, name)] or list(data.train_files)


def training_order(data: DataSourceConfig, dataset: RowDataset | CustomPrompts) -> RowOrder:
    """Build the order of the training rows: shuffled epochs, a mixture, or a curriculum.

    Raises:
        ConfigError: a mixture or a curriculum of a data set with verl's constructor, which alone knows its files.
        DataError: a weight or a difficulty is not a number, or there are too few rows.
    """
    seed, size = data.seed or 0, data.train_batch_size
    if isinstance(dataset, CustomPrompts):
        for key, value in (("data.mixture", data.mixture), ("data.curriculum.column", data.curriculum.column)):
            if value:
                raise ConfigError(
                    f"{key}: needs the rows of files, and data.custom_cls reads its files itself; remove one of them",
                    code="data.custom-class-order",
                )
        return EpochOrder(len(dataset), size, seed, data.shuffle)
    if data.mixture:
        weights, counts = mixture_weights(data), iter(dataset.rows_of_files())
        rows = {name: sum(next(counts) for _ in expand_files(_set_files(data, name))) for name in data.mixture}
        sets = [MixedSet(name, rows[name], weights[name]) for name in data.mixture]
        return MixtureOrder(sets, size, seed, data.shuffle)
    curriculum = data.curriculum
    if curriculum.column is None:
        return EpochOrder(len(dataset), size, seed, data.shuffle)
    try:
        difficulty = dataset.numbers(curriculum.column)
    except DataError as error:
        raise DataError(f"data.curriculum.column={curriculum.column}: {error.text}", code=error.code) from error
    return EpochOrder(len(dataset), size, seed, data.shuffle, difficulty=difficulty, sorted_epochs=curriculum.epochs)


def mixture_weights(data: DataSourceConfig) -> dict[str, MixtureSchedule]:
    """Parse a mixture's weight schedules.

    Raises:
        DataError: a weight is malformed; names its key.
    """
    weights = {}
    for name, entry in data.mixture.items():
        try:
            weights[name] = MixtureSchedule.parse(entry.get("weight", 1.0))
        except DataError as error:
            raise DataError(f"data.mixture.{name}.weight: {error.text}", code=error.code) from error
    return weights


def _check_teachers(config: TrainConfig, dataset: RLHFDataset) -> None:
    """Check that each row selects a teacher, if there are several.

    Raises:
        DataError: names the values without a teacher.
    """
    key, teachers = config.distillation.teacher_key, list(config.distillation.teachers_by_key)
    if len(teachers) > 1:
        column = config.data.reward_fn_key if key == "data_source" else key
        check_teacher_keys(list(dataset.source.first_rows(column)) or None, teachers, key)


def _sampler_order(sampler: Any, config: TrainConfig, dataset: Prompts) -> SamplerOrder:
    data: DataConfig = config.data
    source = dataset.source if isinstance(dataset, CustomPrompts) else dataset
    try:
        order = sampler(data_source=source, data_config=_verls_section(data))
    except TypeError as error:
        raise ConfigError(
            f"data.sampler: {sampler.__name__} failed on the arguments data_source and data_config: {error}",
            code="data.sampler-arguments",
        ) from error
    return SamplerOrder(order, data.train_batch_size)


def _set_files(data: DataSourceConfig, name: str) -> list[str]:
    files = data.mixture[name]["files"]
    return [files] if isinstance(files, str) else list(files)


def subset_options(data: DataSourceConfig) -> dict[str, Any]:
    """Return the dataset arguments that limit the training rows: ``max_samples`` and the seed of the draw."""
    return {"max_samples": data.train_max_samples, "sample_seed": data.seed or 0 if data.shuffle else None}


def _prompts(
    config: GenerationJobConfig, files: list[str], tokenizer: PreTrainedTokenizerBase, **subset: Any
) -> Prompts:
    """Build the data set of some files: megarl's, or the user's of ``data.custom_cls``."""
    data = config.data
    keys = data.custom_cls if isinstance(data, DataConfig) else CustomDatasetConfig()
    kind = dataset_class(keys)
    if issubclass(kind, RLHFDataset) and not reads_its_files(keys):
        return _dataset(config, files, tokenizer, kind, **subset)
    vocab_size, prompt_room = _model_limits(config)
    images = image_reader(config)
    return CustomPrompts(
        kind,
        files,
        tokenizer,
        _verls_section(data),
        subset["max_samples"],
        reader=PromptReader(
            data.prompt_key, data.system_prompt, _tool_schemas(config), data.apply_chat_template, images
        ),
        encoder=PromptEncoder(
            tokenizer,
            data.apply_chat_template_kwargs,
            vocab_size=vocab_size,
            max_tokens=data.max_prompt_length,
            image_token=None if images is None else images.token,
        ),
        media=unread_columns(config),
        prompt_room=prompt_room,
        max_prompt_length=data.max_prompt_length,
        truncation=data.truncation,
        reward_fn_key=data.reward_fn_key,
    )


def _dataset(
    config: GenerationJobConfig,
    files: list[str],
    tokenizer: PreTrainedTokenizerBase,
    kind: type[RLHFDataset],
    **sample: Any,
) -> RLHFDataset:
    data: PromptsConfig = config.data
    vocab_size, prompt_room = _model_limits(config)
    images = image_reader(config)
    dataset = kind(
        files,
        tokenizer,
        data.max_prompt_length,
        prompt_key=data.prompt_key,
        truncation=data.truncation,
        filter_overlong_prompts=data.filter_overlong_prompts,
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
        apply_chat_template=data.apply_chat_template,
        reward_fn_key=data.reward_fn_key,
        system_prompt=data.system_prompt,
        tool_schemas=_tool_schemas(config),
        workers=data.filter_overlong_prompts_workers,
        cache_dir=data.cache_dir,
        vocab_size=vocab_size,
        prompt_room=prompt_room,
        images=images,
        media=unread_columns(config),
        **sample,
    )
    check_agent_names(config, dataset.source.first_rows(AGENT_NAME), dataset.source.location)
    return dataset


def _model_limits(config: GenerationJobConfig) -> tuple[int, int | None]:
    """Return the policy's number of tokens, and the room of a prompt if ``data.max_prompt_length`` exceeds it."""
    data, policy = config.data, config.actor_rollout_ref
    model = read_model_config(policy.model.path)
    room = context_tokens(policy.rollout, model) - data.max_response_length
    return model.vocab_size, None if room >= data.max_prompt_length else room


def _tool_schemas(config: GenerationJobConfig) -> dict[str, Mapping[str, Any]]:
    """Schemas of the tools that a row may name."""
    path = config.actor_rollout_ref.rollout.multi_turn.tool_config_path
    tools = load_tools(path) if path else {}
    return {name: equipped.tool.declaration for name, equipped in tools.items()}


def user_sampler(keys: SamplerConfig) -> Any:
    """Import the user's sampler class; None if none is configured.

    Raises:
        ConfigError: the class cannot be imported.
    """
    if keys.class_path is None:
        return None
    module, name = import_spec(_spec(keys.class_path, keys.class_name), "data.sampler", "class")
    sampler = getattr(module, name, None)
    if not isinstance(sampler, type):
        raise ConfigError(f"data.sampler: {keys.class_path} has no class {name!r}", code="config.user-code-class")
    return sampler


def dataset_class(keys: CustomDatasetConfig) -> type[Dataset[Any]]:
    """Import the user's data set class; :class:`RLHFDataset` if none is configured.

    Raises:
        ConfigError: the class cannot be imported, or derives neither from :class:`RLHFDataset` nor from torch's
            ``Dataset``.
    """
    if keys.path is None:
        return RLHFDataset
    return load_user_class(_spec(keys.path, keys.name), Dataset, "data.custom_cls")


def reads_its_files(keys: CustomDatasetConfig) -> bool:
    """Return whether the user's data set class has verl's constructor, and so reads files of any kind itself."""
    kind = dataset_class(keys)
    return not issubclass(kind, RLHFDataset) or takes_verls_arguments(kind)


def collate_function(data: DataConfig) -> Callable[..., Any] | None:
    """Import the user's collate function; None if none is configured.

    Raises:
        ConfigError: it cannot be imported, or does not take one argument.
    """
    return None if data.collate_fn is None else load_user_function(data.collate_fn, "data.collate_fn", arguments=1)


def _verls_section(data: PromptsConfig) -> DictConfig:
    """Return the section ``data`` as verl's classes expect it: keys as attributes, as items, and by ``get``."""
    return OmegaConf.create(dataclasses.asdict(data))


def _spec(path: str, name: str | None) -> str:
    path = path.removeprefix("pkg://")
    return f"{path}:{name}" if path.endswith(".py") else f"{path}.{name}"
