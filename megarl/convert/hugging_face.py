"""Reads Hugging Face model folders."""

from __future__ import annotations

from pathlib import Path

import torch

from megarl.convert.source import HUGGING_FACE, SCORE, Source, whole
from megarl.convert.stored import Chunk, StoredTensor
from megarl.errors import ModelError
from megarl.models import WeightMap
from megarl.models.hf_folder import TensorEntry, check_model_folder

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Number formats of weights by safetensors' names for them."""


def open_hugging_face(path: Path) -> Source:
    """Opens a model folder; one that was stripped of its head as well, which :attr:`Source.lacks` then names.

    Raises:
        ModelError: it is not whole: names the missing shard or tensor, the truncated file, or the wrong shape.
    """
    folder = check_model_folder(path, may_lack_head=True)
    shapes = WeightMap(folder.config, value_head=folder.config.is_value_model).hf_shapes()
    names = [name for name in shapes if name in folder.tensors]
    names += [name for name in SCORE if name in folder.tensors and name not in shapes]
    tensors = {name: whole(name, _stored(name, folder.tensors[name])) for name in names}
    return Source(
        path,
        HUGGING_FACE,
        folder.config,
        path,
        tensors,
        lacks=tuple(name for name in shapes if name not in folder.tensors),
        left_out=tuple(sorted(folder.tensors.keys() - set(names))),
        facts={"files": len({entry.file for entry in folder.tensors.values()})},
    )


def _stored(name: str, entry: TensorEntry) -> StoredTensor:
    if entry.dtype not in DTYPES:
        raise ModelError(f"{entry.file}: tensor '{name}' has dtype {entry.dtype}, expected one of {', '.join(DTYPES)}")
    chunk = Chunk((0,) * len(entry.shape), entry.shape, entry.file, entry.offset)
    return StoredTensor(name, entry.shape, DTYPES[entry.dtype], (chunk,))
