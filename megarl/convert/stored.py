"""Tensors where they lie in files, in whatever pieces, of which any rectangle can be read without loading the rest."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.convert.torch_zip import locate_tensor
from megarl.errors import CheckpointError

Index = tuple[int, ...]


class Place(NamedTuple):
    """Where the elements of a chunk begin, and how far apart they lie."""

    offset: int
    """First byte in the file."""
    stride: Index
    """In elements."""


class Scratch:
    """Memory of one worker, used over and over: fresh memory costs a page fault every 4 KB."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def tensor(self, use: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor with anything in it; valid until the next call for the same ``use``."""
        nbytes = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.get(use)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._buffers[use] = torch.empty(max(nbytes, 1), dtype=torch.uint8)
        return buffer[:nbytes].view(dtype).view(*shape)


class Files:
    """Files open for reading. Reads do not share a position, so that threads need not wait for each other."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def read_into(self, file: Path, offset: int, target: Tensor) -> None:
        """Fills a contiguous tensor with the bytes of a file from ``offset`` on.

        Raises:
            CheckpointError: the file is missing, shorter, or cannot be read.
        """
        view = target.view(-1).view(torch.uint8).numpy().data
        try:
            descriptor = self._descriptor(file)
            while view:
                count = os.preadv(descriptor, [view], offset)
                if count == 0:
                    raise CheckpointError(f"{file} is truncated: {len(view)} bytes are missing at byte {offset}")
                view, offset = view[count:], offset + count
        except FileNotFoundError:
            raise CheckpointError(f"{file} is missing") from None
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error

    def close(self) -> None:
        """Closes all."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}

    def _descriptor(self, file: Path) -> int:
        if file not in self._descriptors:
            opened = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            if self._descriptors.setdefault(file, opened) != opened:
                os.close(opened)  # another thread was quicker
        return self._descriptors[file]


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor whose elements lie in one file, as they are or in an archive of ``torch.save``."""

    start: Index
    shape: Index
    file: Path
    offset: int
    length: int | None = None
    """Bytes of the archive; None where the elements lie bare."""
    dtype: torch.dtype | None = None
    """What the archive must say; bare elements need none."""

    @cached_property
    def place(self) -> Place:
        """Where the elements are.

        Raises:
            CheckpointError: the archive is damaged, or of another tensor than the index says.
        """
        if self.length is None:
            return Place(self.offset, _contiguous(self.shape))
        try:
            with open(self.file, "rb") as file:
                saved = locate_tensor(io.BufferedReader(_Window(file, self.offset, self.length)))
        except FileNotFoundError:
            raise CheckpointError(f"{self.file} is missing") from None
        except CheckpointError as error:
            raise CheckpointError(f"{self.file}, archive at byte {self.offset}: {error}") from None
        if saved.shape != self.shape or saved.dtype != self.dtype:
            raise CheckpointError(
                f"{self.file}, archive at byte {self.offset}: {saved.dtype} of shape {list(saved.shape)}, the index "
                f"says {self.dtype} of shape {list(self.shape)}"
            )
        return Place(self.offset + saved.offset, saved.stride)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in chunks that do not overlap."""

    name: str
    shape: Index
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    def read(self, start: Index, out: Tensor, files: Files, scratch: Scratch) -> None:
        """Copies the rectangle that begins at ``start`` and has the shape of ``out`` into it, in its dtype.

        Raises:
            CheckpointError: an element is in no chunk, or a file cannot be read.
        """
        found = 0
        stop = tuple(a + n for a, n in zip(start, out.shape, strict=True))
        for chunk in self.chunks:
            low = tuple(map(max, start, chunk.start))
            high = tuple(min(b, a + n) for b, a, n in zip(stop, chunk.start, chunk.shape, strict=True))
            if all(a < b for a, b in zip(low, high, strict=True)):
                target = out[tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))]
                self._read_chunk(chunk, tuple(a - c for a, c in zip(low, chunk.start, strict=True)), target, files,
                                 scratch)  # fmt: skip
                found += target.numel()
        if found != out.numel():
            raise CheckpointError(f"'{self.name}': {found} of {out.numel()} elements at {list(start)} are there")

    def _read_chunk(self, chunk: Chunk, first: Index, target: Tensor, files: Files, scratch: Scratch) -> None:
        place = chunk.place
        begin = place.offset + sum(map(int.__mul__, first, place.stride)) * self.dtype.itemsize
        shape = tuple(target.shape)
        if target.dtype == self.dtype and target.is_contiguous() and _is_dense(shape, place.stride):
            files.read_into(chunk.file, begin, target)
            return
        span = sum((n - 1) * s for n, s in zip(shape, place.stride, strict=True)) + 1
        buffer = scratch.tensor("read", (span,), self.dtype)
        files.read_into(chunk.file, begin, buffer)
        target.copy_(buffer.as_strided(shape, place.stride))


class Part(NamedTuple):
    """The rectangle ``[start, stop)`` of a Hugging Face tensor, found at ``at`` of a stored one.

    The stored tensor may have more dimensions, which come first (layer, expert): the rectangle is one thick there.
    """

    start: Index
    stop: Index
    stored: StoredTensor
    at: Index


@dataclass(frozen=True)
class TensorView:
    """A Hugging Face tensor, wherever its parts are; without parts it is zero."""

    name: str
    shape: Index
    dtype: torch.dtype
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes, in its own dtype."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, first: int, last: int, dtype: torch.dtype, files: Files, scratch: Scratch) -> Tensor:
        """Rows ``[first, last)``, in memory of ``scratch``.

        Raises:
            CheckpointError: a part is missing or cannot be read.
        """
        out = scratch.tensor("rows", (last - first, *self.shape[1:]), dtype)
        if not self.parts:
            return out.zero_()
        found = 0
        for part in self.parts:
            low, high = max(first, part.start[0]), min(last, part.stop[0])
            if low < high:
                rest = tuple(slice(a, b) for a, b in zip(part.start[1:], part.stop[1:], strict=True))
                target = out[(slice(low - first, high - first), *rest)]
                found += target.numel()
                extra = len(part.at) - len(part.start)
                at = (*part.at[:extra], part.at[extra] + low - part.start[0], *part.at[extra + 1 :])
                part.stored.read(at, target[(None,) * extra] if extra else target, files, scratch)
        if found != out.numel():
            raise CheckpointError(f"'{self.name}': {found} of {out.numel()} elements of rows {first} to {last} found")
        return out


def _contiguous(shape: Index) -> Index:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= size
    return tuple(reversed(stride))


def _is_dense(shape: Index, stride: Index) -> bool:
    """Whether a rectangle's elements lie one after the other."""
    return all(n == 1 or s == c for n, s, c in zip(shape, stride, _contiguous(shape), strict=True))


class _Window(io.RawIOBase):
    """Part of a file, as a file of its own."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Position within the part."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = base + offset
        if self._at < 0:
            raise OSError("before the beginning")
        return self._at

    def tell(self) -> int:
        """Position within the part."""
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Reads no further than the part's end."""
        wanted = max(0, min(len(buffer), self._length - self._at))
        self._file.seek(self._offset + self._at)
        data = self._file.read(wanted)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
