"""The default weight transport to SGLang's ranks: each gets its slices through shared memory, or inside the request."""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import pickle
import tempfile
from typing import Any

import torch
from torch import Tensor

from megarl.base.cuda_memory import ipc_memory, return_cached_memory
from megarl.base.errors import WeightSyncError
from megarl.rollout.sglang.backend import ControlCaller
from megarl.rollout.sglang.loader import ALIGNMENT, Reply, ReplyListener
from megarl.rollout.sglang.options import LOADER
from megarl.rollout.sglang.shards import RankSlice, SGLangShards

SHARED_FOLDER = "/dev/shm"
REPLY_S = 60.0
"""Seconds to wait for replies after SGLang has finished the call."""


class StagingBuffer:
    """Slices for one rank, packed one after another and sent together.

    Args:
        device: device of the rank's parameters.
        shared: whether the rank runs on this host and reads this memory itself.
        capacity: initial size in bytes.
    """

    def __init__(self, device: torch.device, shared: bool, capacity: int) -> None:
        self._device, self._shared, self._capacity = device, shared, capacity
        self._file: str | None = None
        self._buffer: Tensor | None = None
        self.slices: list[list[Any]] = []
        self._used = 0

    @property
    def nbytes(self) -> int:
        """Size of the allocated memory."""
        return 0 if self._buffer is None else len(self._buffer)

    def fits(self, nbytes: int) -> bool:
        """Whether this many more bytes fit."""
        return self._used + nbytes <= self._capacity

    def add(self, rank_slice: RankSlice) -> None:
        """Copy a slice into the buffer."""
        values = rank_slice.values
        nbytes = values.numel() * values.element_size()
        buffer = self._room(nbytes)
        target = buffer[self._used : self._used + nbytes].view(values.dtype).view(values.shape)
        target.copy_(values)
        dtype = str(values.dtype).removeprefix("torch.")
        self.slices.append([rank_slice.name, list(rank_slice.start), list(values.shape), dtype, self._used])
        self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT

    def take(self) -> tuple[dict[str, Any], Tensor]:
        """Return the fields of the command and its data, and empty the buffer."""
        command: dict[str, Any] = {"slices": self.slices}
        data = torch.empty(0, dtype=torch.uint8)
        if self.slices and self._file is not None:
            command |= {"file": self._file, "bytes": self._used}
        elif self.slices:
            assert self._buffer is not None
            data = self._buffer[: self._used]
            if data.is_cuda:
                torch.cuda.current_stream(data.device).synchronize()
        self.slices, self._used = [], 0
        return command, data

    def close(self) -> None:
        """Free the memory."""
        self._buffer = None
        if self._file is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._file)
            self._file = None

    def _room(self, nbytes: int) -> Tensor:
        if self._buffer is None or self._used + nbytes > len(self._buffer):
            assert not self._used, "a staging buffer is sent before it overflows"
            self.close()
            self._capacity = max(self._capacity, nbytes)
            self._buffer = self._allocate()
        return self._buffer

    def _allocate(self) -> Tensor:
        if self._device.type != "cpu" and self._shared:
            with ipc_memory():
                return torch.empty(self._capacity, dtype=torch.uint8, device=self._device)
        if not self._shared or not os.path.isdir(SHARED_FOLDER):
            return torch.empty(self._capacity, dtype=torch.uint8)
        descriptor, self._file = tempfile.mkstemp(prefix="megarl-weights-", dir=SHARED_FOLDER)
        try:
            os.ftruncate(descriptor, self._capacity)
            return torch.frombuffer(mmap.mmap(descriptor, self._capacity), dtype=torch.uint8)
        finally:
            os.close(descriptor)


