"""What an output will be, to the byte, before any of it is written: files of bands of tensors and of fixed bytes."""

from __future__ import annotations

import io
import json
import math
import pickle
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

import megarl
from megarl.checkpoint_index import INDEX
from megarl.convert.hugging_face import DTYPES
from megarl.convert.role import FORMAT, STATE_FILE, WEIGHT
from megarl.convert.selection import Selection
from megarl.convert.stored import TensorView
from megarl.convert.torch_zip import locate_tensor
from megarl.errors import CheckpointError
from megarl.models import ParallelLayout
from megarl.models.hf_folder import INDEX_FILE, SINGLE_FILE

BAND_BYTES = 16 << 20
"""What is read and written at once. Memory is a few of these per worker, whatever the size of a tensor."""
_SAFETENSORS_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Band(NamedTuple):
    """Rows ``[first, last)`` of a tensor, in the number format they are written in, at a byte of a file."""

    offset: int
    view: TensorView
    first: int
    last: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return (self.last - self.first) * math.prod(self.view.shape[1:]) * self.dtype.itemsize


@dataclass
class FilePlan:
    """A large file: its bands, and the fixed bytes around them."""

    name: str
    size: int = 0
    bands: list[Band] = field(default_factory=list)
    fixed: list[tuple[int, bytes]] = field(default_factory=list)


@dataclass(frozen=True)
class OutputPlan:
    """All of an output: its large files, and the small ones, which are written last and make it whole."""

    files: list[FilePlan]
    small: dict[str, bytes]
    companions: str
    """Folder below the output for the tokenizer and the like; empty for the output itself."""

    @property
    def nbytes(self) -> int:
        """Bytes of the large files."""
        return sum(file.size for file in self.files)


def bands_of(view: TensorView, dtype: torch.dtype, offset: int = 0) -> Iterator[Band]:
    """Cuts a tensor into bands of at most :data:`BAND_BYTES` or a row, one after the other from ``offset``."""
    row = max(1, math.prod(view.shape[1:]) * max(dtype.itemsize, view.dtype.itemsize))
    height = max(1, BAND_BYTES // row)
    for first in range(0, view.shape[0], height):
        band = Band(offset, view, first, min(first + height, view.shape[0]), dtype)
        yield band
        offset += band.nbytes


# ---- Hugging Face


def plan_hugging_face(selection: Selection, max_shard_bytes: int) -> OutputPlan:
    """A model folder: safetensors shards in checkpoint order, an index where there are several, and the config.

    Args:
        selection: what to write.
        max_shard_bytes: size above which another shard is begun; a tensor is never divided.
    """
    shards = _shards(selection, max_shard_bytes)
    names = [SINGLE_FILE] if len(shards) == 1 else [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors"
                                                    for n in range(len(shards))]  # fmt: skip
    files = [_safetensors(name, shard, selection) for name, shard in zip(names, shards, strict=True)]
    small = {}
    if len(shards) > 1:
        placed = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        small[INDEX_FILE] = _json({"metadata": {"total_size": selection.nbytes}, "weight_map": placed})
    return OutputPlan(files, {**small, "config.json": _json(selection.config)}, "")


def _safetensors(name: str, tensors: list[str], selection: Selection) -> FilePlan:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        view, dtype = selection.tensors[tensor], selection.dtypes[tensor]
        end = at + math.prod(view.shape) * dtype.itemsize
        header[tensor] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": list(view.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # elements begin at a multiple of 8 bytes
    start = 8 + len(text)
    plan = FilePlan(name, start + at, fixed=[(0, struct.pack("<Q", len(text)) + text)])
    for tensor in tensors:
        bands = list(bands_of(selection.tensors[tensor], selection.dtypes[tensor], start))
        plan.bands += bands
        start = bands[-1].offset + bands[-1].nbytes
    return plan


# ---- a role of megarl's


def plan_role(selection: Selection, max_shard_bytes: int) -> OutputPlan:
    """A role's checkpoint of weights alone, in the format of :mod:`megarl.megatron.checkpoint`.

    Args:
        selection: what to write; in one number format, but for what a model keeps in float32.
        max_shard_bytes: size above which another file is begun.

    Raises:
        CheckpointError: the tensors have several number formats.
    """
    mixed = {selection.dtypes[n] for n in selection.tensors} - {selection.dtype, torch.float32}
    if mixed:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in {*mixed, selection.dtype}))
        raise CheckpointError(f"the weights are of several number formats ({names}): choose one with --dtype")
    index = Metadata({}, storage_data={}, storage_meta=StorageMeta())
    files: list[FilePlan] = []
    for name, view in selection.tensors.items():
        dtype, chunks = selection.dtypes[name], []
        for band in bands_of(view, dtype):
            before, after = _archive(dtype, (band.last - band.first, *view.shape[1:]))
            length = len(before) + band.nbytes + len(after)
            if not files or files[-1].size + length > max(max_shard_bytes, length):
                files.append(FilePlan(f"__0_{len(files)}.distcp"))
            file, start = files[-1], (band.first, *(0 for _ in view.shape[1:]))
            data = file.size + len(before)
            file.bands.append(band._replace(offset=data))
            file.fixed += [(file.size, before), (data + band.nbytes, after)]
            chunks.append(
                ChunkStorageMetadata(torch.Size(start), torch.Size((band.last - band.first, *view.shape[1:])))
            )
            place = _StorageInfo(file.name, file.size, length)
            index.storage_data[MetadataIndex(WEIGHT + name, torch.Size(start))] = place
            file.size += length
        entry = TensorStorageMetadata(TensorProperties(dtype), torch.Size(view.shape), chunks)
        index.state_dict_metadata[WEIGHT + name] = entry
    state = {
        "format": FORMAT,
        "dtype": str(selection.dtype).removeprefix("torch."),
        "steps": None,
        "layout": ParallelLayout()._asdict(),
        "device": "cpu",
        "skipped_in_a_row": 0,
        "contents": ["model"],
        "megarl_version": megarl.__version__,
    }
    small = {"huggingface/config.json": _json(selection.config), STATE_FILE: _json(state), INDEX: pickle.dumps(index)}
    return OutputPlan(files, small, "huggingface")


@lru_cache(maxsize=64)
def _archive(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What ``torch.save`` writes before and after the elements of a tensor."""
    stream, checksums = io.BytesIO(), torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # of elements that are not there yet; torch does not read it
    try:
        torch.save(torch.zeros(shape, dtype=dtype), stream)
    finally:
        torch.serialization.set_crc32_options(checksums)
    archive = stream.getvalue()
    stream.seek(0)
    begin = locate_tensor(stream).offset
    return archive[:begin], archive[begin + math.prod(shape) * dtype.itemsize :]


def _shards(selection: Selection, max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = []
    used = 0
    for name, view in selection.tensors.items():
        nbytes = math.prod(view.shape) * selection.dtypes[name].itemsize
        if not shards or used + nbytes > max_shard_bytes:
            shards.append([])
            used = 0
        used += nbytes
        shards[-1].append(name)
    return shards


def _json(content: Mapping[str, object]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
