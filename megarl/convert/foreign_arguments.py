"""What another program noted of itself in ``common.pt``: looked at for the model's folder, and never trusted.

The file is a pickle. Whatever class it names, an empty one is put in its place, so that nothing of it runs.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

_FILE = "common.pt"
_FOLDERS = ("hf_checkpoint", "tokenizer_model", "tokenizer_name_or_path")
"""Arguments of Megatron-LM, slime and others that may name a Hugging Face folder, the surest first."""


def model_folders(checkpoint: Path) -> list[Path]:
    """Hugging Face folders that a checkpoint's arguments name, whether or not they exist here."""
    try:
        with zipfile.ZipFile(checkpoint / _FILE) as archive:
            name = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
            with archive.open(name) as stream:
                common = _EmptyUnpickler(stream).load()
    except Exception:  # missing, or anything that a strange file may raise: it is only a hint
        return []
    arguments = getattr(common.get("args") if isinstance(common, dict) else None, "__dict__", {})
    return [Path(arguments[name]) for name in _FOLDERS if isinstance(arguments.get(name), str) and arguments[name]]


class _Empty:
    """Stands in for every class."""

    def __new__(cls, *arguments: Any, **fields: Any) -> _Empty:
        """Takes anything."""
        return super().__new__(cls)

    def __init__(self, *arguments: Any, **fields: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Forgets it."""


class _EmptyUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """An empty class, whatever is asked for."""
        return _Empty

    def persistent_load(self, pid: Any) -> Any:
        """Nothing: no tensor is read."""
        return None
