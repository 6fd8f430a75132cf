"""Location of a tensor's elements in a ``torch.save`` archive, without loading them.

The files of a distributed checkpoint are sequences of such archives, but ``torch.load(mmap=True)`` needs one file per
archive. With the location, any rows of a large tensor can be read alone. The archive's pickle is not executed: it may
only name functions that build a tensor, which are replaced by functions that record their arguments.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from typing import Any, BinaryIO, NamedTuple

import torch

from megarl.base.errors import CheckpointError

_LOCAL_HEADER = 30  # bytes of a zip entry's header before its name
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class SavedTensor(NamedTuple):
    """A tensor in an archive."""

    offset: int  # offset of the first element from the start of the archive, in bytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # strides in elements


class _Storage(NamedTuple):
    dtype: torch.dtype
    key: str


def locate_tensor(archive: BinaryIO) -> SavedTensor:
    """Locate the single tensor of an archive, a file with exactly the archive.

    Raises:
        CheckpointError: the file is no such archive, is damaged, or its pickle names anything but a tensor.
    """
    try:
        with zipfile.ZipFile(archive) as entries:
            names = set(entries.namelist())
            root = next(name for name in names if name.endswith("/data.pkl")).removesuffix("data.pkl")
            order = _content(archive, entries.getinfo(root + "byteorder")) if root + "byteorder" in names else b"little"
            if order == b"big":
                raise CheckpointError("its byte order is big; only little is supported", code="checkpoint.byte-order")
            if order != b"little":
                raise CheckpointError(f"it is damaged: byte order {order!r}", code="checkpoint.corrupt-file")
            tensor = _TensorUnpickler(io.BytesIO(_content(archive, entries.getinfo(root + "data.pkl")))).load()
            if not (isinstance(tensor, _Tensor) and isinstance(tensor.storage, _Storage)):
                raise CheckpointError("it contains no tensor", code="checkpoint.corrupt-file")
            return _saved_tensor(archive, entries.getinfo(f"{root}data/{tensor.storage.key}"), tensor)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged archive can raise anything
        raise CheckpointError(f"it is damaged: {error!r}", code="checkpoint.corrupt-file") from error


def _saved_tensor(archive: BinaryIO, entry: zipfile.ZipInfo, tensor: _Tensor) -> SavedTensor:
    dtype = tensor.storage.dtype
    last = tensor.first + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride, strict=True)) + 1
    if min(tensor.shape, default=1) and last * dtype.itemsize > entry.file_size:
        text = f"its tensor of shape {list(tensor.shape)} needs more than {entry.file_size} bytes"
        raise CheckpointError(text, code="checkpoint.corrupt-file")
    return SavedTensor(_start(archive, entry) + tensor.first * dtype.itemsize, dtype, tensor.shape, tensor.stride)


def _start(archive: BinaryIO, entry: zipfile.ZipInfo) -> int:
    """Return the offset of an entry's content."""
    if entry.compress_type != zipfile.ZIP_STORED:
        text = f"'{entry.filename}' is compressed, which is not supported"
        raise CheckpointError(text, code="checkpoint.compressed-file")
    archive.seek(entry.header_offset + _LOCAL_HEADER - 4)
    name, extra = struct.unpack("<HH", archive.read(4))
    return entry.header_offset + _LOCAL_HEADER + int(name) + int(extra)


def _content(archive: BinaryIO, entry: zipfile.ZipInfo) -> bytes:
    """Return the bytes of an entry; torch can write archives without checksums, so none is checked."""
    archive.seek(_start(archive, entry))
    return archive.read(entry.file_size)


class _Tensor(NamedTuple):
    storage: _Storage
    first: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _tensor(storage: Any, first: int, shape: Any, stride: Any, *rest: Any) -> _Tensor:
    return _Tensor(storage, int(first), tuple(map(int, shape)), tuple(map(int, stride)))


_FUNCTIONS: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *rest: tensor,
    ("collections", "OrderedDict"): dict,
}


class _TensorUnpickler(pickle.Unpickler):  # noqa: S301 - known names only
    def find_class(self, module: str, name: str) -> Any:
        """Resolve the names of a tensor's pickle to harmless functions."""
        if (module, name) in _FUNCTIONS:
            return _FUNCTIONS[module, name]
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        text = f"refused to load '{module}.{name}', which no tensor contains"
        raise CheckpointError(text, code="checkpoint.unsafe-pickle")

    def persistent_load(self, pid: Any) -> _Storage:
        """Return the dtype and archive key of a storage."""
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"unknown storage {pid!r}", code="checkpoint.corrupt-file")
        return _Storage(dtype, str(key))