class TensorSender:
    """Sends each rank its slices, through megarl's loader in SGLang's ranks.

    Args:
        shards: shards of the model.
        call: makes a control call.
        replies: listener for the ranks' replies.
        devices: devices of the ranks.
        shared: whether the ranks run on this host.
        bucket_bytes: bytes collected per rank before they are sent.
    """

    needs_session = True

    def __init__(
        self,
        shards: SGLangShards,
        call: ControlCaller,
        replies: ReplyListener,
        devices: list[torch.device],
        shared: bool,
        bucket_bytes: int,
    ) -> None:
        self._shards, self._call, self._replies = shards, call, replies
        self._stagings = [StagingBuffer(device, shared, bucket_bytes) for device in devices]
        self._command_ids = itertools.count()

    @property
    def staging_bytes(self) -> int:
        """Memory of all ranks' buffers, which live until the end of an update."""
        return sum(staging.nbytes for staging in self._stagings)

    def begin(self, version: int) -> None:
        """Begin an update in every rank, and compare its parameters with the expected ones.

        Raises:
            WeightSyncError: they differ, or a rank refuses.
        """
        self.abandon()
        params = [
            {"params": {name: [t.shape, t.live] for name, t in self._shards.target_params(rank).items()}}
            for rank in range(self._shards.tp)
        ]
        self.command("begin", params, version=version)

    def put(self, rank: int, name: str, start: tuple[int, ...], values: Tensor) -> None:
        """Copy a slice, and send all staging buffers when the rank's one is full."""
        for rank_slice in self._shards.rank_slices(rank, name, start, values):
            staging = self._stagings[rank_slice.rank]
            if staging.slices and not staging.fits(rank_slice.values.numel() * rank_slice.values.element_size()):
                self.flush()
            staging.add(rank_slice)

    def end(self, version: int) -> None:
        """Send the rest and end the update.

        Raises:
            WeightSyncError: a rank refuses, or misses elements.
        """
        self.flush()
        self.command("end", [{} for _ in self._stagings], name=str(version), version=version)
        self.abandon()

    def abandon(self) -> None:
        """Drop unsent slices and free the memory."""
        for staging in self._stagings:
            staging.take()
            staging.close()
        return_cached_memory()

    def close(self) -> None:
        """No connection to close."""

    def command(
        self,
        action: str,
        fields: list[dict[str, Any]],
        data: list[Tensor] | None = None,
        name: str | None = None,
        **common: Any,
    ) -> dict[int, Reply]:
        """Send a command to every rank and return the replies.

        Args:
            action: action of the loader.
            fields: fields of the command by rank.
            data: data by rank.
            name: new name of the weights in SGLang, which then empties its caches.
            common: fields for all ranks.

        Raises:
            WeightSyncError: SGLang or a rank refuses.
        """
        command_id = next(self._command_ids)
        payloads = []
        for rank, rank_fields in enumerate(fields):
            command = {
                "action": action,
                "command_id": command_id,
                "rank": rank,
                "to": self._replies.to,
                **common,
                **rank_fields,
            }
            payloads.append(_serialized(json.dumps(command), torch.empty(0) if data is None else data[rank]))
        outcome = self._call(
            "update_weights_from_tensor",
            serialized_named_tensors=payloads,
            load_format=LOADER,
            flush_cache=name is not None,
            weight_version=name,
        )
        if not outcome.success:
            raise WeightSyncError(f"SGLang refused to {action} weights: {outcome.message}")
        return self._replies.collect(command_id, set(range(len(fields))), REPLY_S)

    def flush(self) -> None:
        """Send the collected slices."""
        if not any(staging.slices for staging in self._stagings):
            return
        taken = [staging.take() for staging in self._stagings]
        self.command("write", [command for command, _ in taken], [data for _, data in taken])


def _serialized(command: str, data: Tensor) -> bytes:
    """Serialize a command and its data for SGLang's ranks: GPU memory as a handle, host memory as bytes."""
    if data.is_cuda:
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
        handle: bytes = MultiprocessingSerializer.serialize([(command, data)])
        return handle
    # Without the clone pickle would include the whole memory of the slice.
    return pickle.dumps([(command, data.clone())])
