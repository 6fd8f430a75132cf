"""Downloads from the Hugging Face Hub, for runs that opt in (`hub.enable`); imports no torch.

`HF_HUB_OFFLINE=1` restricts them to the cache, `HF_HOME` moves the cache, and `HF_ENDPOINT` names a mirror, as in
Hugging Face's own tools.
"""

from __future__ import annotations

import glob
import re
from pathlib import Path

from megarl.base.errors import ConfigError

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Files of a model repository that a run reads: no code, and no weights in other formats."""
_NAME = r"(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?"
_MODEL = re.compile(_NAME)
_DATA = re.compile(r"hf://datasets/(?P<name>[A-Za-z0-9][\w.-]*/[\w.-]+?)(?:@(?P<revision>[^/]+))?/(?P<file>.+)")


def is_model_name(text: str) -> bool:
    """Return whether a model path is a Hub name, ``owner/name`` or ``owner/name@revision``, instead of a local path."""
    return _MODEL.fullmatch(text) is not None and not Path(text).exists()


def is_data_url(text: str) -> bool:
    """Return whether a data file is one of the Hub, ``hf://datasets/owner/name/file``."""
    return text.startswith("hf://")


def download_model(text: str, label: str, cache_dir: str | None = None) -> str:
    """Download a model of the Hub, or find it in the cache; return its folder.

    Args:
        text: ``owner/name`` or ``owner/name@revision``.
        label: configuration key, for errors.
        cache_dir: folder of the cache; None = Hugging Face's.

    Raises:
        ConfigError: the Hub cannot be reached or has no such model; names the key.
    """
    match = _MODEL.fullmatch(text)
    assert match is not None
    return _snapshot(match, "model", list(MODEL_FILES), f"{label}={text}", cache_dir)


def download_data(text: str, label: str, cache_dir: str | None = None) -> list[str]:
    """Download files of a data set of the Hub, or find them in the cache; return their paths, sorted.

    Args:
        text: ``hf://datasets/owner/name/file`` or ``...name@revision/file``; the file may be a pattern.
        label: configuration key, for errors.
        cache_dir: folder of the cache; None = Hugging Face's.

    Raises:
        ConfigError: the URL is malformed, the Hub cannot be reached, or has no such file; names the key.
    """
    match = _DATA.fullmatch(text)
    if match is None:
        raise ConfigError(f"{label}={text}: write hf://datasets/owner/name/file, with a file or a pattern")
    folder = _snapshot(match, "dataset", [match["file"]], f"{label}={text}", cache_dir)
    files = sorted(glob.glob(match["file"], root_dir=folder, recursive=True))
    if not files:
        raise ConfigError(f"{label}={text}: the data set {match['name']} has no such file")
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
        raise ConfigError(
            f"{setting}: {state} ({type(error).__name__}: {first[0][:200]}); check the name, the network and HF_TOKEN, "
            f"or name a local {'folder' if kind == 'model' else 'file'}"
        ) from error
    assert isinstance(folder, str)
    return folder
