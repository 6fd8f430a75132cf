"""Transports: how the elements of a bucket get from one process into another."""

from __future__ import annotations

import mmap
import os
import uuid
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megarl.errors import ConfigError, WeightSyncError


class Transport(Protocol):
    """Moves flat runs of elements; one instance per process, used by one thread.

    A payload can be pickled and sent by any channel. It stays readable until the process that packed it releases it
    or ends; tensors that were unpacked before that stay valid as long as they are referenced.
    """

    def pack(self, tensors: Sequence[Tensor]) -> Any:
        """Copies the elements of tensors of one dtype, one after the other, into a new payload.

        Raises:
            WeightSyncError: there is no memory left, or no tensor to pack.
        """

    def unpack(self, payload: Any) -> Tensor:
        """The elements of a payload on the CPU, flat, without a copy where possible; to be read, not written.

        Raises:
            WeightSyncError: the payload was released, its process is gone, or it is on another host.
        """

    def release(self, payload: Any) -> None:
        """Frees a payload that this process packed; releasing twice does nothing."""

    def close(self) -> None:
        """Frees all payloads that this process packed."""


_TRANSPORTS: dict[str, Callable[[], Transport]] = {}


def register_transport(name: str) -> Callable[[type], type]:
    """Class decorator: makes a transport known under a name in the config."""

    def register(transport: type) -> type:
        """Registers the class and returns it."""
        _TRANSPORTS[name] = transport
        return transport

    return register


def create_transport(name: str) -> Transport:
    """A new transport of this process.

    Raises:
        ConfigError: the name is unknown; lists those that are known.
    """
    if name not in _TRANSPORTS:
        raise ConfigError(f"weight transport '{name}' is unknown; known ones: {', '.join(sorted(_TRANSPORTS))}")
    return _TRANSPORTS[name]()


class InlinePayload(NamedTuple):
    """The bytes themselves; under Ray they lie in its object store."""

    data: np.ndarray
    dtype: str


@register_transport("inline")
class InlineTransport:
    """Elements inside the payload. Works wherever the payload itself arrives; copies them once more on the way."""

    def pack(self, tensors: Sequence[Tensor]) -> InlinePayload:
        """See :meth:`Transport.pack`."""
        dtype = _common_dtype(tensors)
        data = np.empty(_byte_count(tensors), dtype=np.uint8)
        _copy_into(torch.from_numpy(data), tensors)
        return InlinePayload(data, dtype)

    def unpack(self, payload: InlinePayload) -> Tensor:
        """See :meth:`Transport.unpack`."""
        with warnings.catch_warnings():
            # An array from an object store is read-only, of which torch warns; nobody writes to it here.
            warnings.filterwarnings("ignore", message=".*not writable.*")
            return torch.from_numpy(payload.data).view(getattr(torch, payload.dtype))

    def release(self, payload: InlinePayload) -> None:
        """Nothing to free: the bytes go with the payload."""

    def close(self) -> None:
        """Nothing to free."""


class SharedPayload(NamedTuple):
    """Where another process of this host finds a segment."""

    pid: int
    fd: int
    name: str
    nbytes: int
    dtype: str


@register_transport("shared_memory")
class SharedMemoryTransport:
    """Elements in anonymous shared memory that processes of one host and user open through ``/proc``.

    A segment has no name in any file system: the kernel frees it when the last process that has it open or mapped
    closes it or dies, killed or not. So nothing can be left behind in ``/dev/shm``, whose size (64 MB in many
    containers) is no limit either, and no resource tracker is involved.
    """

    def __init__(self) -> None:
        self._segments: dict[str, int] = {}  # open descriptors by segment name
        if not hasattr(os, "memfd_create"):
            raise WeightSyncError("weight transport 'shared_memory' needs Linux; use 'inline' here")

    def pack(self, tensors: Sequence[Tensor]) -> SharedPayload:
        """See :meth:`Transport.pack`."""
        dtype = _common_dtype(tensors)
        nbytes = _byte_count(tensors)
        name = f"megarl-{uuid.uuid4().hex}"
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        self._segments[name] = fd
        payload = SharedPayload(os.getpid(), fd, name, nbytes, dtype)
        try:
            # Reserves the pages now: without it, running out of memory later would kill the process (SIGBUS).
            os.posix_fallocate(fd, 0, nbytes)
            _copy_into(torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8), tensors)
        except OSError as error:
            self.release(payload)
            raise WeightSyncError(
                f"no shared memory for {nbytes} bytes ({error.strerror}); use a smaller weight bucket or more memory"
            ) from error
        except BaseException:
            self.release(payload)
            raise
        return payload

    def unpack(self, payload: SharedPayload) -> Tensor:
        """See :meth:`Transport.unpack`."""
        try:
            fd = os.open(f"/proc/{payload.pid}/fd/{payload.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise _unreachable(payload) from error
        try:
            # The same process and descriptor numbers may by now, or on another host, mean another file.
            if os.readlink(f"/proc/self/fd/{fd}") != f"/memfd:{payload.name} (deleted)":
                raise _unreachable(payload)
            # Private and writable, since torch warns of read-only buffers; a stray write stays in this process.
            mapped = mmap.mmap(fd, payload.nbytes, access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)
        return torch.frombuffer(mapped, dtype=getattr(torch, payload.dtype))

    def release(self, payload: SharedPayload) -> None:
        """See :meth:`Transport.release`."""
        fd = self._segments.pop(payload.name, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """See :meth:`Transport.close`."""
        while self._segments:
            os.close(self._segments.popitem()[1])

    def __del__(self) -> None:
        self.close()


def _unreachable(payload: SharedPayload) -> WeightSyncError:
    return WeightSyncError(
        f"weight payload of process {payload.pid} cannot be opened: the process is gone, has released it, or runs on "
        "another host or in another container; weight transport 'inline' works there"
    )


def _common_dtype(tensors: Sequence[Tensor]) -> str:
    dtypes = {str(t.dtype).removeprefix("torch.") for t in tensors}
    if len(dtypes) != 1:
        raise WeightSyncError(f"a payload holds tensors of one dtype, got {sorted(dtypes) or 'no tensor'}")
    return dtypes.pop()


def _byte_count(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _copy_into(buffer: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copies tensors, of any device and strides, one after the other into a byte buffer."""
    flat = buffer.view(tensors[0].dtype)
    for part, tensor in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True):
        part.view(tensor.shape).copy_(tensor)
