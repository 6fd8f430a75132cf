"""Process groups of a role (gloo on CPU or NCCL on CUDA), collective steps, and waits without a collective.

The only module that chooses backend and device. NCCL aborts a rank that waits in a collective beyond the timeout of its
process group, but files take as long as the storage needs: ranks meet at the rendezvous store first (``StoreBarrier``).
"""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, distributed_c10d
from torch.distributed.distributed_c10d import _get_default_store

from megarl.base.allocators import keep_freed_memory
from megarl.base.errors import CheckpointError, ConfigError, MegarlError, ResourceError
from megarl.base.rendezvous import join_rendezvous
from megarl.megatron.runtime import cuda_on_cpu
from megarl.megatron.runtime.versions import transformer_engine_error
from megarl.models import ParallelLayout, RankCoordinate

# Warnings of Megatron that appear in every run and need no action. It warns of missing GPU libraries file by file;
# MegatronEngine.describe() reports the kernels in use once.
for _message in (
    r"(Transformer Engine|Apex)\b.*",
    r"The \.grad attribute of a Tensor that is not a leaf",
    r"`torch\.distributed\.(reduce_scatter|all_gather_into)_tensor` is deprecated",
):
    warnings.filterwarnings("ignore", message=_message)

transformer_engine_error()
with cuda_on_cpu.lean_import():
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import gpt_layer_specs, gpt_model  # noqa: F401
    from megatron.core.optimizer import distrib_optimizer  # noqa: F401

logger = logging.getLogger(__name__)

DEVICES = ("auto", "cpu", "cuda")
LONGEST_WAIT_S = 24 * 3600.0
"""A wait ends with an error after a day; a dead rank ends the job earlier."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.5
_torch: Any = distributed_c10d
_gloo: Any = ProcessGroupGloo  # torch's type stubs lack its options
_T = TypeVar("_T")


@dataclass(frozen=True)
class Runtime:
    """One process's rank, device and process groups.

    Attributes:
        tp_group: tensor-parallel ranks, which share each layer with this one.
        pp_group: the pipeline of this rank's stage.
        dp_group: data-parallel ranks: same weights, other rows.
        cp_group: context-parallel ranks, which share each sequence with this one.
        dp_cp_group: all ranks with the same weights.
        etp_group: expert-tensor-parallel ranks, which share each expert with this one.
        barrier: waits without a time limit of collectives.
    """

    layout: ParallelLayout
    rank: int
    device: torch.device
    tp_group: dist.ProcessGroup = field(repr=False)
    pp_group: dist.ProcessGroup = field(repr=False)
    dp_group: dist.ProcessGroup = field(repr=False)
    cp_group: dist.ProcessGroup = field(repr=False)
    dp_cp_group: dist.ProcessGroup = field(repr=False)
    etp_group: dist.ProcessGroup = field(repr=False)
    barrier: StoreBarrier = field(repr=False)

    @property
    def coordinate(self) -> RankCoordinate:
        """Ranks within the tensor-, data-, pipeline- and context-parallel groups."""
        return self.layout.coordinate(self.rank)

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes outputs and losses."""
        return self.coordinate.pp == self.layout.pp - 1


def init_runtime(
    layout: ParallelLayout,
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    *,
    device: str = "auto",
    seed: int = 1,
    timeout_s: float = 600.0,
) -> Runtime:
    """Join the process group of a role and set Megatron's parallel state; once per process.

    Args:
        master_port: free port; rank 0 listens on it, on ``master_addr`` only.
        device: ``cpu``, ``cuda`` or ``auto`` (CUDA if available).
        seed: seed of the role; tensor-parallel ranks and stages derive theirs from it like Megatron.
        timeout_s: seconds after which an incomplete collective fails; reading and writing files may take longer.

    Raises:
        ConfigError: the layout does not have ``world_size`` processes, or ``device`` is unknown.
        ResourceError: CUDA is requested and not available, or rank 0 cannot listen on the address.
    """
    if layout.world_size != world_size:
        text = f"layout {layout.describe()} has {layout.world_size} processes, but {world_size} were started"
        raise ConfigError(text, code="layout.world-size")
    torch_device = _choose_device(device, rank)
    # Lets Megatron overlap collectives with matrix products; CUDA reads it at its start.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
        backend = "nccl"
    else:
        # More threads than cores per process slow small matrices down.
        torch.set_num_threads(1)
        keep_freed_memory()
        cuda_on_cpu.install()
        backend = "gloo"
    timeout = timedelta(seconds=timeout_s)
    store = join_rendezvous(master_addr, master_port, rank, world_size, timeout)
    with one_gloo_device(), cuda_on_cpu.active():
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.expert_tp,
            distributed_timeout_minutes=max(1, round(timeout_s / 60)),
            # Only the optimizer's own checkpoints use them; gloo binds to the host name's address, often 127.0.1.1.
            create_gloo_process_groups=False,
        )
        stage_seed = seed + 100 * layout.coordinate(rank).pp  # as Megatron's own training script does
        torch.manual_seed(stage_seed)
        tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)
    logger.info("rank %d of %d: %s on %s with %s", rank, world_size, layout.describe(), torch_device, backend)
    return Runtime(
        layout,
        rank,
        torch_device,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(),
        cp_group=parallel_state.get_context_parallel_group(),
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        etp_group=parallel_state.get_expert_tensor_parallel_group(),
        barrier=StoreBarrier(rank, world_size),
    )


