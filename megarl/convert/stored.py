"""Tensors in checkpoint files, of which any rectangle can be read without loading the rest.

torch's DCP reader loads every stored chunk as a whole; a conversion in constant memory reads bands of rows. The files
of a distributed checkpoint are sequences of ``torch.save`` archives, but ``torch.load(mmap=True)`` needs one file per
archive. An archive's pickle is not executed: it may only name functions that build a tensor, which are replaced by
functions that record their arguments.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

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


Index = tuple[int, ...]


class ElementLocation(NamedTuple):
    """File offset of a chunk's first element, and its strides."""

    offset: int  # first byte in the file
    stride: Index  # strides in elements


class Scratch:
    """Reused memory of one worker; new memory costs a page fault every 4 KB."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def tensor(self, use: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor, valid until the next call for the same ``use``."""
        nbytes = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.get(use)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._buffers[use] = torch.empty(max(nbytes, 1), dtype=torch.uint8)
        return buffer[:nbytes].view(dtype).view(*shape)


class Files:
    """Files open for reading; reads use explicit offsets, so threads do not wait for each other."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def read_into(self, file: Path, offset: int, target: Tensor) -> None:
        """Fill a contiguous tensor with the bytes of a file from ``offset`` on.

        Raises:
            CheckpointError: the file is missing, truncated or unreadable.
        """
        view = target.view(-1).view(torch.uint8).numpy().data
        try:
            descriptor = self._descriptor(file)
            while view:
                count = os.preadv(descriptor, [view], offset)
                if count == 0:
                    text = f"{file} is truncated: {len(view)} bytes are missing at byte {offset}"
                    raise CheckpointError(text, code="checkpoint.truncated-file")
                view, offset = view[count:], offset + count
        except FileNotFoundError:
            raise CheckpointError(f"{file} is missing", code="checkpoint.missing-file") from None
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}", code="checkpoint.unreadable-file") from error

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}

    def _descriptor(self, file: Path) -> int:
        if file not in self._descriptors:
            opened = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            if self._descriptors.setdefault(file, opened) != opened:
                os.close(opened)  # another thread opened it first
        return self._descriptors[file]


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor whose elements are in one file, as raw bytes or in a ``torch.save`` archive."""

    start: Index
    shape: Index
    file: Path
    offset: int
    length: int | None = None  # bytes of the archive; None for raw bytes
    dtype: torch.dtype | None = None  # expected dtype of the archive; None for raw bytes

    @cached_property
    def location(self) -> ElementLocation:
        """Location of the elements.

        Raises:
            CheckpointError: the archive is damaged, or contains another tensor than the index lists.
        """
        if self.length is None:
            return ElementLocation(self.offset, _contiguous(self.shape))
        try:
            with self.file.open("rb") as file:
                saved = locate_tensor(io.BufferedReader(_Window(file, self.offset, self.length)))
        except FileNotFoundError:
            raise CheckpointError(f"{self.file} is missing", code="checkpoint.missing-file") from None
        except CheckpointError as error:
            raise CheckpointError(
                f"{self.file}, archive at byte {self.offset}: {error.text}", code=error.code
            ) from None
        if saved.shape != self.shape or saved.dtype != self.dtype:
            raise CheckpointError(
                f"{self.file}, archive at byte {self.offset}: {saved.dtype} of shape {list(saved.shape)}, the index "
                f"lists {self.dtype} of shape {list(self.shape)}",
                code="checkpoint.index-mismatch",
            )
        return ElementLocation(self.offset + saved.offset, saved.stride)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in chunks that do not overlap."""

    name: str
    shape: Index
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    def read(self, start: Index, out: Tensor, files: Files, scratch: Scratch) -> None:
        """Copy the rectangle at ``start`` with the shape of ``out`` into ``out``, in its dtype.

        Raises:
            CheckpointError: an element is in no chunk, or a file is unreadable.
        """
        copied = 0
        stop = tuple(a + n for a, n in zip(start, out.shape, strict=True))
        for chunk in self.chunks:
            low = tuple(map(max, start, chunk.start))
            high = tuple(min(b, a + n) for b, a, n in zip(stop, chunk.start, chunk.shape, strict=True))
            if all(a < b for a, b in zip(low, high, strict=True)):
                target = out[tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))]
                self._read_chunk(chunk, tuple(a - c for a, c in zip(low, chunk.start, strict=True)), target, files,
                                 scratch)  # fmt: skip
                copied += target.numel()
        if copied != out.numel():
            text = f"'{self.name}': only {copied} of {out.numel()} elements at {list(start)} are stored"
            raise CheckpointError(text, code="checkpoint.elements-missing")

    def _read_chunk(self, chunk: Chunk, first: Index, target: Tensor, files: Files, scratch: Scratch) -> None:
        location = chunk.location
        begin = location.offset + sum(map(int.__mul__, first, location.stride)) * self.dtype.itemsize
        shape = tuple(target.shape)
        strides = zip(shape, location.stride, _contiguous(shape), strict=True)
        is_dense = all(n == 1 or stride == dense for n, stride, dense in strides)
        if target.dtype == self.dtype and target.is_contiguous() and is_dense:
            files.read_into(chunk.file, begin, target)
            return
        span = sum((n - 1) * s for n, s in zip(shape, location.stride, strict=True)) + 1
        buffer = scratch.tensor("read", (span,), self.dtype)
        files.read_into(chunk.file, begin, buffer)
        target.copy_(buffer.as_strided(shape, location.stride))


class ViewRegion(NamedTuple):
    """The rectangle ``[start, stop)`` of a Hugging Face tensor, stored at index ``at`` of a stored tensor.

    The stored tensor may have additional leading dimensions (layer, expert), which the index selects.
    """

    start: Index
    stop: Index
    stored: StoredTensor
    at: Index


@dataclass(frozen=True)
class TensorView:
    """A Hugging Face tensor and its stored regions; without regions it is zero."""

    name: str
    shape: Index
    dtype: torch.dtype
    regions: tuple[ViewRegion, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes, in its stored dtype."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, first: int, last: int, dtype: torch.dtype, files: Files, scratch: Scratch) -> Tensor:
        """Return rows ``[first, last)``, in the memory of ``scratch``.

        Raises:
            CheckpointError: a region is missing or unreadable.
        """
        out = scratch.tensor("rows", (last - first, *self.shape[1:]), dtype)
        if not self.regions:
            return out.zero_()
        copied = 0
        for region in self.regions:
            low, high = max(first, region.start[0]), min(last, region.stop[0])
            if low < high:
                other_dims = tuple(slice(a, b) for a, b in zip(region.start[1:], region.stop[1:], strict=True))
                target = out[(slice(low - first, high - first), *other_dims)]
                copied += target.numel()
                extra = len(region.at) - len(region.start)
                at = (*region.at[:extra], region.at[extra] + low - region.start[0], *region.at[extra + 1 :])
                region.stored.read(at, target[(None,) * extra] if extra else target, files, scratch)
        if copied != out.numel():
            text = f"'{self.name}': only {copied} of {out.numel()} elements of rows {first} to {last} are stored"
            raise CheckpointError(text, code="checkpoint.elements-missing")
        return out


def _contiguous(shape: Index) -> Index:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= size
    return tuple(reversed(stride))


class _Window(io.RawIOBase):
    """A byte range of a file, as a file."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = base + offset
        if self._at < 0:
            raise OSError("before the beginning")
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read at most to the end of the range."""
        count = max(0, min(len(buffer), self._length - self._at))
        self._file.seek(self._offset + self._at)
        data = self._file.read(count)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
