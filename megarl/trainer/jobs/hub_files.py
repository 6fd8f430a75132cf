"""Models and data files of the Hugging Face Hub, downloaded before a run (`hub.enable`); imports no torch.

`HF_HUB_OFFLINE=1` restricts downloads to the cache, `HF_HOME` moves the cache, and `HF_ENDPOINT` names a mirror, as in
Hugging Face's own tools.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megarl.base.errors import ConfigError
from megarl.base.hub_names import DATA_URL, MODEL_NAME, is_data_url, is_model_name
from megarl.config.keys import value_at, walk, with_values
from megarl.config.schema.jobs import JobT
from megarl.config.schema.run import HubConfig

_MODELS = ("model.path", "model.tokenizer_path", "model.input_tokenizer", ".model_path")
"""Ends of the keys that name a model or a tokenizer."""
_DATA = ("data.train_files", "data.val_files")
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Files of a model repository that a run reads: no code, and no weights in other formats."""


def with_hub_files(config: JobT, message: Callable[[str], None]) -> JobT:
    """Replace names of the Hub by the paths of their downloads, unless ``hub.enable`` is false.

    Raises:
        ConfigError: a model or file cannot be downloaded; names its key.
    """
    hub: HubConfig = config.hub
    if not hub.enable:
        return config

    values: dict[str, Any] = dict(_models(config, message, MODEL_FILES))
    for path, files in _data_keys(config):
        if any(map(is_data_url, files)):
            message(f"{path}: files of the Hugging Face Hub")
            parts = [download_data(file, path, hub.cache_dir) if is_data_url(file) else [file] for file in files]
            values[path] = [file for part in parts for file in part]
    return with_values(config, values)


def with_hub_configs(config: JobT) -> JobT:
    """Replace model names of the Hub by folders with their ``config.json``, unless ``hub.enable`` is false.

    Raises:
        ConfigError: a model cannot be downloaded; names its key.
    """
    if not config.hub.enable:
        return config
    return with_values(config, dict(_models(config, lambda line: None, ("config.json",))))


def _models(config: JobT, message: Callable[[str], None], files: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Download the models that are named by their Hub names; yields keys and folders."""
    folders: dict[str, str] = {}
    for path in _model_keys(config):
        name = value_at(config, path)
        if name is not None and is_model_name(name):
            if name not in folders:
                message(f"{path}: {name} of the Hugging Face Hub")
                folders[name] = _download_model(name, path, config.hub.cache_dir, files)
            yield path, folders[name]


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


def _download_model(text: str, label: str, cache_dir: str | None = None, files: Sequence[str] = MODEL_FILES) -> str:
    """Download a model of the Hub, or find it in the cache; return its folder."""
    match = MODEL_NAME.fullmatch(text)
    assert match is not None
    return _snapshot(match, "model", list(files), f"{label}={text}", cache_dir)


def download_data(text: str, label: str, cache_dir: str | None = None) -> list[str]:
    """Download a Hub data set's files, or find them in the cache; return their paths, sorted.

    Args:
        text: ``hf://datasets/owner/name/file`` or ``...name@revision/file``; the file may be a pattern.

    Raises:
        ConfigError: the URL is malformed, the Hub cannot be reached, or has no such file; names the key.
    """
    match = DATA_URL.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{label}={text}: write hf://datasets/owner/name/file, with a file or a pattern", code="hub.data-url"
        )
    folder = _snapshot(match, "dataset", [match["file"]], f"{label}={text}", cache_dir)
    files = sorted(glob.glob(match["file"], root_dir=folder, recursive=True))
    if not files:
        raise ConfigError(f"{label}={text}: the data set {match['name']} has no such file", code="hub.no-file")
    return [f"{folder}/{file}" for file in files]


def _snapshot(match: re.Match[str], kind: str, files: list[str], setting: str, cache_dir: str | None) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import is_offline_mode

    try:
        folder = snapshot_download(
            match["name"], repo_type=kind, revision=match["revision"], allow_patterns=files, cache_dir=cache_dir
        )
    except Exception as error:  # of many libraries: HTTP, authentication, file system
        state = "HF_HUB_OFFLINE is set, and the cache does not have it" if is_offline_mode() else "the download failed"
        first = str(error).strip().splitlines() or [""]
        local = f"there is no folder or file {match['name']} here, and as a {kind} of the Hub: "
        raise ConfigError(
            f"{setting}: {local}{state} ({type(error).__name__}: {first[0][:200]}); check the name, the network and "
            f"HF_TOKEN, or name a local {'folder' if kind == 'model' else 'file'}",
            code="hub.download-failed",
        ) from error
    assert isinstance(folder, str)
    return folder
