"""Requirements of a run for each machine, from its configuration or from defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megarl.base.errors import MegarlError
from megarl.base.formatting import GIB, MIB
from megarl.config import GenerateConfig, ScoredJobConfig, TrainConfig
from megarl.config.schema.jobs import CRITIC, JobConfig, SupervisedConfig, own_pools
from megarl.ops.plan import MemoryPlan, plan_memory, planned_job

RAY_PORTS = (6379, 8265)
"""Default ports of Ray's head: the cluster's address and the dashboard."""

_HOST_BYTES = {"cpu": 1 * GIB, "cuda": 4 * GIB}  # of a process besides the plan's: torch, CUDA's context, buffers
_OBJECT_STORE_BYTES = 200 * MIB


@dataclass(frozen=True)
class Needs:
    """Requirements of a run for one machine.

    Attributes:
        device: ``cpu``, ``cuda``, or ``auto`` (GPUs if present).
        devices: devices per machine; None = all that are present.
        nodes: number of machines of the run, those of roles with devices of their own included.
        trainer_nodes: number of machines that write a checkpoint.
        checkpoint_dir: folder of the checkpoints; it may be missing.
        checkpoint_bytes: size of one checkpoint of the whole run; None = unknown.
        models: Hugging Face folders that must be readable.
        readable: data files and folders that must be readable.
        engine: name of the rollout engine; None without one.
        trackers: entries of ``trainer.logger``.
        shared_memory_bytes: upper limit of the shared memory of all processes of this machine.
        host_bytes: host memory.
        ports: ports that must be free.
        watched_ports: ports that cause a warning if they are in use.
        peers: names of the other machines; they must resolve.
        quick: skip the slow checks (disk speed, all-reduce).
    """

    device: str = "auto"
    devices: int | None = None
    nodes: int = 1
    trainer_nodes: int = 1
    checkpoint_dir: str | None = None
    checkpoint_bytes: int | None = None
    models: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    engine: str | None = None
    trackers: tuple[str, ...] = ()
    shared_memory_bytes: int = 2 * 256 * MIB + _OBJECT_STORE_BYTES
    host_bytes: int = 4 * GIB
    ports: tuple[int, ...] = ()
    watched_ports: tuple[int, ...] = RAY_PORTS
    peers: tuple[str, ...] = ()
    quick: bool = False


def needs_of(config: JobConfig) -> Needs:
    """Derive the requirements of a job for each of its machines.

    Memory and checkpoint are those of the plan, and unknown if a model's ``config.json`` cannot be read, which
    :func:`check_folders` reports.
    """
    trainer = config.trainer
    pools = own_pools(config)
    devices = max([trainer.n_gpus_per_node, *(pool.n_gpus_per_node or 1 for pool in pools.values())])
    nodes = trainer.nnodes + sum(pool.nnodes for pool in pools.values())
    # The critic writes its part of a checkpoint on its nodes.
    writers = trainer.nnodes + (pools[CRITIC].nnodes if CRITIC in pools else 0)
    needs = Needs(device=trainer.device, devices=devices, nodes=nodes, trainer_nodes=writers)
    plan = _memory(config)
    process = _HOST_BYTES["cpu" if trainer.device == "cpu" else "cuda"] * devices
    needs = replace(needs, host_bytes=process + (plan.host_bytes if plan else 0))
    if isinstance(config, TrainConfig):
        buckets = 2 * config.sync.bucket_megabytes * MIB * devices
        needs = replace(needs, shared_memory_bytes=buckets + _OBJECT_STORE_BYTES)
    if saves := getattr(trainer, "save_freq", -1) > 0:
        needs = replace(needs, checkpoint_dir=str(getattr(trainer, "default_local_dir", None)))
    files = [*getattr(config.data, "train_files", []), *(getattr(config.data, "val_files", None) or [])]
    return replace(
        needs,
        checkpoint_bytes=plan.checkpoint_bytes if plan and saves else None,
        models=tuple(dict.fromkeys(_models(config))),
        readable=tuple(file for file in files if not set("*?[$~") & set(file)),
        engine=None if isinstance(config, SupervisedConfig) else config.actor_rollout_ref.rollout.name,
        trackers=() if isinstance(config, GenerateConfig) else tuple(trainer.logger),
    )


def _memory(config: JobConfig) -> MemoryPlan | None:
    """Plan the memory of a job that trains; None if a model cannot be read or has no such layout."""
    if not isinstance(config, TrainConfig | SupervisedConfig):
        return None
    try:
        return plan_memory(planned_job(config))
    except MegarlError:
        return None


def _models(config: JobConfig) -> list[str]:
    if isinstance(config, SupervisedConfig):
        return [config.model.path]
    paths = [
        config.actor_rollout_ref.model.path,
    ]
    if isinstance(config, TrainConfig) and config.uses_critic:
        paths.append(str(config.critic.model.path))
    if isinstance(config, ScoredJobConfig) and config.reward.model.enable:
        paths.append(str(config.reward.model.path))
    return paths
