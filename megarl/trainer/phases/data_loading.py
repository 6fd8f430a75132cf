"""Tokenizer, datasets and loaders of a job, built from the configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megarl.agents import check_agent_names
from megarl.agents.tools import load_tools
from megarl.base.errors import ConfigError, DataError, ModelError
from megarl.base.user_code import import_spec, load_user_class
from megarl.config.schema.data import CustomDatasetConfig, DataConfig, DataSourceConfig, PromptsConfig, SamplerConfig
from megarl.config.schema.jobs import GenerationJobConfig, TrainConfig
from megarl.data import RLHFDataset, StatefulLoader
from megarl.data.dataset import RowDataset
from megarl.data.order import EpochOrder, MixedSet, MixtureOrder, MixtureSchedule, RowOrder, SamplerOrder
from megarl.data.rows import expand_files
from megarl.trainer.phases.rollout_phase import AGENT_NAME


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder.

    Raises:
        ModelError: it cannot be loaded, or has no chat template or no end-of-sequence token.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"no tokenizer can be loaded from {path}: {error}") from error
    for name in ("chat_template", "eos_token"):
        if getattr(tokenizer, name, None) is None:
            raise ModelError(f"the tokenizer in {path} has no {name}; set it in its tokenizer_config.json")
    return tokenizer


def prompt_loader(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> StatefulLoader:
    """Build the loader of training prompts, in batches of ``data.train_batch_size``; it counts dropped rows.

    Raises:
        DataError, ConfigError: a file, a row, the sampler, the mixture or the curriculum is invalid.
    """
    data = config.data
    dataset = _dataset(config, training_files(data), tokenizer, dataset_class(data.custom_cls), **subset_options(data))
    sampler = user_sampler(data.sampler)
    order = training_order(data, dataset) if sampler is None else _sampler_order(sampler, config, dataset)
    return StatefulLoader(dataset, data.train_batch_size, dataset.collate, order=order)


def validation_loader(config: GenerationJobConfig, tokenizer: PreTrainedTokenizerBase) -> StatefulLoader:
    """Build the loader of held-out prompts in file order, at most ``data.val_max_samples``."""
    return _sequential_loader(config, config.data.val_files, tokenizer, RLHFDataset)


class PromptOnlyDataset(RLHFDataset):
    """Prompts without the columns of a reward function."""

    scored = False


def generation_loader(
    config: GenerationJobConfig, files: list[str], tokenizer: PreTrainedTokenizerBase
) -> StatefulLoader:
    """Build the loader of prompts to generate from, in file order, with all columns of the rows."""
    return _sequential_loader(config, files, tokenizer, PromptOnlyDataset)


def _sequential_loader(
    config: GenerationJobConfig, files: list[str], tokenizer: PreTrainedTokenizerBase, kind: type[RLHFDataset]
) -> StatefulLoader:
    data, seed = config.data, config.actor_rollout_ref.rollout.seed
    dataset = _dataset(config, files, tokenizer, kind, max_samples=data.val_max_samples, sample_seed=seed or 0)
    return StatefulLoader(dataset, data.val_batch_size, dataset.collate, shuffle=False, drop_last=False)


def training_files(data: DataSourceConfig) -> list[str]:
    """List all training files; for a mixture, the files of its data sets one after another."""
    return [file for name in data.mixture for file in _set_files(data, name)] or list(data.train_files)


def training_order(data: DataSourceConfig, dataset: RowDataset) -> RowOrder:
    """Build the order of the training rows: shuffled epochs, a mixture, or a curriculum.

    Raises:
        DataError: a weight or a difficulty is not a number, or there are too few rows.
    """
    seed, size = data.seed or 0, data.train_batch_size
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
        raise DataError(f"data.curriculum.column={curriculum.column}: {error}") from error
    return EpochOrder(len(dataset), size, seed, data.shuffle, difficulty=difficulty, sorted_epochs=curriculum.epochs)


def mixture_weights(data: DataSourceConfig) -> dict[str, MixtureSchedule]:
    """Parse the weight schedule of each data set of a mixture.

    Raises:
        DataError: a weight is malformed; names its key.
    """
    weights = {}
    for name, entry in data.mixture.items():
        try:
            weights[name] = MixtureSchedule.parse(entry.get("weight", 1.0))
        except DataError as error:
            raise DataError(f"data.mixture.{name}.weight: {error}") from error
    return weights


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
        raise ConfigError(f"data.sampler: {keys.class_path} has no class {name!r}")
    return sampler


def dataset_class(keys: CustomDatasetConfig) -> type[RLHFDataset]:
    """Import the user's dataset class; :class:`RLHFDataset` if none is configured.

    Raises:
        ConfigError: the class cannot be imported, or does not derive from :class:`RLHFDataset`.
    """
    if keys.path is None:
        return RLHFDataset
    return load_user_class(_spec(keys.path, keys.name), RLHFDataset, "data.custom_cls")


def _spec(path: str, name: str | None) -> str:
    path = path.removeprefix("pkg://")
    return f"{path}:{name}" if path.endswith(".py") else f"{path}.{name}"


def _sampler_order(sampler: Any, config: TrainConfig, dataset: RLHFDataset) -> SamplerOrder:
    data: DataConfig = config.data
    try:
        order = sampler(data_source=dataset, data_config=data)
    except TypeError as error:
        raise ConfigError(
            f"data.sampler: {sampler.__name__} failed on the arguments data_source and data_config: {error}"
        ) from error
    if hasattr(order, "update") and config.algorithm.filter_groups.enable:
        raise ConfigError(
            f"data.sampler: {sampler.__name__} has update(), which needs whole batches, and "
            "algorithm.filter_groups.enable=true takes parts of them; set it to false"
        )
    return SamplerOrder(order, data.train_batch_size)


def _set_files(data: DataSourceConfig, name: str) -> list[str]:
    files = data.mixture[name]["files"]
    return [files] if isinstance(files, str) else list(files)


def subset_options(data: DataSourceConfig) -> dict[str, Any]:
    """Dataset arguments that limit the training rows: ``max_samples`` and the seed of the draw."""
    return {"max_samples": data.train_max_samples, "sample_seed": data.seed or 0 if data.shuffle else None}


def _dataset(
    config: GenerationJobConfig,
    files: list[str],
    tokenizer: PreTrainedTokenizerBase,
    kind: type[RLHFDataset],
    **sample: Any,
) -> RLHFDataset:
    data: PromptsConfig = config.data
    dataset = kind(
        files,
        tokenizer,
        data.max_prompt_length,
        prompt_key=data.prompt_key,
        truncation=data.truncation,
        filter_overlong_prompts=data.filter_overlong_prompts,
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
        reward_fn_key=data.reward_fn_key,
        system_prompt=data.system_prompt,
        tool_schemas=_tool_schemas(config),
        workers=data.filter_overlong_prompts_workers,
        cache_dir=data.cache_dir,
        **sample,
    )
    check_agent_names(config, dataset.source.first_rows(AGENT_NAME), dataset.source.location)
    return dataset


def _tool_schemas(config: GenerationJobConfig) -> dict[str, Mapping[str, Any]]:
    """Schemas of the tools that a row may name."""
    path = config.actor_rollout_ref.rollout.multi_turn.tool_config_path
    tools = load_tools(path) if path else {}
    return {name: equipped.tool.declaration for name, equipped in tools.items()}
