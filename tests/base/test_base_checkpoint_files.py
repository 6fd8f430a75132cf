"""Checkpoint indexes of current Python and of Python 3.11.0 to 3.11.3, and files that are no index."""

import pickle
from enum import Enum
from pathlib import Path

import pytest
import torch
from support.expected_errors import raises
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from megarl.base.checkpoint_files import INDEX, read_index


class _OldPickler(pickle.Pickler):
    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


class _Reaches:
    def __reduce__(self):
        return getattr, (Path(), "unlink")


def index():
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([3]), [chunk])
    return Metadata({"weight": tensor}, storage_data={})


@pytest.mark.parametrize("pickler", [pickle.Pickler, _OldPickler])
def test_enumerations_of_all_python_versions_are_read(tmp_path, pickler):
    with (tmp_path / INDEX).open("wb") as file:
        pickler(file).dump(index())
    tensor = read_index(tmp_path).state_dict_metadata["weight"]
    assert tensor == index().state_dict_metadata["weight"]
    assert tensor.properties.memory_format == torch.contiguous_format


def test_getattr_is_limited_to_enumerations(tmp_path):
    (tmp_path / INDEX).write_bytes(pickle.dumps(_Reaches()))
    with raises("checkpoint.unsafe-pickle", tmp_path / INDEX, "'unlink'"):
        read_index(tmp_path)
