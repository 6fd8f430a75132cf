"""User classes and functions of the section `data`: data set, sampler and collate function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch.utils.data import Dataset

from megarl.base.errors import ConfigError
from megarl.base.user_code import import_spec, load_user_class, load_user_function
from megarl.config.schema.data import CustomDatasetConfig, DataConfig, PromptsConfig, SamplerConfig
from megarl.data import RLHFDataset
from megarl.data.custom_prompts import takes_verls_arguments


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


def verls_section(data: PromptsConfig) -> DictConfig:
    """Return the section ``data`` as verl's classes expect it: keys as attributes, as items, and by ``get``."""
    return OmegaConf.create(dataclasses.asdict(data))


def _spec(path: str, name: str | None) -> str:
    path = path.removeprefix("pkg://")
    return f"{path}:{name}" if path.endswith(".py") else f"{path}.{name}"
