"""Out-of-memory vote of a model pass: all ranks agree to repeat the pass, or the run ends.

A rank that runs out of memory leaves its pass, while its peers may wait for it in a collective. The pass can be
repeated only if no rank waits:

- Data-parallel ranks compute alone until their gradients are summed. They vote before that sum; if it overlaps with
  the backward pass, before the last micro-batch.
- Ranks that share layers or sequences (tensor, context, expert parallelism) must have left the pass between the same
  two collectives. They compare how many collectives each process group has started.
- Pipeline stages wait for each other's activations, so nothing is repeated.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.distributed_c10d import _get_default_store, _world

from megarl.base.allocators import return_cached_memory
from megarl.base.errors import MegarlError
from megarl.megatron.runtime.process_groups import Runtime

PEERS_WAIT_S = 30.0
"""Seconds in which peers that share layers must run out of memory too; otherwise they wait in a collective."""
_PAUSE_S = 0.02
_T = TypeVar("_T")


class DeviceMemoryError(MegarlError):
    """A rank ran out of device memory in a pass of the model.

    Attributes:
        repeatable: the error was raised on all ranks, and each can repeat the pass. Otherwise peers may hang in a
            collective, and the process must end.
    """

    def __init__(self, message: str, *, repeatable: bool) -> None:
        super().__init__(message, code="engine.device-memory")
        self.repeatable = repeatable


class OutOfMemoryVote:
    """Lets all ranks agree after each pass whether one ran out of memory; no pass is repeated unless ``enabled``."""

    def __init__(self, runtime: Runtime, *, enabled: bool) -> None:
        self._runtime = runtime
        self._obstacle = _obstacle(runtime, enabled)
        self._peers_wait_s = PEERS_WAIT_S
        self._has_voted = False
        self._random_states: _RandomStates

    @property
    def _votes(self) -> bool:
        return not self._obstacle

    def run(self, action: Callable[[], _T], clean_up: Callable[[], None], *, gathers_weights: bool) -> _T:
        """Run a pass; every rank of the role must call this in the same order. Communicates.

        Args:
            action: the pass; calls :meth:`agree` before peers depend on this rank, if that is before its end.
            clean_up: drops references to activations after an interrupted pass.
            gathers_weights: the pass gathers the weights of the last step over data-parallel ranks, which would wait
                for a rank that left.

        Raises:
            DeviceMemoryError: a rank ran out of device memory.
        """
        self._has_voted = False
        if self._votes:
            self._random_states = _RandomStates(self._runtime.device)
        try:
            result = action()
            self.agree()
            return result
        except torch.OutOfMemoryError as error:
            reason = str(error)
        # Only here, outside of the handler, no traceback keeps the activations alive.
        clean_up()
        raise self._failure(reason, gathers_weights)

    def agree(self) -> None:
        """Vote that this rank had enough memory; raises if another had not. Communicates once per pass."""
        if self._votes and not self._has_voted:
            self._has_voted = True
            if self._vote(failed=False):
                self._random_states.restore()
                raise DeviceMemoryError("another rank ran out of device memory", repeatable=True)

    def _failure(self, reason: str, gathers_weights: bool) -> DeviceMemoryError:
        """Free the memory of an interrupted pass, and let all ranks leave the pass if they can; returns the error."""
        gc.collect()
        return_cached_memory()
        cause = reason.split(" If reserved but")[0].strip().rstrip(".")  # without torch's advice on fragmentation
        text = f"rank {self._runtime.rank} ran out of device memory: {cause}"
        obstacle = self._obstacle
        if not obstacle and gathers_weights:
            obstacle = "with overlap_param_gather other ranks wait for its weights"
        elif not obstacle and self._has_voted:
            obstacle = "other ranks wait for its gradients, with overlap_grad_reduce during the last micro-batch"
        elif not obstacle and not self._peers_left_alike():
            obstacle = "ranks that share its layers, sequences or experts had enough memory and wait for it"
        if obstacle:
            return DeviceMemoryError(f"{text}.\nThe pass was not repeated: {obstacle}.", repeatable=False)
        self._vote(failed=True)
        self._random_states.restore()
        return DeviceMemoryError(text, repeatable=True)

    def _vote(self, *, failed: bool) -> bool:
        votes = torch.tensor(float(failed), device=self._runtime.device)
        if self._runtime.layout.world_size > 1:
            dist.all_reduce(votes, dist.ReduceOp.MAX)
        return bool(votes.item())

    def _peers_left_alike(self) -> bool:
        """Whether the ranks that this pass communicates with have left it as well, between the same collectives."""
        peers = [rank for rank in self._peers() if rank != self._runtime.rank]
        if not peers:
            return True
        own = {group.group_name: _collectives(group) for group in _world.pg_map}
        # Each pass ends with a collective of all ranks, the vote: their number identifies the pass.
        store, prefix = _get_default_store(), f"megarl/out_of_memory/{_collectives(dist.group.WORLD)}"
        store.set(f"{prefix}/{self._runtime.rank}", json.dumps(own))
        keys, end = [f"{prefix}/{rank}" for rank in peers], time.monotonic() + self._peers_wait_s
        while not store.check(keys):
            if time.monotonic() > end:
                return False
            time.sleep(_PAUSE_S)
        others = [json.loads(store.get(key)) for key in keys]
        return all(own[name] == other[name] for other in others for name in own.keys() & other.keys())

    def _peers(self) -> list[int]:
        """Ranks that this rank communicates with in a forward or backward pass, itself included."""
        layout = self._runtime.layout
        ranks = range(layout.world_size)
        if layout.ep > 1:  # experts are shared across data-parallel ranks
            return list(ranks)
        return [rank for rank in ranks if layout.coordinate(rank).dp == self._runtime.coordinate.dp]


def _obstacle(runtime: Runtime, enabled: bool) -> str:
    """The reason why no pass of a role can be repeated; empty if there is none."""
    if not enabled:
        return "trainer.repeat_out_of_memory is false"
    return "pipeline stages wait for each other" if runtime.layout.pp > 1 else ""


def _collectives(group: Any) -> int:
    """Number of collectives that this rank has started in a process group."""
    count: int = group._get_sequence_number_for_group()
    return count


class _RandomStates:
    """States of the generators that a pass may use; saved at construction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._megatron: dict[str, Any] = get_cuda_rng_tracker().get_states()

    def restore(self) -> None:
        torch.set_rng_state(self._host)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        get_cuda_rng_tracker().set_states(self._megatron)
