"""Rows in batches, as the configuration asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from megarl.config.data import CustomDatasetConfig, DataConfig, PromptsConfig, SamplerConfig
from megarl.config.parts import DataSourceConfig
from megarl.config.schema import AnswersConfig, TrainConfig
from megarl.data import RLHFDataset, StatefulLoader
from megarl.data.mixture import MixedSet, MixtureOrder, WeightSchedule
from megarl.data.order import EpochOrder, RowOrder, SamplerOrder
from megarl.data.row_dataset import RowDataset
from megarl.data.rows import expand_files
from megarl.errors import ConfigError, DataError
from megarl.own_module import load_class, locate
from megarl.rollout.agents import check_agent_names
from megarl.rollout.tools import load_tools
from megarl.trainer.rollout import AGENT_NAME


def prompt_loader(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> StatefulLoader:
    """Training prompts in batches of ``data.train_batch_size``; counts what it drops.

    Raises:
        DataError, ConfigError: a file, a row, or what says in which order rows come is wrong.
    """
    data = config.data
    dataset = _dataset(config, training_files(data), tokenizer, own_dataset(data.custom_cls), **kept_rows(data))
    sampler = own_sampler(data.sampler)
    order = training_order(data, dataset) if sampler is None else _sampler_order(sampler, config, dataset)
    return StatefulLoader(dataset, data.train_batch_size, dataset.collate, order=order)


def validation_loader(config: AnswersConfig, tokenizer: PreTrainedTokenizerBase) -> StatefulLoader:
    """Held-out prompts in file order, every one of them, or as many as ``data.val_max_samples``."""
    return _in_file_order(config, config.data.val_files, tokenizer, RLHFDataset)


class AskedDataset(RLHFDataset):
    """Prompts alone: rows need nothing that answers would be scored by."""

    scored = False


def asked_loader(config: AnswersConfig, files: list[str], tokenizer: PreTrainedTokenizerBase) -> StatefulLoader:
    """As :func:`validation_loader`, of other files, and with all of their rows' columns."""
    return _in_file_order(config, files, tokenizer, AskedDataset)


def _in_file_order(
    config: AnswersConfig, files: list[str], tokenizer: PreTrainedTokenizerBase, kind: type[RLHFDataset]
) -> StatefulLoader:
    data, seed = config.data, config.actor_rollout_ref.rollout.seed
    dataset = _dataset(config, files, tokenizer, kind, max_samples=data.val_max_samples, sample_seed=seed or 0)
    return StatefulLoader(dataset, data.val_batch_size, dataset.collate, shuffle=False, drop_last=False)


def training_files(data: DataSourceConfig) -> list[str]:
    """All files to train on, of a mixture those of its sets behind each other."""
    return [file for name in data.mixture for file in _set_files(data, name)] or list(data.train_files)


def training_order(data: DataSourceConfig, dataset: RowDataset) -> RowOrder:
    """The order in which rows to train on come, and their batches.

    Raises:
        DataError: a weight or a difficulty is no number, or there are too few rows.
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


def mixture_weights(data: DataSourceConfig) -> dict[str, WeightSchedule]:
    """The weight of each data set of a mixture.

    Raises:
        DataError: one is malformed; names its key.
    """
    weights = {}
    for name, entry in data.mixture.items():
        try:
            weights[name] = WeightSchedule.parse(entry.get("weight", 1.0))
        except DataError as error:
            raise DataError(f"data.mixture.{name}.weight: {error}") from error
    return weights


def own_sampler(keys: SamplerConfig) -> Any:
    """The class of a sampler of the user's own, None where there is none.

    Raises:
        ConfigError: there is no such class.
    """
    if keys.class_path is None:
        return None
    module, name = locate(_spec(keys.class_path, keys.class_name), "data.sampler", "class")
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise ConfigError(f"data.sampler: {keys.class_path} has no class {name!r}")
    return found


def own_dataset(keys: CustomDatasetConfig) -> type[RLHFDataset]:
    """The class of the training data set: the user's own, or the usual one.

    Raises:
        ConfigError: there is no such class, or it does not derive from the usual one.
    """
    if keys.path is None:
        return RLHFDataset
    return load_class(_spec(keys.path, keys.name), RLHFDataset, "data.custom_cls")


def _spec(path: str, name: str | None) -> str:
    path = path.removeprefix("pkg://")
    return f"{path}:{name}" if path.endswith(".py") else f"{path}.{name}"


def _sampler_order(sampler: Any, config: TrainConfig, dataset: RLHFDataset) -> SamplerOrder:
    data: DataConfig = config.data
    try:
        built = sampler(data_source=dataset, data_config=data)
    except TypeError as error:
        raise ConfigError(
            f"data.sampler: {sampler.__name__} is called with data_source and data_config, which failed: {error}"
        ) from error
    if hasattr(built, "update") and config.algorithm.filter_groups.enable:
        raise ConfigError(
            f"data.sampler: {sampler.__name__} has update(), which is told of whole batches, and "
            "algorithm.filter_groups.enable=true takes parts of them; set that to false"
        )
    return SamplerOrder(built, data.train_batch_size)


def _set_files(data: DataSourceConfig, name: str) -> list[str]:
    files = data.mixture[name]["files"]
    return [files] if isinstance(files, str) else list(files)


def kept_rows(data: DataSourceConfig) -> dict[str, Any]:
    """Which rows to keep where not all are wanted."""
    return {"max_samples": data.train_max_samples, "sample_seed": data.seed or 0 if data.shuffle else None}


def _dataset(
    config: AnswersConfig,
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
    check_agent_names(config, dataset.source.first_rows(AGENT_NAME), dataset.source.where)
    return dataset


def _tool_schemas(config: AnswersConfig) -> dict[str, Mapping[str, Any]]:
    """Schemas of the tools that rows may name."""
    path = config.actor_rollout_ref.rollout.multi_turn.tool_config_path
    tools = load_tools(path) if path else {}
    return {name: equipped.tool.declaration for name, equipped in tools.items()}
