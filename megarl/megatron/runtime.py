"""Joins a process to its role's process group. The one place that chooses gloo and CPU, or NCCL and CUDA."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from megarl.errors import ConfigError, ResourceError
from megarl.megatron import cuda_on_cpu
from megarl.megatron.host_memory import keep_freed_memory
from megarl.models import ParallelLayout, RankCoordinate

# What Megatron makes torch and itself say in every run and nobody can act on. That GPU libraries are absent is told
# file by file on import; spec.py logs once what is used instead.
for _message in (
    r"(Transformer Engine|Apex)\b.*",
    r"The \.grad attribute of a Tensor that is not a leaf",
    r"`torch\.distributed\.(reduce_scatter|all_gather_into)_tensor` is deprecated",
):
    warnings.filterwarnings("ignore", message=_message)

with cuda_on_cpu.uncompiled():
    from megatron.core import parallel_state, tensor_parallel

logger = logging.getLogger(__name__)

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Runtime:
    """One process's place in its role.

    Attributes:
        layout: parallel sizes of the role.
        rank: rank in the role.
        device: where tensors of this process live.
        tp_group: the ranks that share each layer with this one.
        pp_group: the pipeline that this rank is a stage of.
        dp_group: the ranks that hold the same weights as this one and see other data.
        cp_group: the ranks that share each sequence with this one.
        dp_cp_group: the ranks that hold the same weights as this one, whatever they see.
        ep_group: the ranks that divide the experts with this one.
        etp_group: the ranks that share each expert with this one.
        edp_group: the ranks that hold the same experts as this one.
    """

    layout: ParallelLayout
    rank: int
    device: torch.device
    tp_group: dist.ProcessGroup = field(repr=False)
    pp_group: dist.ProcessGroup = field(repr=False)
    dp_group: dist.ProcessGroup = field(repr=False)
    cp_group: dist.ProcessGroup = field(repr=False)
    dp_cp_group: dist.ProcessGroup = field(repr=False)
    ep_group: dist.ProcessGroup = field(repr=False)
    etp_group: dist.ProcessGroup = field(repr=False)
    edp_group: dist.ProcessGroup = field(repr=False)

    @property
    def coordinate(self) -> RankCoordinate:
        """Ranks within the tensor-, data-, pipeline- and context-parallel groups."""
        return self.layout.coordinate(self.rank)

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.coordinate.pp == 0

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
    """Joins the process group of a role and sets Megatron's parallel state; once per process.

    Args:
        layout: parallel sizes of the role.
        rank: this process's rank.
        world_size: number of processes that will join.
        master_addr: host of rank 0.
        master_port: free port there; rank 0 listens on it.
        device: ``cpu``, ``cuda`` or ``auto`` (CUDA where there is one).
        seed: seed of the role; tensor-parallel ranks and stages derive theirs from it as Megatron does.
        timeout_s: seconds after which a collective that some rank does not join fails.

    Raises:
        ConfigError: the layout does not have ``world_size`` processes, or ``device`` is unknown.
        ResourceError: CUDA is asked for and there is none.
    """
    if layout.world_size != world_size:
        raise ConfigError(
            f"layout {layout.describe()} has {layout.world_size} processes, but {world_size} were started"
        )
    chosen = _choose_device(device, rank)
    # Lets Megatron overlap its collectives with matrix products; read when CUDA starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        backend = "nccl"
    else:
        # More threads than processes' cores make small matrices slower, not faster.
        torch.set_num_threads(1)
        keep_freed_memory()
        cuda_on_cpu.install()
        backend = "gloo"
    dist.init_process_group(
        backend,
        init_method=f"tcp://{master_addr}:{master_port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    with cuda_on_cpu.active():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.expert_tp,
            distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        )
        stage_seed = seed + 100 * layout.coordinate(rank).pp  # as Megatron's own training script does
        torch.manual_seed(stage_seed)
        tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)
    logger.info("rank %d of %d: %s on %s with %s", rank, world_size, layout.describe(), chosen, backend)
    return Runtime(
        layout,
        rank,
        chosen,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
        dp_group=parallel_state.get_data_parallel_group(),
        cp_group=parallel_state.get_context_parallel_group(),
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        ep_group=parallel_state.get_expert_model_parallel_group(),
        etp_group=parallel_state.get_expert_tensor_parallel_group(),
        edp_group=parallel_state.get_expert_data_parallel_group(),
    )


def shutdown_runtime() -> None:
    """Leaves the process group; another layout may be joined after it."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        # A model's cycles keep its groups alive, and each group's threads with it.
        gc.collect()


def _choose_device(device: str, rank: int) -> torch.device:
    if device not in DEVICES:
        raise ConfigError(f"device={device!r} must be one of {', '.join(DEVICES)}")
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ResourceError("device='cuda' but torch finds no CUDA device; use 'cpu' or 'auto'")
    if device == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())