def shutdown_runtime() -> None:
    """Leave the process group; the process may join another layout afterwards."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        # A model's cycles keep its groups alive, and each group's threads with it.
        gc.collect()


def _choose_device(device: str, rank: int) -> torch.device:
    if device not in DEVICES:
        raise ConfigError(f"device={device!r} must be one of {', '.join(DEVICES)}", code="launch.unknown-device")
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ResourceError("device='cuda' but torch finds no CUDA device; use 'cpu' or 'auto'", code="launch.no-cuda")
    if device == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def all_ranks_or_raise(runtime: Runtime, action: Callable[[], _T], doing: str) -> _T:
    """Run ``action`` on every rank; if it raises on any rank, raise on all. Communicates.

    Args:
        action: must not communicate.

    Raises:
        CheckpointError: on every rank, if the action raised on any; names the rank and the reason.
    """
    failure, result = None, None
    try:
        result = action()
    except MegarlError as error:
        failure = error.text, error.code
    except Exception as error:
        failure = f"{type(error).__name__}: {error}", "checkpoint.rank-failed"
    failures: list[tuple[str, str] | None] = [None] * runtime.layout.world_size
    dist.all_gather_object(failures, failure)
    for rank, reason in enumerate(failures):
        if reason is not None:
            text, code = reason
            raise CheckpointError(f"{doing} failed on rank {rank}: {text}", code=code)
    return cast(_T, result)  # no failure: the action has returned


def gather_apply_scatter(runtime: Runtime, value: Any, action: Callable[[list[Any]], Sequence[_T]], doing: str) -> _T:
    """Gather a value of every rank on rank 0, apply ``action``, and scatter its results; communicates.

    Args:
        action: maps the values, by rank, to the results, by rank; runs on rank 0.

    Raises:
        CheckpointError: on every rank, if ``action`` raised.
    """
    values: list[Any] | None = [None] * runtime.layout.world_size if runtime.rank == 0 else None
    dist.gather_object(value, values, dst=0)
    results = all_ranks_or_raise(runtime, lambda: None if values is None else list(action(values)), doing)
    received: list[Any] = [None]
    dist.scatter_object_list(received, results, src=0)
    part: _T = received[0]
    return part


@dataclass(frozen=True)
class StoreBarrier:
    """Lets all ranks of a role wait for each other, or for their turn, without a collective.

    All ranks must make the same calls in the same order.
    """

    rank: int
    size: int
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def wait_for_all(self) -> None:
        """Wait until every rank has called this; raises CheckpointError after the longest wait."""
        key = f"megarl/all/{next(self._numbers)}"
        if self.size > 1:
            store = _get_default_store()
            if store.add(f"{key}/arrived", 1) == self.size:
                store.set(f"{key}/done", "")
            _wait_for_key(store, f"{key}/done")

    def turns(self) -> RankTurns:
        """Create a series of turns, in which rank 0 calls the other ranks one after the other."""
        return RankTurns(self.rank, f"megarl/turns/{next(self._numbers)}")


def _wait_for_key(store: dist.Store, key: str, failed: str = "") -> None:
    """Wait for a key; raise CheckpointError if the key ``failed`` appears, or nothing does within the longest wait.

    The pauses grow, because the other rank may be writing a large file.
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

    def __init__(self, rank: int, key: str) -> None:
        self._rank, self._key, self._taken = rank, key, 0

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
        _wait_for_key(store, key, f"{self._key}/failed")
        store.delete_key(key)


@contextmanager
def one_gloo_device() -> Iterator[None]:
    """Let the gloo groups created in the context share this process's network device.

    By default each group creates its own: a listening socket and a thread that wakes up a hundred times a second.
    Megatron creates more than fifteen groups per process.
    """
    _torch.ProcessGroupGloo = _OnSharedDevice
    try:
        yield
    finally:
        _torch.ProcessGroupGloo = _gloo


class _AnyGloo(type):
    """torch asks whether a group is an instance of the class that creates them."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, ProcessGroupGloo)


class _OnSharedDevice(metaclass=_AnyGloo):
    """Stands for ``ProcessGroupGloo`` while torch creates a group."""

    def __new__(cls, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        options = _gloo._Options()
        options._devices = [_gloo_device(os.environ.get("GLOO_SOCKET_IFNAME"))]
        options._timeout = timeout
        return _gloo(store, rank, size, options)


@functools.cache
def _gloo_device(interface: str | None) -> Any:
    """The device of a network interface, which torch reads from the environment for each group.

    Groups connect when they are created, also with ``TORCH_GLOO_LAZY_INIT=1``: groups that share a device and connect
    at their first call hang (torch 2.13, all-reduce over Megatron's embedding group).
    """
    return _gloo.create_default_device(lazy_init=False)
