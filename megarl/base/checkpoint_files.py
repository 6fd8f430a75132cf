"""Files in a checkpoint folder: their names, and the index of a torch distributed checkpoint (``.metadata``).

The index lists the tensors of a checkpoint and the file of each block. It serves megarl's checkpoints and the
checkpoints of Megatron-Core. It is a pickle, read without executing code of the file.
"""

from __future__ import annotations

import pickle
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.base.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

INDEX = ".metadata"

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "BytesIOWriteData", "WriteItem",
                                             "WriteItemType"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "uint8", "int8",
              "int16", "int32", "int64", "bool"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "collections": {"OrderedDict"},
}  # fmt: skip
_FOREIGN = "megatron.core.dist_checkpointing."
POINTER = "latest_checkpointed_iteration.txt"
"""File next to the checkpoints with the step of the newest one, as in Megatron-LM."""
HF_FOLDER = "huggingface"
"""Folder of a role with the model's Hugging Face config, tokenizer and, if exported, weights."""


def read_index(folder: Path) -> Metadata:
    """Read the index of a checkpoint without executing code of the file.

    Raises:
        CheckpointError: the index is missing or malformed, or names a class outside the allow-list.
    """
    from torch.distributed.checkpoint.metadata import Metadata  # most readers of the names need no torch

    path = folder / INDEX
    try:
        with path.open("rb") as file:
            metadata = _IndexUnpickler(file).load()
    except FileNotFoundError:
        text = f"{path} is missing: the checkpoint is incomplete"
        raise CheckpointError(text, code="checkpoint.missing-index") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error.text}", code=error.code) from None
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path} is malformed: {error!r}", code="checkpoint.malformed-index") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{path} is malformed: it holds no index", code="checkpoint.malformed-index")
    return metadata


class _Placeholder:
    """Placeholder for the classes that Megatron-Core adds to an index for its optimizer."""

    def __init__(self, *arguments: Any, **fields: Any) -> None:
        pass


def _member(kind: Any, name: str) -> Enum:
    """Return an enumeration member, which early releases of Python 3.11 pickle as ``getattr(kind, name)``."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        text = f"refused to take {name!r} of {kind!r}, which is no enumeration"
        raise CheckpointError(text, code="checkpoint.unsafe-pickle")
    return kind[name]


class _IndexUnpickler(pickle.Unpickler):  # noqa: S301 - classes of an allow-list
    def find_class(self, module: str, name: str) -> Any:
        """Resolve classes of the allow-list only."""
        if module.startswith(_FOREIGN) and name.startswith("MCore"):
            return _Placeholder
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _CLASSES.get(module, ()):
            text = f"refused to load '{module}.{name}', which no checkpoint index contains"
            raise CheckpointError(text, code="checkpoint.unsafe-pickle")
        return super().find_class(module, name)
