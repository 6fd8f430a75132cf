"""The arguments in a ``torch_dist`` checkpoint of another program, which are a pickle.

It is searched only for the path of the model folder, with every class replaced by an empty one, so that none of its
code runs.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

from megarl.base.checkpoint_files import read_index

_ARGUMENTS_FILE, _ARGUMENTS_OBJECT = "common.pt", "common_state/"
"""Place of a checkpoint's arguments: a file of its own, or in Megatron-Core 0.19 an object among the weights."""
_FOLDER_ARGUMENTS = ("hf_checkpoint", "tokenizer_model", "tokenizer_name_or_path")
"""Arguments of Megatron-LM, slime and others that may name a Hugging Face folder, the most reliable first."""


def model_folders(checkpoint: Path) -> list[Path]:
    """Return the Hugging Face folders named in a checkpoint's arguments; they may not exist on this machine."""
    try:
        with zipfile.ZipFile(_arguments_file(checkpoint)) as archive:
            name = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
            with archive.open(name) as stream:
                common = _EmptyUnpickler(stream).load()
    except Exception:  # missing or malformed: the file is only a hint
        return []
    if isinstance(common, list) and common:  # the object has a list of its values
        common = common[0]
    arguments = getattr(common.get("args") if isinstance(common, dict) else None, "__dict__", {})
    return [
        Path(arguments[name]) for name in _FOLDER_ARGUMENTS if isinstance(arguments.get(name), str) and arguments[name]
    ]


def _arguments_file(checkpoint: Path) -> Path | io.BytesIO:
    """Return the file with the checkpoint's arguments, or their bytes among the weights."""
    if (checkpoint / _ARGUMENTS_FILE).exists():
        return checkpoint / _ARGUMENTS_FILE
    places = read_index(checkpoint).storage_data
    place = next(place for key, place in places.items() if key.fqn.startswith(_ARGUMENTS_OBJECT))
    with (checkpoint / place.relative_path).open("rb") as file:
        file.seek(place.offset)
        return io.BytesIO(file.read(place.length))


class _Empty:
    """Replaces every class of the pickle."""

    def __new__(cls, *arguments: Any, **fields: Any) -> _Empty:
        return super().__new__(cls)

    def __init__(self, *arguments: Any, **fields: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """Ignore the value."""


class _EmptyUnpickler(pickle.Unpickler):  # noqa: S301 - placeholders only, no code
    def find_class(self, module: str, name: str) -> Any:
        return _Empty

    def persistent_load(self, pid: Any) -> Any:
        """Return None: no tensor is read."""
        return None
