"""The index of a torch distributed checkpoint (``.metadata``): a pickle, read without running anything it names.

It tells which tensors a checkpoint holds and which file holds which block of them, for megarl's own checkpoints and for
those that Megatron-Core writes.
"""

from __future__ import annotations

import pickle
from enum import Enum
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from megarl.errors import CheckpointError

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


def read_index(folder: Path) -> Metadata:
    """The index of a checkpoint; runs no code of the file's.

    Raises:
        CheckpointError: it is missing, malformed, or names a class that no index has.
    """
    path = folder / INDEX
    try:
        with open(path, "rb") as file:
            metadata = _IndexUnpickler(file).load()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path} is malformed: {error!r}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{path} is malformed: it holds no index")
    return metadata


class _Note:
    """Stands in for what Megatron-Core adds to an index for its own optimizer; holds what it is given."""

    def __init__(self, *arguments: Any, **fields: Any) -> None:
        pass


def _member(kind: Any, name: str) -> Enum:
    """A member of an enumeration, which Python 3.11's first releases pickle as ``getattr(kind, name)``."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise CheckpointError(f"refused to take {name!r} of {kind!r}, which is no enumeration")
    return kind[name]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Resolves the classes of an index only."""
        if module.startswith(_FOREIGN) and name.startswith("MCore"):
            return _Note
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _CLASSES.get(module, ()):
            raise CheckpointError(f"refused to load '{module}.{name}', which no checkpoint index contains")
        return super().find_class(module, name)
