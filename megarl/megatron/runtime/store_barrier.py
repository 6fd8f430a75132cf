"""Waits of ranks for each other through the rendezvous store, for work that takes longer than a collective may.

A rank that waits in a collective of NCCL is aborted after the timeout of its process group. Reading and writing files
takes as long as the storage needs, so ranks meet here first, and only then in a collective.
"""

from __future__ import annotations

import itertools
import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megarl.base.errors import CheckpointError

LONGEST_WAIT_S = 24 * 3600.0
"""A wait ends with an error after a day; a dead rank ends the job earlier."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.5


class StoreBarrier:
    """Lets all ranks of a role wait for each other, or for their turn, without a collective.

    All ranks must make the same calls in the same order.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._numbers = itertools.count()

    def wait_for_all(self) -> None:
        """Wait until every rank has called this; raises CheckpointError after the longest wait."""
        key = f"megarl/all/{next(self._numbers)}"
        if self._size > 1:
            store = _get_default_store()
            if store.add(f"{key}/arrived", 1) == self._size:
                store.set(f"{key}/done", "")
            self.wait_for_key(store, f"{key}/done")

    def turns(self) -> RankTurns:
        """Create a series of turns, in which rank 0 calls the other ranks one after the other."""
        return RankTurns(self, self._rank, f"megarl/turns/{next(self._numbers)}")

    def wait_for_key(self, store: dist.Store, key: str, failed: str = "") -> None:
        """Wait for a key; the pauses grow, because the other rank may be writing a large file.

        Raises:
            CheckpointError: the key ``failed`` appeared, or nothing did within the longest wait.
        """
        pause, end = _FIRST_PAUSE_S, time.monotonic() + LONGEST_WAIT_S
        while not store.check([key]):
            if failed and store.check([failed]):
                raise CheckpointError(f"rank 0 failed: {store.get(failed).decode()}", code="checkpoint.rank-failed")
            if time.monotonic() > end:
                text = f"a rank waited {LONGEST_WAIT_S:.0f} s for the others"
                raise CheckpointError(text, code="checkpoint.rank-timeout")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


class RankTurns:
    """Calls of rank 0 to other ranks, which wait for them without a collective; see :meth:`StoreBarrier.turns`."""

    def __init__(self, barrier: StoreBarrier, rank: int, key: str) -> None:
        self._barrier = barrier
        self._rank = rank
        self._key = key
        self._taken = 0

    def call(self, rank: int) -> None:
        """Rank 0: release a rank from the barrier."""
        store = _get_default_store()
        store.set(f"{self._key}/{rank}/{store.add(f'{self._key}/{rank}', 1)}", "")

    def fail(self, reason: str) -> None:
        """Rank 0: no turns follow; the other ranks raise ``reason``."""
        _get_default_store().set(f"{self._key}/failed", reason)

    def wait(self) -> None:
        """Wait until rank 0 releases this rank; raises if rank 0 failed, or did not within the longest wait."""
        self._taken += 1
        store, key = _get_default_store(), f"{self._key}/{self._rank}/{self._taken}"
        self._barrier.wait_for_key(store, key, f"{self._key}/failed")
        store.delete_key(key)
