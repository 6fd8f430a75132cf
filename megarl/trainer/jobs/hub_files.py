"""Models and data files of the Hugging Face Hub, downloaded before a run that opts in; imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megarl.base.hub import download_data, download_model, is_data_url, is_model_name
from megarl.config.keys import value_at, walk, with_values
from megarl.config.schema.jobs import JobT
from megarl.config.schema.run import HubConfig

_MODELS = ("model.path", "model.tokenizer_path", "model.input_tokenizer", ".model_path")
"""Ends of the keys that name a model or a tokenizer."""
_DATA = ("data.train_files", "data.val_files")


def with_hub_files(config: JobT, message: Callable[[str], None]) -> JobT:
    """Replace names of the Hub by the paths of their downloads, if ``hub.enable`` is set.

    Args:
        config: complete.
        message: prints a line for the user.

    Raises:
        ConfigError: a model or file cannot be downloaded; names its key.
    """
    hub: HubConfig = config.hub
    if not hub.enable:
        return config

    folders: dict[str, str] = {}
    values: dict[str, Any] = {}
    for path in _model_keys(config):
        name = value_at(config, path)
        if name is not None and is_model_name(name):
            if name not in folders:
                message(f"{path}: {name} of the Hugging Face Hub")
                folders[name] = download_model(name, path, hub.cache_dir)
            values[path] = folders[name]
    for path, files in _data_keys(config):
        if any(map(is_data_url, files)):
            message(f"{path}: files of the Hugging Face Hub")
            parts = [download_data(file, path, hub.cache_dir) if is_data_url(file) else [file] for file in files]
            values[path] = [file for part in parts for file in part]
    return with_values(config, values)


def _model_keys(config: Any) -> Iterator[str]:
    return (path for path, _ in walk(config) if path.endswith(_MODELS))


def _data_keys(config: Any) -> Iterator[tuple[str, list[str]]]:
    keys = dict(walk(type(config)))
    for path in _DATA:
        if path in keys:
            yield path, value_at(config, path)
    for name, entry in getattr(config.data, "mixture", {}).items():
        files = entry["files"]
        yield f"data.mixture.{name}.files", [files] if isinstance(files, str) else files
