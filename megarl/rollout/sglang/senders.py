"""How placed slabs reach SGLang's ranks: through memory that they share, or inside the request."""

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

from megarl.errors import WeightSyncError
from megarl.rollout.sglang.backend import CallServer
from megarl.rollout.sglang.loader import ALIGNMENT
from megarl.rollout.sglang.placement import Placed, Placement
from megarl.rollout.sglang.replies import Replies, Reply
from megarl.rollout.sglang.server_args import LOADER

SHARED_FOLDER = "/dev/shm"
REPLY_S = 60.0
"""Seconds for an answer after SGLang has said that the order was carried out."""


class Staging:
    """Bytes for one rank: slabs are laid one behind the other, and sent together.

    Args:
        device: where the rank holds its parameters.
        shared: the rank runs on this host and reads this memory itself.
        capacity: bytes to begin with.
    """

    def __init__(self, device: torch.device, shared: bool, capacity: int) -> None:
        self._device, self._shared, self._capacity = device, shared, capacity
        self._file: str | None = None
        self._buffer: Tensor | None = None
        self.slabs: list[list[Any]] = []
        self._used = 0

    def fits(self, nbytes: int) -> bool:
        """Whether so many bytes more can be taken."""
        return self._used + nbytes <= self._capacity

    def add(self, placed: Placed) -> None:
        """Copies a slab."""
        values = placed.values
        nbytes = values.numel() * values.element_size()
        buffer = self._room(nbytes)
        where = buffer[self._used : self._used + nbytes].view(values.dtype).view(values.shape)
        where.copy_(values)
        dtype = str(values.dtype).removeprefix("torch.")
        self.slabs.append([placed.name, list(placed.start), list(values.shape), dtype, self._used])
        self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT

    def take(self) -> tuple[dict[str, Any], Tensor]:
        """What is to be sent: fields of the order, and its data; afterwards the staging is empty."""
        order: dict[str, Any] = {"slabs": self.slabs}
        data = torch.empty(0, dtype=torch.uint8)
        if self.slabs and self._file is not None:
            order |= {"file": self._file, "bytes": self._used}
        elif self.slabs:
            assert self._buffer is not None
            data = self._buffer[: self._used]
            if data.is_cuda:
                torch.cuda.current_stream(data.device).synchronize()
        self.slabs, self._used = [], 0
        return order, data

    def close(self) -> None:
        """Gives the memory back."""
        self._buffer = None
        if self._file is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._file)
            self._file = None

    def _room(self, nbytes: int) -> Tensor:
        if self._buffer is None or self._used + nbytes > len(self._buffer):
            assert not self._used, "a staging is sent before it overflows"
            self.close()
            self._capacity = max(self._capacity, nbytes)
            self._buffer = self._allocate()
        return self._buffer

    def _allocate(self) -> Tensor:
        if self._device.type != "cpu" and self._shared:
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
    """Gives each rank its own slabs, through the loader that SGLang's ranks run.

    Args:
        placement: of the model.
        call: makes a control call.
        replies: where the ranks answer.
        devices: of the ranks.
        shared: they run on this host.
        bucket_bytes: bytes collected per rank before they are sent.
    """

    needs_session = True

    def __init__(
        self,
        placement: Placement,
        call: CallServer,
        replies: Replies,
        devices: list[torch.device],
        shared: bool,
        bucket_bytes: int,
    ) -> None:
        self._placement, self._call, self._replies = placement, call, replies
        self._stagings = [Staging(device, shared, bucket_bytes) for device in devices]
        self._tickets = itertools.count()

    def begin(self, version: int) -> None:
        """Opens an update in every rank, whose parameters are compared with those that will be sent.

        Raises:
            WeightSyncError: they are others; a rank refuses.
        """
        self.abandon()
        params = [
            {"params": {name: [t.shape, t.live] for name, t in self._placement.targets(rank).items()}}
            for rank in range(self._placement.tp)
        ]
        self.order("begin", params, version=version)

    def put(self, rank: int, name: str, start: tuple[int, ...], values: Tensor) -> None:
        """Takes a copy of a slab, and sends what there is when its rank's share of a bucket is full."""
        for placed in self._placement.place(rank, name, start, values):
            staging = self._stagings[placed.rank]
            if staging.slabs and not staging.fits(placed.values.numel() * placed.values.element_size()):
                self.flush()
            staging.add(placed)

    def end(self, version: int) -> None:
        """Sends the rest and closes the update.

        Raises:
            WeightSyncError: a rank refuses or misses something.
        """
        self.flush()
        self.order("end", [{} for _ in self._stagings], name=str(version), version=version)
        self.abandon()

    def abandon(self) -> None:
        """Drops what is not sent, and gives memory back."""
        for staging in self._stagings:
            staging.take()
            staging.close()

    def close(self) -> None:
        """There is no connection of its own to end."""

    def order(
        self,
        action: str,
        fields: list[dict[str, Any]],
        data: list[Tensor] | None = None,
        name: str | None = None,
        **common: Any,
    ) -> dict[int, Reply]:
        """Gives every rank an order and returns the answers.

        Args:
            action: of the loader.
            fields: of the order, by rank.
            data: by rank.
            name: SGLang calls the weights so from now on; its caches are emptied then.
            common: fields for all.

        Raises:
            WeightSyncError: SGLang or a rank refuses.
        """
        ticket = next(self._tickets)
        payloads = []
        for rank, own in enumerate(fields):
            order = {"action": action, "ticket": ticket, "rank": rank, "to": self._replies.to, **common, **own}
            payloads.append(_serialized(json.dumps(order), torch.empty(0) if data is None else data[rank]))
        outcome = self._call(
            "update_weights_from_tensor",
            serialized_named_tensors=payloads,
            load_format=LOADER,
            flush_cache=name is not None,
            weight_version=name,
        )
        if not outcome.success:
            raise WeightSyncError(f"SGLang refused to {action} weights: {outcome.message}")
        return self._replies.collect(ticket, set(range(len(fields))), REPLY_S)

    def flush(self) -> None:
        """Sends what has been taken in so far."""
        if not any(staging.slabs for staging in self._stagings):
            return
        taken = [staging.take() for staging in self._stagings]
        self.order("write", [order for order, _ in taken], [data for _, data in taken])


def _serialized(order: str, data: Tensor) -> bytes:
    """An order and its data as SGLang's ranks read them: memory of a GPU as a handle, other memory as its bytes."""
    if data.is_cuda:
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
        return MultiprocessingSerializer.serialize([(order, data)])
    # A slice would bring the whole of its memory along.
    return pickle.dumps([(order, data.clone())])
