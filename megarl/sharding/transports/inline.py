"""Bytes inside the payload."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.sharding.transports.interface import MemoryKind, Region, TransportOptions, register_transport


class InlinePayload(NamedTuple):
    """The bytes themselves; under Ray they lie in its object store."""

    data: np.ndarray


@register_transport("inline")
class InlineTransport:
    """Works wherever the payload itself arrives; the channel copies the bytes once more on the way."""

    memory: MemoryKind = "host"
    peak_bytes = 0

    def __init__(self, options: TransportOptions) -> None:
        pass

    def open(self, session: int) -> None:
        """Nothing to prepare."""

    def send(self, region: Region, dst_rank: int, tag: int) -> InlinePayload:
        """See :meth:`Transport.send`."""
        return InlinePayload(region.data.numpy())

    def finish(self, payload: InlinePayload) -> None:
        """Nothing to wait for: the channel took the bytes before the payload arrived."""

    def receive(self, payloads: Mapping[int, InlinePayload]) -> Iterator[tuple[int, Tensor]]:
        """See :meth:`Transport.receive`."""
        for rank, payload in payloads.items():
            with warnings.catch_warnings():
                # An array from an object store is read-only, of which torch warns; nobody writes to it here.
                warnings.filterwarnings("ignore", message=".*not writable.*")
                yield rank, torch.from_numpy(payload.data)

    def settle(self) -> None:
        """Nothing to wait for."""

    def end(self, completed: bool) -> None:
        """Nothing to give back."""
